/* mn_faults.c - dying at a labelled point, in builds with MN_FAULTS; nothing in others.
 * SPDX-License-Identifier: Apache-2.0
 *
 * MINATO_FAULT="LABEL N FILE" in the environment: the process that passes the point for the
 * N-th time, counted in each process by itself, makes FILE and kills itself. Where there is
 * FILE nobody dies, so it is one process in all. The process that loaded the module, with fork
 * the trainer, never dies of it.
 */
#include "py/module/mn_state.h"

#ifdef MN_FAULTS

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_assert.h"

static pid_t loaded_by;
static unsigned passed;

static void
die_here(const char *name)
{
    char label[64], file[1024];
    unsigned n;
    const char *told = getenv("MINATO_FAULT");
    if (told == NULL || getpid() == loaded_by
        || sscanf(told, "%63s %u %1023s", label, &n, file) != 3 || strcmp(label, name) != 0) {
        return;
    }
    if (++passed == n) {
        int fd = open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0) {
            (void)kill(getpid(), SIGKILL);
        }
    }
}

void
mn_faults_arm(void)
{
    loaded_by = getpid();
    mn_fault_hook = die_here;
}

#else

void
mn_faults_arm(void)
{
}

#endif
