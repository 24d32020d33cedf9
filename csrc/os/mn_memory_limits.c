/* Memory by /proc/meminfo and control group limits.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_memory_limits.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "os/mn_cgroup.h"

#define MN_MEM_TEXT 8192 /* memory.stat and meminfo are about 2 kB */

struct mn_mem_facts {
    uint64_t total;
    uint64_t available;
};

static void
mn_mem_lower(uint64_t *value, uint64_t limit)
{
    if (limit < *value) {
        *value = limit;
    }
}

static void
mn_mem_group(void *arg, int version, const char *dir)
{
    struct mn_mem_facts *facts = arg;
    const char *max = version == 2 ? "memory.max" : "memory.limit_in_bytes";
    const char *now = version == 2 ? "memory.current" : "memory.usage_in_bytes";
    const char *cache = version == 2 ? "inactive_file" : "total_inactive_file";
    char text[MN_MEM_TEXT];
    uint64_t limit, used, inactive;
    if (mn_cgroup_number(dir, max, &limit) != 0) {
        return;
    }
    mn_mem_lower(&facts->total, limit);
    if (mn_cgroup_number(dir, now, &used) != 0) {
        return;
    }
    if (mn_cgroup_read(dir, "memory.stat", text, sizeof(text)) == 0
        && mn_cgroup_keyed(text, cache, &inactive) == 0) {
        used = used > inactive ? used - inactive : 0;
    }
    mn_mem_lower(&facts->available, limit > used ? limit - used : 0);
}

/* Fallback where /proc cannot be read. The result is too low, because it lacks the cache that could
 * be dropped. */
static struct mn_mem_facts
mn_mem_ask(void)
{
    struct mn_mem_facts facts = {0, 0};
    struct sysinfo info;
    if (sysinfo(&info) == 0) {
        facts.total = (uint64_t)info.totalram * info.mem_unit;
        facts.available = ((uint64_t)info.freeram + info.bufferram) * info.mem_unit;
    }
    return facts;
}

static struct mn_mem_facts
mn_mem_read(const char *root)
{
    struct mn_mem_facts facts = {0, 0};
    char dir[MN_CGROUP_PATH_MAX];
    char text[MN_MEM_TEXT];
    int len = snprintf(dir, sizeof(dir), "%s/proc", root);
    if (len < 0 || (size_t)len >= sizeof(dir)
        || mn_cgroup_read(dir, "meminfo", text, sizeof(text)) != 0
        || mn_cgroup_keyed(text, "MemTotal", &facts.total) != 0) {
        return root[0] == '\0' ? mn_mem_ask() : facts;
    }
    facts.total *= 1024; /* the file says kB and means KiB */
    if (mn_cgroup_keyed(text, "MemAvailable", &facts.available) != 0) {
        (void)mn_cgroup_keyed(text, "MemFree", &facts.available);
    }
    facts.available *= 1024;
    mn_cgroup_each(root, "memory", mn_mem_group, &facts);
    return facts;
}

uint64_t
mn_mem_total_at(const char *root)
{
    return mn_mem_read(root).total;
}

uint64_t
mn_mem_available_at(const char *root)
{
    return mn_mem_read(root).available;
}

uint64_t
mn_mem_private(pid_t pid)
{
    char dir[32], text[MN_MEM_TEXT];
    uint64_t clean, dirty;
    snprintf(dir, sizeof(dir), "/proc/%ld", (long)pid);
    if (mn_cgroup_read(dir, "smaps_rollup", text, sizeof(text)) != 0
        || mn_cgroup_keyed(text, "Private_Clean", &clean) != 0
        || mn_cgroup_keyed(text, "Private_Dirty", &dirty) != 0) {
        return 0;
    }
    return (clean + dirty) * 1024;
}

uint64_t
mn_mem_total(void)
{
    return mn_mem_total_at("");
}

uint64_t
mn_mem_available(void)
{
    return mn_mem_available_at("");
}

uint64_t
mn_mem_address_space(void)
{
    struct rlimit most;
    if (getrlimit(RLIMIT_AS, &most) != 0 || most.rlim_cur == RLIM_INFINITY) {
        return UINT64_MAX;
    }
    uint64_t pages, limit = most.rlim_cur;
    char text[MN_MEM_TEXT];
    if (mn_cgroup_read("/proc/self", "statm", text, sizeof(text)) != 0
        || sscanf(text, "%" SCNu64, &pages) != 1) {
        return limit / 2;
    }
    uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return used < limit ? limit - used : 0;
}

void *
mn_mem_pages(uint64_t bytes)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p != MAP_FAILED ? p : NULL;
}

void
mn_mem_pages_free(void *pages, uint64_t bytes)
{
    (void)munmap(pages, (size_t)bytes);
}
