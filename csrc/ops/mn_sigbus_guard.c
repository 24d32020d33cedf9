/* Reading mapped files that may shrink meanwhile.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "ops/mn_sigbus_guard.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The range that this thread reads. Initial-exec, because the handler also runs in threads that
 * never read a range. Another model may allocate at a thread's first access. musl does not, and
 * refuses initial-exec in what is loaded at run time. */
#if defined(__GLIBC__)
#define MN_GUARD_TLS _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define MN_GUARD_TLS _Thread_local
#endif
static MN_GUARD_TLS struct mn_guard *mn_guard_range;

/* The handler belongs to the whole process, and so does its state. */
static struct sigaction mn_guard_before;
static mn_a32 mn_guard_installed; /* 0 once the previous handler has been put back */
static mn_a32 mn_guard_installer; /* pid of the process that is changing the two, or 0 */

static bool
replace_by_zeros(struct mn_guard *guard, const void *address)
{
    uintptr_t at = (uintptr_t)address - (uintptr_t)guard->bytes;
    if (at >= guard->size) {
        return false;
    }
    mn_a32_store_relaxed(&guard->lost, 1); /* read by the same thread */
    return mmap(guard->bytes, guard->size, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0)
           != MAP_FAILED;
}

static void
on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    int saved = errno;
    bool sent = info->si_code <= 0; /* by kill() or raise(), not by a fault */
    if (sent || mn_guard_range == NULL
        || !replace_by_zeros(mn_guard_range, info->si_addr)) {
        struct sigaction before = mn_guard_before;
        if (mn_a32_xchg_acqrel(&mn_guard_installed, 0) == 0) {
            memset(&before, 0, sizeof(before));
            before.sa_handler = SIG_DFL;
        }
        sigaction(number, &before, NULL);
        if (sent) {
            raise(number);
        }
    }
    errno = saved;
}

static bool
is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) != 0 && action->sa_sigaction == on_sigbus;
}

/* One thread at a time; a fork in the middle leaves the pid of another process. */
static void
lock(void)
{
    uint32_t me = (uint32_t)getpid(), found = 0;
    while (!mn_a32_cas_acqrel(&mn_guard_installer, &found, me)) {
        if (found == me) {
            mn_cpu_pause();
            found = 0;
        }
    }
}

static void
install(void)
{
    struct sigaction ours, now;
    memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = on_sigbus;
    /* SA_NODEFER: the previous handler may be reached, and end, from within. */
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    lock();
    sigaction(SIGBUS, NULL, &now);
    if (!is_ours(&now)) {
        mn_guard_before = now;
    }
    else if (mn_a32_load_relaxed(&mn_guard_installed) == 0) {
        /* Other code has restored our handler as its predecessor, and is done. */
        memset(&mn_guard_before, 0, sizeof(mn_guard_before));
        mn_guard_before.sa_handler = SIG_DFL;
    }
    mn_a32_store_release(&mn_guard_installed, 1);
    sigaction(SIGBUS, &ours, NULL);
    mn_a32_store_release(&mn_guard_installer, 0);
}

void
mn_guard_enter(struct mn_guard *guard)
{
    struct sigaction now;
    sigset_t bus, old;
    if (sigaction(SIGBUS, NULL, &now) != 0 || !is_ours(&now)
        || mn_a32_load_acquire(&mn_guard_installed) == 0) {
        install();
    }
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    guard->blocked = pthread_sigmask(SIG_UNBLOCK, &bus, &old) == 0
                     && sigismember(&old, SIGBUS) == 1;
    mn_a32_store_relaxed(&guard->lost, 0);
    mn_guard_range = guard;
}

bool
mn_guard_leave(struct mn_guard *guard)
{
    mn_guard_range = NULL;
    if (guard->blocked) {
        sigset_t bus;
        sigemptyset(&bus);
        sigaddset(&bus, SIGBUS);
        pthread_sigmask(SIG_BLOCK, &bus, NULL);
    }
    return mn_a32_load_relaxed(&guard->lost) == 0;
}
