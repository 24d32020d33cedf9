/* mn_limits.c - see mn_limits.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE

#include "os/mn_limits.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define MN_CGROUP_PATH_MAX 4096

/* ---- /proc/self/cgroup and the groups above ---- */

struct mn_cgroup_walk {
    const char *root;
    void (*visit)(void *arg, int version, const char *dir);
    void *arg;
};

/* Reads dir/file whole, at most size - 1 bytes, as a string. Returns 0 or -errno. */
static int
mn_cgroup_read(const char *dir, const char *file, char *text, uint64_t size)
{
    char path[MN_CGROUP_PATH_MAX];
    int len = snprintf(path, sizeof(path), "%s/%s", dir, file);
    if (len < 0 || (size_t)len >= sizeof(path)) {
        return -ENAMETOOLONG;
    }
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return -errno;
    }
    size_t got = fread(text, 1, (size_t)size - 1, f);
    int rc = ferror(f) ? -EIO : 0;
    text[got] = '\0';
    (void)fclose(f);
    return rc;
}

/* Reads the number that dir/file begins with; UINT64_MAX for "max". Returns 0, -errno, -EPROTO. */
static int
mn_cgroup_number(const char *dir, const char *file, uint64_t *value)
{
    char text[128];
    int rc = mn_cgroup_read(dir, file, text, sizeof(text));
    if (rc != 0) {
        return rc;
    }
    if (strncmp(text, "max", 3) == 0) {
        *value = UINT64_MAX;
        return 0;
    }
    return sscanf(text, "%" SCNu64, value) == 1 ? 0 : -EPROTO;
}

/* Finds the line "key number" in a text of such lines. Returns 0 or -ENOENT. */
static int
mn_cgroup_keyed(const char *text, const char *key, uint64_t *value)
{
    size_t len = strlen(key);
    for (const char *line = text; line != NULL && *line != '\0';) {
        if (strncmp(line, key, len) == 0 && (line[len] == ' ' || line[len] == ':')) {
            return sscanf(line + len + 1, "%" SCNu64, value) == 1 ? 0 : -ENOENT;
        }
        line = strchr(line, '\n');
        line = line != NULL ? line + 1 : NULL;
    }
    return -ENOENT;
}

/* Visits mount + path, then each directory above it, down to the mount itself. */
static void
mn_cgroup_climb(const struct mn_cgroup_walk *walk, int version, const char *mount,
                const char *path)
{
    char dir[MN_CGROUP_PATH_MAX];
    int len = snprintf(dir, sizeof(dir), "%s%s%s", walk->root, mount, path);
    size_t base = strlen(walk->root) + strlen(mount);
    if (len < 0 || (size_t)len >= sizeof(dir)) {
        return;
    }
    for (size_t end = (size_t)len;;) {
        while (end > base && dir[end - 1] == '/') {
            end--;
        }
        dir[end] = '\0';
        walk->visit(walk->arg, version, dir);
        if (end <= base) {
            return;
        }
        while (end > base && dir[end - 1] != '/') {
            end--;
        }
    }
}

/* Returns whether a comma-separated list contains the name. */
static bool
mn_cgroup_listed(const char *list, const char *name)
{
    size_t len = strlen(name);
    for (const char *at = list; at != NULL;) {
        if (strncmp(at, name, len) == 0 && (at[len] == ',' || at[len] == '\0')) {
            return true;
        }
        at = strchr(at, ',');
        at = at != NULL ? at + 1 : NULL;
    }
    return false;
}

/* Handles one line "id:controllers:path"; an empty list of controllers means version 2. */
static void
mn_cgroup_line(const struct mn_cgroup_walk *walk, const char *controller, char *line)
{
    char mount[256];
    char *list = strchr(line, ':');
    char *path = list != NULL ? strchr(list + 1, ':') : NULL;
    if (path == NULL) {
        return;
    }
    list++;
    *path++ = '\0';
    if (*list == '\0') {
        /* systemd mounts version 2 at the second place when it also mounts version 1. */
        mn_cgroup_climb(walk, 2, "/sys/fs/cgroup", path);
        mn_cgroup_climb(walk, 2, "/sys/fs/cgroup/unified", path);
    }
    else if (mn_cgroup_listed(list, controller)) {
        /* Mounted under its own name, often only as a link, or under the list's. */
        char whole[MN_CGROUP_PATH_MAX];
        (void)snprintf(mount, sizeof(mount), "/sys/fs/cgroup/%s", controller);
        int len = snprintf(whole, sizeof(whole), "%s%s", walk->root, mount);
        if (len < 0 || (size_t)len >= sizeof(whole) || access(whole, F_OK) != 0) {
            (void)snprintf(mount, sizeof(mount), "/sys/fs/cgroup/%s", list);
        }
        mn_cgroup_climb(walk, 1, mount, path);
    }
}

/* Calls visit with the directory of every group of that version 1 controller ("cpu", "memory") and
 * of version 2, own group first. version is 1 or 2; root is put before each path. Directories that
 * do not exist are visited, too. */
static void
mn_cgroup_each(const char *root, const char *controller,
               void (*visit)(void *arg, int version, const char *dir), void *arg)
{
    struct mn_cgroup_walk walk = {.root = root, .visit = visit, .arg = arg};
    char *save = NULL;
    size_t size = 16384; /* a path per hierarchy, a dozen hierarchies */
    char *text = malloc(size);
    if (text != NULL && mn_cgroup_read(root, "proc/self/cgroup", text, size) == 0) {
        for (char *line = strtok_r(text, "\n", &save); line != NULL;
             line = strtok_r(NULL, "\n", &save)) {
            mn_cgroup_line(&walk, controller, line);
        }
    }
    free(text);
}

/* ---- CPUs by affinity mask and control group quota ---- */

#define MOST_CPUS (1 << 15) /* more than any kernel is built for */

static int
mn_cpu_affinity(void)
{
    size_t size = CPU_ALLOC_SIZE(MOST_CPUS);
    cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
    int count = set != NULL && sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    if (set != NULL) {
        CPU_FREE(set);
    }
    return count > 0 ? count : 1;
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
mn_cpu_count(const char *root)
{
    int cpus = mn_cpu_affinity();
    mn_cgroup_each(root, "cpu", mn_cpu_quota, &cpus);
    return cpus;
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
mn_cpu_throttled(const char *root, uint64_t *ns)
{
    struct mn_throttled sum = {.rc = -ENOENT};
    mn_cgroup_each(root, "cpu", mn_cpu_stopped, &sum);
    *ns = sum.ns;
    return sum.rc;
}

/* ---- Memory by /proc/meminfo and control group limits ---- */

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
    char text[MN_MEM_TEXT];
    if (mn_cgroup_read(root, "proc/meminfo", text, sizeof(text)) != 0
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
mn_mem_total(const char *root)
{
    return mn_mem_read(root).total;
}

uint64_t
mn_mem_available(const char *root)
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
