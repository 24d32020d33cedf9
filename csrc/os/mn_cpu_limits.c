/* CPUs by affinity mask and control group quota.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_cpu_limits.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "os/mn_cgroup.h"

/* The kernel decides the mask's size, and may be built for more CPUs than cpu_set_t holds: EINVAL
 * asks for a larger one. */
static int
mn_cpu_affinity(void)
{
    for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        size_t size = CPU_ALLOC_SIZE((size_t)cpus);
        if (set == NULL) {
            return 1;
        }
        int rc = sched_getaffinity(0, size, set);
        int err = errno;
        int count = rc == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (rc == 0) {
            return count > 0 ? count : 1;
        }
        if (err != EINVAL) {
            return 1;
        }
    }
    return 1;
}

static void
mn_cpu_quota(void *arg, int version, const char *dir)
{
    int *cpus = arg;
    char text[128];
    uint64_t quota, period;
    if (version == 2) {
        /* "max 100000" means no quota, and is not two numbers. */
        if (mn_cgroup_read(dir, "cpu.max", text, sizeof(text)) != 0
            || sscanf(text, "%" SCNu64 " %" SCNu64, &quota, &period) != 2) {
            return;
        }
    }
    else if (mn_cgroup_read(dir, "cpu.cfs_quota_us", text, sizeof(text)) != 0
             || text[0] == '-' /* -1: no quota */
             || sscanf(text, "%" SCNu64, &quota) != 1
             || mn_cgroup_number(dir, "cpu.cfs_period_us", &period) != 0) {
        return;
    }
    if (quota == 0 || period == 0) {
        return;
    }
    uint64_t limit = (quota - 1) / period + 1;
    if (limit < (uint64_t)*cpus) {
        *cpus = (int)limit;
    }
}

int
mn_cpu_count_at(const char *root)
{
    int cpus = mn_cpu_affinity();
    mn_cgroup_each(root, "cpu", mn_cpu_quota, &cpus);
    return cpus;
}

int
mn_cpu_count(void)
{
    return mn_cpu_count_at("");
}

struct mn_throttled {
    uint64_t ns;
    int rc;
};

static void
mn_cpu_stopped(void *arg, int version, const char *dir)
{
    struct mn_throttled *sum = arg;
    char text[2048];
    uint64_t time;
    if (mn_cgroup_read(dir, "cpu.stat", text, sizeof(text)) == 0
        && mn_cgroup_keyed(text, version == 2 ? "throttled_usec" : "throttled_time", &time) == 0) {
        sum->ns += version == 2 ? time * 1000 : time;
        sum->rc = 0;
    }
}

int
mn_cpu_throttled_at(const char *root, uint64_t *ns)
{
    struct mn_throttled sum = {.rc = -ENOENT};
    mn_cgroup_each(root, "cpu", mn_cpu_stopped, &sum);
    *ns = sum.ns;
    return sum.rc;
}

int
mn_cpu_throttled(uint64_t *ns)
{
    return mn_cpu_throttled_at("", ns);
}
