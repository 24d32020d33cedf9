/* The filter's program, and its listener.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_write_filter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define MN_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MN_ARCH AUDIT_ARCH_AARCH64
#else
#define MN_ARCH 0 /* no system has this number: each call would fail, so mn_write_filter() does */
#endif

#define NONE (-1)
#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define SYS_FCHMODAT2 452 /* Linux 6.6; the same number on all systems, as are those below */
#define SYS_SETXATTRAT 463
#define SYS_REMOVEXATTRAT 466
#define SYS_FILE_SETATTR 469
#define X32 0x40000000 /* numbers of another ABI of the same processor */

/* Which arguments of a call name files. A folder without a path is a descriptor of the file. */
static const struct mn_rule {
    int number;
    int folder, path;   /* NONE: the path counts from the current folder */
    int folder2, path2; /* of a second file; both NONE without one */
    int flags;          /* those of open() */
} mn_rules[] = {
    {SYS_openat, 0, 1, NONE, NONE, 2},
#ifdef SYS_open /* newer systems have only the calls that take a folder */
    {SYS_open, NONE, 0, NONE, NONE, 1},
    {SYS_creat, NONE, 0, NONE, NONE, NONE},
    {SYS_mkdir, NONE, 0, NONE, NONE, NONE},
    {SYS_rmdir, NONE, 0, NONE, NONE, NONE},
    {SYS_unlink, NONE, 0, NONE, NONE, NONE},
    {SYS_rename, NONE, 0, NONE, 1, NONE},
    {SYS_link, NONE, 0, NONE, 1, NONE},
    {SYS_symlink, NONE, 1, NONE, NONE, NONE},
    {SYS_mknod, NONE, 0, NONE, NONE, NONE},
    {SYS_chmod, NONE, 0, NONE, NONE, NONE},
    {SYS_chown, NONE, 0, NONE, NONE, NONE},
    {SYS_lchown, NONE, 0, NONE, NONE, NONE},
    {SYS_utime, NONE, 0, NONE, NONE, NONE},
    {SYS_utimes, NONE, 0, NONE, NONE, NONE},
    {SYS_futimesat, 0, 1, NONE, NONE, NONE},
#endif
#ifdef SYS_renameat
    {SYS_renameat, 0, 1, 2, 3, NONE},
#endif
    {SYS_renameat2, 0, 1, 2, 3, NONE},
    {SYS_mkdirat, 0, 1, NONE, NONE, NONE},
    {SYS_unlinkat, 0, 1, NONE, NONE, NONE},
    {SYS_linkat, 0, 1, 2, 3, NONE},
    {SYS_symlinkat, 1, 2, NONE, NONE, NONE},
    {SYS_mknodat, 0, 1, NONE, NONE, NONE},
    {SYS_truncate, NONE, 0, NONE, NONE, NONE},
    {SYS_fchmodat, 0, 1, NONE, NONE, NONE},
    {SYS_FCHMODAT2, 0, 1, NONE, NONE, NONE},
    {SYS_fchownat, 0, 1, NONE, NONE, NONE},
    {SYS_utimensat, 0, 1, NONE, NONE, NONE},
    {SYS_setxattr, NONE, 0, NONE, NONE, NONE},
    {SYS_lsetxattr, NONE, 0, NONE, NONE, NONE},
    {SYS_removexattr, NONE, 0, NONE, NONE, NONE},
    {SYS_lremovexattr, NONE, 0, NONE, NONE, NONE},
    {SYS_SETXATTRAT, 0, 1, NONE, NONE, NONE},
    {SYS_REMOVEXATTRAT, 0, 1, NONE, NONE, NONE},
    {SYS_FILE_SETATTR, 0, 1, NONE, NONE, NONE},
    {SYS_fchmod, 0, NONE, NONE, NONE, NONE},
    {SYS_fchown, 0, NONE, NONE, NONE, NONE},
    {SYS_fsetxattr, 0, NONE, NONE, NONE, NONE},
    {SYS_fremovexattr, 0, NONE, NONE, NONE, NONE},
    {SYS_bind, NONE, 1, NONE, NONE, NONE}, /* a socket may have a file */
};
#define MN_RULES (sizeof(mn_rules) / sizeof(mn_rules[0]))

