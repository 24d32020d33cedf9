/* Walks /proc/self/cgroup and the groups above.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_cgroup.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct mn_cgroup_walk {
    const char *root;
    void (*visit)(void *arg, int version, const char *dir);
    void *arg;
};

int
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

int
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

int
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

void
mn_cgroup_each(const char *root, const char *controller,
               void (*visit)(void *arg, int version, const char *dir), void *arg)
{
    struct mn_cgroup_walk walk = {.root = root, .visit = visit, .arg = arg};
    char dir[MN_CGROUP_PATH_MAX];
    char *save = NULL;
    size_t size = 16384; /* a path per hierarchy, a dozen hierarchies */
    char *text = malloc(size);
    int len = snprintf(dir, sizeof(dir), "%s/proc/self", root);
    if (text != NULL && len >= 0 && (size_t)len < sizeof(dir)
        && mn_cgroup_read(dir, "cgroup", text, size) == 0) {
        for (char *line = strtok_r(text, "\n", &save); line != NULL;
             line = strtok_r(NULL, "\n", &save)) {
            mn_cgroup_line(&walk, controller, line);
        }
    }
    free(text);
}
