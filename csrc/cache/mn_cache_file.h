/* The file of a cache: made, checked, mapped, and removed by its last client.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   One file for each user and data set in a folder of the user's. The folder is on a file system
 *   in memory or on a local disk. There is no server: the first client makes the file. The last one
 *   unlinks it from memory; on a disk it stays, for the next run.
 *
 * The folder is 0700 and the user's own, the file 0600, and no symbolic link is followed. What
 * another user owns or may write to is refused, and so is a file whose offsets leave it.
 *
 * Making and attaching
 *   Everything happens under the header lock. A file without `ready` was left by a creator that
 *   died. No client has mapped it, so the next one makes it again from the start. A client takes
 *   the first slot whose byte is free, and then resets what the last owner left in it.
 *
 * Unlinking
 *   A client that leaves takes the header lock. If no other slot's byte is locked, it is the last,
 *   and unlinks the file, unless `keep` is set. An opener that had the file open by then takes the
 *   header lock next. It finds that the path has another inode or none, and begins anew. So no
 *   client attaches to a file that the last client has left. The folder goes with its last file.
 *
 * Removed in use: by a user, or at a logout by systemd (RemoveIPC). Its clients go on. A process
 *   that begins under one of them, such as a worker, finds the file among the descriptors of its
 *   parents, and attaches to it if a client lives: a nameless file with a
 *   client was not left by its last one. Else it would make all values again, into a file that goes
 *   when the worker ends.
 *
 * Sessions, on a disk: one lasts from the first client to the last one. The first one decides,
 *   under the header lock, whether the file is as the last one left it.
 *   The last one stores a time in the header, and gives it to the file (`stamp`). Every write by
 *   another program sets another one. The first client takes the stamp away. If the stamp is
 *   missing, every client was killed. If it is wrong, something else has written. If `home` is
 *   wrong, the system was started anew, perhaps after a power loss, or the file is a copy. In each
 *   case a new era begins, in which each entry is verified before its first use.
 *   After a power loss any page may be of any age, since nothing is synced. So if stamp or home are
 *   wrong, no segment is written on with the generation that it has. The current one is given up,
 *   and generations go on far above those that may be on the disk. The header's page is synced,
 *   so that no era and no generation is used twice: once for each boot, not for each value.
 *
 * What is removed or written anew begins with the magic, the first bytes that a maker writes. No
 *   other file is touched, whatever its name.
 *
 * What a crash leaves behind: a client that is killed leaves its slot to the next. After the last
 *   one was killed the file stays, whole. The next client of the data set uses it, and unlinks it
 *   at its end. A fork of a killed process unlinks it by mn_cache_file_sweep() when it ends.
 */
#ifndef MN_CACHE_FILE_H
#define MN_CACHE_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "cache/mn_cache_records.h"

#define MN_CACHE_HEADER_WAIT_S 5 /* an opener waits this long for the header lock */

/* Why a folder cannot hold a cache. Positive, and distinct from the results of base/mn_base.h. */
enum mn_cache_refusal {
    MN_CACHE_NOT_IN_MEMORY = 16, /* the folder's file system is not tmpfs */
    MN_CACHE_FOREIGN,            /* folder or file belongs to another user, or others may write */
    MN_CACHE_TOO_SMALL,          /* the file system is too small, like Docker's 64 MB */
    MN_CACHE_NO_LOCKS,           /* the file system does not honour OFD locks, or mmap and read()
                                  * differ */
    MN_CACHE_DAMAGED,            /* the header is invalid */
    MN_CACHE_BUSY,               /* the header lock was held for MN_CACHE_HEADER_WAIT_S */
    MN_CACHE_NO_SLOT,            /* all slots have a client */
    MN_CACHE_OTHER_LAYOUT,       /* another version made the file */
    MN_CACHE_REMOTE,             /* the file system is a network's or a program's (FUSE) */
    MN_CACHE_NO_RESERVING,       /* the file system cannot reserve blocks (fallocate) */
    MN_CACHE_OTHER_FILE,         /* a file of that name does not begin as a cache does */
    MN_CACHE_IN_USE,             /* has clients, so it is not removed */
};

struct mn_cache_place {
    const char *folder;
    const char *name;
    uint64_t bytes; /* of data, for a file that does not exist yet */
    uint64_t job;   /* 0: a guest, which looks, and neither makes nor removes the file */
    uint64_t tree, rank; /* see mn_cache_log_jobs(). tree 0: as job */
    bool keep;
    bool on_disk; /* the data is not mapped, and the file is kept */
    char label[MN_CACHE_LABEL_BYTES]; /* whose values these are; "": this client does not say */
};

struct mn_cache_file {
    int fd; /* whose description holds the locks */
    uint32_t slot;
    uint64_t incarnation;
    struct mn_cache_map map;
};

/* Opens or makes the file, maps it, takes a slot. 0, a refusal, or -errno. */
int
mn_cache_file_open(const struct mn_cache_place *place, struct mn_cache_file *file);

/* Leaves: unlinks the file where this is its last client, gives up slot and mapping. */
void
mn_cache_file_close(const struct mn_cache_place *place, struct mn_cache_file *file);

/* For a process that is no client: unlinks the file if no client lives. The last client would have
 * done so, had it not been killed. */
void
mn_cache_file_sweep(const struct mn_cache_place *place);

/* For a process that is no client: unlinks the file, if it begins as a cache does and is the
 * user's own. used: also if clients live. 0, a refusal, or -errno. */
int
mn_cache_file_remove(const struct mn_cache_place *place, bool used);

enum mn_cache_name {
    MN_CACHE_NAMED,
    MN_CACHE_NAMELESS, /* the file was removed */
    MN_CACHE_REPLACED, /* and another one has its name */
};

/* Whether a client's file still has its name. */
enum mn_cache_name
mn_cache_file_name(const struct mn_cache_place *place, const struct mn_cache_file *file);

/* Copies the file's label to MN_CACHE_LABEL_BYTES at label, with a 0 at the end. */
void
mn_cache_file_label(const struct mn_cache_file *file, char *label);

/* Unmaps alone: the descriptor is not this process's any more. */
void
mn_cache_file_unmap(struct mn_cache_file *file);

/* Whether a slot's client lives: its byte is locked by another description, or it is our own. */
bool
mn_cache_slot_lives(const struct mn_cache_file *file, uint32_t slot);

/* ---- locks of a cache file that end with the process that holds them ----
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

/* Whether the descriptor still is of this file. */
bool
mn_cache_locks_ours(int fd, uint64_t device, uint64_t inode);

/* ---- what lies in it ---- */

/* Gives a range of the file, from the begin of the file, its pages or blocks. 0 or -errno.
 *
 * It asks for little at a time. The kernel gives all of a call's pages back if a signal interrupts
 * the call, so a program with a timer of some milliseconds would never get many at once. */
int
mn_cache_reserve(int fd, uint64_t off, uint64_t bytes);

/* Where everything lies in a file for that many bytes of data. False if it is too little. */
bool
mn_cache_shape_of(uint64_t bytes, uint64_t salt, struct mn_cache_shape *shape);

/* Returns the checksum of any bytes. It has 64 bits and finds torn and foreign records, flipped
 * bits and half-written data. It does not resist an attacker. Four lanes of multiply and
 * rotate, as in xxHash, run as fast as memory is read. The salt of the file is part of it: old
 * bytes of another file do not pass. A block of an entry's payload adds its offset to the salt. */
uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes);

#endif /* MN_CACHE_FILE_H */
