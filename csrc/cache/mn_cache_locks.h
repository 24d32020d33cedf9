/* Locks of a cache file that end with the process that holds them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   The kernel says which clients live. Each holds an open-file-description lock on a byte of its
 *   own; the byte is free as soon as the client is gone, however it went. No process id is compared
 *   and no /proc is read, so clients in different containers see each other, too.
 *
 * Why the lock of a dead client is never seen as held, and that of a live one never as free
 *   The lock ends when the last reference to the open file description ends. References are
 *   descriptors and mappings. A client therefore maps the file by another description than the one
 *   it locks with, so that only descriptors count. A fork inherits the descriptor; the fork handler
 *   in mn_cache.c closes it first thing in the child. Programs that are executed never get it
 *   (O_CLOEXEC). A process loses its memory before its descriptors, so when the byte is free no
 *   thread of the client can write to the mapping.
 *   A child made past the fork handler (by a bare clone(2)) keeps the lock held. Then a segment may
 *   stay reserved, and the file may stay, until that child ends; nothing is overwritten.
 *   A program that closes every descriptor drops the lock while it lives. So before each
 *   reservation, a client looks whether the descriptor still is its own (mn_cache_locks_ours).
 *
 * The bytes lie behind everything that could be data: locks need no bytes in the file.
 *   header   for creating, attaching, detaching, unlinking. Held for microseconds, or while a new
 *            file gets its index.
 *   log      for changing segments: the next generation, recycling, giving back.
 *   slots    one a client, held as long as it is one.
 * No thread waits for the header while it holds the log.
 */
#ifndef MN_CACHE_LOCKS_H
#define MN_CACHE_LOCKS_H

#include <stdbool.h>
#include <stdint.h>

#define MN_CACHE_HEADER_BYTE (INT64_C(1) << 60)
#define MN_CACHE_LOG_BYTE (MN_CACHE_HEADER_BYTE + 1)
#define MN_CACHE_SLOT_BYTE (MN_CACHE_HEADER_BYTE + 4096)

/* Tries to lock one byte for this description. 0, -EAGAIN when another one holds it, or -errno. */
int
mn_cache_lock_try(int fd, int64_t byte);

/* The same, trying for at most so long. -ETIMEDOUT when another one holds it still. */
int
mn_cache_lock_wait(int fd, int64_t byte, int64_t timeout_ns);

void
mn_cache_unlock(int fd, int64_t byte);

/* Whether another description holds one of these bytes. True where that cannot be found out. */
bool
mn_cache_is_locked(int fd, int64_t first, int64_t n);

/* Whether the descriptor still is of this file. */
bool
mn_cache_locks_ours(int fd, uint64_t device, uint64_t inode);

#endif /* MN_CACHE_LOCKS_H */
