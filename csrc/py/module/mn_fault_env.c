/* mn_fault_env.c - dying at a labelled point, in builds with MN_FAULTS; empty in others.
 * SPDX-License-Identifier: Apache-2.0
 *
 * MINATO_FAULT="LABEL N FILE HOW" in the environment names a point. A process that passes it for
 * the N-th time or later makes FILE, writes its process id there and ends itself. Each process
 * counts for itself. HOW is the signal by which the process ends or stops; 0: _exit(7); negative:
 * it sleeps forever. If FILE exists no process dies, so only one does. No process dies before
 * FILE's folder exists. The process that MINATO_FAULT_SPARES names, usually the trainer, never dies
 * of this.
 */
#include "py/module/mn_state.h"

#ifdef MN_FAULTS

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_atomic.h"
#include "base/mn_fault.h"

static mn_a32 passed; /* atomic: threads may be workers */

static void
die_here(const char *name)
{
    char label[64], file[1024];
    unsigned n;
    int how;
    const char *told = getenv("MINATO_FAULT"), *spared = getenv("MINATO_FAULT_SPARES");
    if (told == NULL || (spared != NULL && getpid() == (pid_t)atol(spared))
        || sscanf(told, "%63s %u %1023s %d", label, &n, file, &how) != 4
        || strcmp(label, name) != 0) {
        return;
    }
    if (mn_a32_add_relaxed(&passed, 1) + 1 >= n) {
        int fd = open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0) {
            (void)dprintf(fd, "%d", (int)getpid());
            (void)close(fd);
            while (how < 0) {
                (void)pause();
            }
            (void)signal(how, SIG_DFL); /* a sanitizer would report it as a fault of this code */
            (void)(how != 0 ? kill(getpid(), how) : (_exit(7), 0));
        }
    }
}

void
mn_faults_arm(void)
{
    mn_fault_hook = die_here;
}

#else

void
mn_faults_arm(void)
{
}

#endif
