/* See mn_cputime.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "os/mn_cputime.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

int
mn_cputime_machine(uint64_t *busy, uint64_t *total)
{
    FILE *f = fopen("/proc/stat", "re");
    if (f == NULL) {
        return -errno;
    }
    uint64_t t[8] = {0}; /* user nice system idle iowait irq softirq steal */
    int n = fscanf(f, "cpu %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
                      " %" SCNu64 " %" SCNu64,
                   &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    fclose(f);
    if (n < 4) {
        return -EPROTO;
    }
    *total = 0;
    for (int i = 0; i < 8; i++) {
        *total += t[i];
    }
    *busy = *total - t[3] - t[4];
    return 0;
}

int
mn_cputime_process(pid_t pid, uint64_t *ns)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%ld/schedstat", (long)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return -errno;
    }
    int n = fscanf(f, "%" SCNu64, ns);
    fclose(f);
    return n == 1 ? 0 : -EPROTO;
}
