/* See mn_cputime.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_cputime.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>

/* More CPUs than any kernel is built for. */
#define MOST_CPUS (1 << 15)

/* Adds one CPU's line of /proc/stat, if the process may run on that CPU. */
static bool
add_cpu(const char *line, const cpu_set_t *allowed, size_t size, uint64_t *busy,
        uint64_t *total)
{
    uint64_t t[8] = {0}; /* user nice system idle iowait irq softirq steal */
    unsigned cpu;
    int n = sscanf(line, "cpu%u %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
                         " %" SCNu64 " %" SCNu64 " %" SCNu64,
                   &cpu, &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    if (n < 5 || (allowed != NULL && (cpu >= MOST_CPUS || !CPU_ISSET_S(cpu, size, allowed)))) {
        return false;
    }
    for (int i = 0; i < 8; i++) {
        *total += t[i];
        *busy += i == 3 || i == 4 ? 0 : t[i];
    }
    return true;
}

int
mn_cputime_machine(uint64_t *busy, uint64_t *total)
{
    FILE *f = fopen("/proc/stat", "re");
    if (f == NULL) {
        return -errno;
    }
    size_t size = CPU_ALLOC_SIZE(MOST_CPUS);
    cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
    bool known = set != NULL && sched_getaffinity(0, size, set) == 0, any = false;
    char line[256];
    *busy = *total = 0;
    while (fgets(line, sizeof(line), f) != NULL && line[0] == 'c') {
        any |= add_cpu(line, known ? set : NULL, size, busy, total);
    }
    if (set != NULL) {
        CPU_FREE(set);
    }
    fclose(f);
    return any ? 0 : -EPROTO;
}

/* Reads a number of a thread's line "on CPU, in the run queue, times run". */
static int
schedstat(pid_t pid, const char *format, uint64_t *ns)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%ld/schedstat", (long)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return -errno;
    }
    int n = fscanf(f, format, ns);
    fclose(f);
    return n == 1 ? 0 : -EPROTO;
}

int
mn_cputime_process(pid_t pid, uint64_t *ns)
{
    return schedstat(pid, "%" SCNu64, ns);
}

int
mn_cputime_queued(pid_t pid, uint64_t *ns)
{
    return schedstat(pid, "%*u %" SCNu64, ns);
}
