/* Signals that a scheduler sends to all processes of a job.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "os/mn_signal_filter.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define MN_SIGNALS 65 /* one more than the largest number on Linux */

struct mn_filter {
    struct sigaction before; /* what happens with a signal that passes the filter */
    pid_t owner;             /* of the filter: a fork of this process has none */
    pid_t trainer;
};

/* Written before the handler is installed. */
static struct mn_filter mn_filters[MN_SIGNALS];

static void
pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context)
{
    if ((before->sa_flags & SA_SIGINFO) != 0) {
        before->sa_sigaction(number, info, context);
    }
    else if (before->sa_handler == SIG_DFL) {
        struct sigaction plain;
        memset(&plain, 0, sizeof(plain));
        plain.sa_handler = SIG_DFL;
        (void)sigaction(number, &plain, NULL);
        (void)raise(number); /* it is delivered when the handler has returned */
    }
    else if (before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    }
}

static void
filter(int number, siginfo_t *info, void *context)
{
    int saved = errno;
    const struct mn_filter *f = &mn_filters[number];
    pid_t me = getpid(), from = info->si_pid;
    if (me != f->owner || from == me || from == getppid() || from == f->trainer) {
        pass_on(&f->before, number, info, context);
    }
    errno = saved;
}

int
mn_signal_filter(int number, pid_t trainer)
{
    struct sigaction now, ours;
    if (number <= 0 || number >= MN_SIGNALS) {
        return -EINVAL;
    }
    if (sigaction(number, NULL, &now) < 0) {
        return -errno;
    }
    struct mn_filter *f = &mn_filters[number];
    if ((now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != filter) {
        f->before = now;
    }
    f->owner = getpid();
    f->trainer = trainer;
    memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = filter;
    ours.sa_mask = f->before.sa_mask;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    return sigaction(number, &ours, NULL) < 0 ? -errno : 0;
}
