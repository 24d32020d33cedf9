/* Finding a file that was removed while processes have it open.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_CACHE_REMOVED_H
#define MN_CACHE_REMOVED_H

/* Looks in /proc for a descriptor that the parent of this process, its parent, or a further one has
 * of a removed file that had this name in the folder. Returns a descriptor of it, by an open file
 * description of its own, or -1. */
int
mn_cache_open_removed(int folder, const char *name);

#endif /* MN_CACHE_REMOVED_H */
