/* Checksums of what a cache file holds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * 64 bits against torn and foreign records, flipped bits and half-written data; not against an
 * attacker. Four lanes of multiply and rotate, in the manner of xxHash, so it runs at the speed at
 * which memory is read. The salt of the file is part of it: old bytes of another file do not pass.
 */
#ifndef MN_CACHE_CHECKSUM_H
#define MN_CACHE_CHECKSUM_H

#include <stdint.h>

#include "cache/mn_cache_records.h"

/* Of any bytes. A block of an entry's payload adds its offset to the salt. */
uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes);

/* Never 0, which is what fresh pages hold. */
uint64_t
mn_cache_seal(uint64_t salt, const struct mn_cache_head *head);

/* Of an entry whose data is not written yet; covers all but the checksum of checksums. */
uint64_t
mn_cache_seal_begun(uint64_t salt, const struct mn_cache_head *head);

#endif /* MN_CACHE_CHECKSUM_H */
