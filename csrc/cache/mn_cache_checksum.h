/* Checksums of the contents of a cache file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * They have 64 bits and find torn and foreign records, flipped bits and half-written data. They do
 * not resist an attacker. Four lanes of multiply and rotate, as in xxHash, run as fast as memory is
 * read. The salt of the file is part of each: old bytes of another file do not pass.
 */
#ifndef MN_CACHE_CHECKSUM_H
#define MN_CACHE_CHECKSUM_H

#include <stdint.h>

#include "cache/mn_cache_records.h"

/* Returns the checksum of any bytes. A block of an entry's payload adds its offset to the salt. */
uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes);

/* Returns the checksum of an entry's head. It is never 0, because fresh pages hold 0. */
uint64_t
mn_cache_seal(uint64_t salt, const struct mn_cache_head *head);

/* The same for an entry whose data is not written yet: covers all but the checksum of checksums. */
uint64_t
mn_cache_seal_begun(uint64_t salt, const struct mn_cache_head *head);

#endif /* MN_CACHE_CHECKSUM_H */
