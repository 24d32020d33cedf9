/* The hook of fault points. See mn_fault.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_fault.h"

#include <stddef.h>

void (*mn_fault_hook)(const char *name) = NULL;
