/* mn_numpy.h - the NumPy C API under one name for all files of minato._core.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Define NO_IMPORT_ARRAY before including it everywhere but in mn_module.c.
 */
#ifndef MN_NUMPY_H
#define MN_NUMPY_H

#define PY_ARRAY_UNIQUE_SYMBOL mn_core_numpy_api
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#endif
