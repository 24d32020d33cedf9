/* Where everything lies in a cache file.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_CACHE_SHAPE_H
#define MN_CACHE_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/mn_cache_records.h"

/* Where everything lies in a file for that many bytes of data. False if it is too little. */
bool
mn_cache_shape_of(uint64_t bytes, uint64_t salt, struct mn_cache_shape *shape);

/* Whether a shape is what mn_cache_shape_of() could have made, and of a file that long. */
bool
mn_cache_shape_makes_sense(const struct mn_cache_shape *shape, uint64_t length);

#endif /* MN_CACHE_SHAPE_H */