/* Calls that name files where a filter cannot see them; the C library does without. */
static const int mn_refused[] = {
    SYS_open_by_handle_at,
    425, /* io_uring_setup */
    437, /* openat2 */
};
#define MN_REFUSED (sizeof(mn_refused) / sizeof(mn_refused[0]))

#define LOAD(what) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(what))
#define IF(op, value, skipped)                                                                     \
    (struct sock_filter) BPF_JUMP(BPF_JMP | (op) | BPF_K, (uint32_t)(value), 0, skipped)
#define RETURN(what) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (uint32_t)(what))
#define REFUSE (SECCOMP_RET_ERRNO | ENOSYS)

static unsigned short
mn_write_program(struct sock_filter *to)
{
    unsigned short n = 0;
    to[n++] = LOAD(offsetof(struct seccomp_data, arch));
    to[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MN_ARCH, 1, 0);
    to[n++] = RETURN(REFUSE);
    to[n++] = LOAD(offsetof(struct seccomp_data, nr));
    to[n++] = IF(BPF_JGE, X32, 1);
    to[n++] = RETURN(REFUSE);
    for (size_t i = 0; i < MN_REFUSED; i++) {
        to[n++] = IF(BPF_JEQ, mn_refused[i], 1);
        to[n++] = RETURN(REFUSE);
    }
    for (size_t i = 0; i < MN_RULES; i++) {
        const struct mn_rule *r = &mn_rules[i];
        bool opens = r->flags != NONE;
        to[n++] = IF(BPF_JEQ, r->number, opens ? 4 : 1);
        if (opens) { /* its lower half, on a little-endian processor */
            to[n++] = LOAD(offsetof(struct seccomp_data, args) + 8 * (size_t)r->flags);
            to[n++] = IF(BPF_JSET, CHANGES, 1);
            to[n++] = RETURN(SECCOMP_RET_USER_NOTIF);
            to[n++] = RETURN(SECCOMP_RET_ALLOW);
        }
        else {
            to[n++] = RETURN(SECCOMP_RET_USER_NOTIF);
        }
    }
    to[n++] = RETURN(SECCOMP_RET_ALLOW);
    return n;
}

int
mn_write_filter(void)
{
    struct sock_filter program[16 + 2 * MN_REFUSED + 5 * MN_RULES];
    struct sock_fprog given = {.filter = program};
    if (MN_ARCH == 0) {
        return -ENOSYS;
    }
    given.len = mn_write_program(program);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return -errno;
    }
    long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                      SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &given);
    return fd < 0 ? -errno : (int)fd;
}

static void
mn_write_place(struct mn_write_call *call, const struct seccomp_notif *seen, int folder, int path)
{
    const uint64_t *args = (const uint64_t *)seen->data.args;
    struct mn_write_place *place = &call->place[call->places++];
    place->folder = folder != NONE ? (int32_t)args[folder] : AT_FDCWD;
    place->address = path != NONE ? args[path] : 0;
    place->length = seen->data.nr == SYS_bind ? (uint32_t)args[2] : 0;
}

int
mn_write_next(int listener, struct mn_write_call *call)
{
    struct seccomp_notif_sizes sizes;
    union {
        struct seccomp_notif seen;
        char room[512]; /* a later kernel's may be larger */
    } of;
    memset(&of, 0, sizeof(of));
    memset(call, 0, sizeof(*call));
    if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) != 0) {
        return -errno;
    }
    if (sizes.seccomp_notif > sizeof(of)) {
        return -EPROTO;
    }
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &of) != 0) {
        return -errno;
    }
    call->id = of.seen.id;
    call->pid = (pid_t)of.seen.pid;
    for (size_t i = 0; i < MN_RULES; i++) {
        const struct mn_rule *r = &mn_rules[i];
        if (r->number == of.seen.data.nr) {
            mn_write_place(call, &of.seen, r->folder, r->path);
            if (r->path2 != NONE) {
                mn_write_place(call, &of.seen, r->folder2, r->path2);
            }
        }
    }
    return 0;
}

int
mn_write_allow(int listener, uint64_t id)
{
    union {
        struct seccomp_notif_resp answer;
        char room[512];
    } of;
    memset(&of, 0, sizeof(of));
    of.answer.id = id;
    of.answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    return ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &of) != 0 ? -errno : 0;
}
