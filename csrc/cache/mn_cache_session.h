/* Sessions of a cache file on a disk.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A session lasts from the first client to the last one. The first one decides, under the
 * header lock, whether the file is as the last one left it.
 *   The last one stores a time in the header, and gives it to the file (`stamp`). Every write by
 *   another program sets another one. The first client takes the stamp away. If the stamp is
 *   missing, every client was killed. If it is wrong, something else has written. If `home` is
 *   wrong, the system was started anew, perhaps after a power loss, or the file is a copy. In each
 *   case a new era begins, in which each entry is verified before its first use.
 *   After a power loss any page may be of any age, since nothing is synced. So if stamp or home are
 *   wrong, no segment is written on with the generation that it has. The current one is given up,
 *   and generations go on far above those that may be on the disk. The header's page is synced,
 *   so that no era and no generation is used twice: once for each boot, not for each value.
 */
#ifndef MN_CACHE_SESSION_H
#define MN_CACHE_SESSION_H

#include <sys/stat.h>

#include "cache/mn_cache_records.h"

/* The first client calls this, under the header lock. 0 or -errno. */
int
mn_cache_session_begin(const struct mn_cache_map *map, const struct stat *file);

/* The last client calls this, under the header lock, after all that it writes. */
void
mn_cache_session_end(int fd);

#endif /* MN_CACHE_SESSION_H */
