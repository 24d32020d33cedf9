/* mn_memory_file.c - memory from a sparse file without a name. See mn_arena.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <unistd.h>

#include "memory/mn_arena.h"
#include "os/mn_memfd.h"

static int
file_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    struct mn_memory_file *file = (struct mn_memory_file *)self;
    int fd = mn_memfd_create("minato", bytes);
    if (fd < 0) {
        return fd;
    }
    int rc = mn_memfd_map(fd, bytes, base);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    file->fd = fd;
    return 0;
}

static void
file_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    (void)self;
    mn_memfd_unmap(base, bytes);
}

/* Works through the mapping, so the descriptor may be closed already. */
static void
file_discard(struct mn_provider *self, void *at, uint64_t bytes)
{
    (void)self;
    (void)mn_memfd_punch_mapped(at, bytes);
}

void
mn_memory_file_init(struct mn_memory_file *file)
{
    *file = (struct mn_memory_file){{file_map, file_unmap, file_discard}, -1};
}

void
mn_memory_file_close(struct mn_memory_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
    }
    file->fd = -1;
}
