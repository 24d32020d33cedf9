/* Connected components from runs, two planes at a time.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_boxes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct run {
    int32_t start, stop; /* columns */
    uint32_t component;
    uint32_t value;
};

/* The runs of a plane in C order; row y has first[y] to first[y + 1] - 1. */
struct plane {
    struct run *runs;
    size_t n, capacity;
    uint32_t *first;
};

struct component {
    uint32_t parent; /* itself for a root; a root is its component's earliest member */
    uint32_t value;
    struct mn_box box; /* for a root: of the whole component */
};

struct mn_scan {
    const struct mn_kernels *kernels;
    int64_t depth, height, width;
    int64_t z, y;            /* of the next row */
    struct plane current, previous;
    struct component *components;
    size_t n_components, room_components;
};

/* Makes space for one more element; the array doubles. */
static int
grow(void **array, size_t n, size_t *capacity, size_t item, struct mn_text *text)
{
    if (n < *capacity) {
        return 0;
    }
    size_t more = *capacity == 0 ? 1024 : *capacity * 2;
    void *bigger = more < UINT32_MAX ? realloc(*array, more * item) : NULL;
    if (bigger == NULL) {
        return mn_fail_memory(text, more * item);
    }
    *array = bigger;
    *capacity = more;
    return 0;
}

static uint32_t
find_root(struct mn_scan *scan, uint32_t c)
{
    struct component *components = scan->components;
    while (components[c].parent != c) {
        components[c].parent = components[components[c].parent].parent;
        c = components[c].parent;
    }
    return c;
}

static void
include_run(struct component *root, const struct run *run, int32_t z, int32_t y)
{
    const int32_t low[3] = {z, y, run->start}, high[3] = {z + 1, y + 1, run->stop};
    for (int axis = 0; axis < 3; axis++) {
        if (low[axis] < root->box.low[axis]) {
            root->box.low[axis] = low[axis];
        }
        if (high[axis] > root->box.high[axis]) {
            root->box.high[axis] = high[axis];
        }
    }
}

static uint32_t
join(struct mn_scan *scan, uint32_t a, uint32_t b)
{
    a = find_root(scan, a);
    b = find_root(scan, b);
    if (a == b) {
        return a;
    }
    uint32_t keep = a < b ? a : b, gone = a < b ? b : a;
    struct mn_box *box = &scan->components[keep].box;
    const struct mn_box *other = &scan->components[gone].box;
    for (int axis = 0; axis < 3; axis++) {
        box->low[axis] = box->low[axis] < other->low[axis] ? box->low[axis]
                                                           : other->low[axis];
        box->high[axis] = box->high[axis] > other->high[axis] ? box->high[axis]
                                                              : other->high[axis];
    }
    scan->components[gone].parent = keep;
    return keep;
}

/* Joins the run with those of a neighbouring row that it touches. *from moves along: runs before it
 * end before this run and before all later runs of its row. */
static void
join_row(struct mn_scan *scan, struct run *run, const struct plane *plane, uint32_t *from,
         uint32_t stop)
{
    while (*from < stop && plane->runs[*from].stop <= run->start) {
        (*from)++;
    }
    for (uint32_t i = *from; i < stop && plane->runs[i].start < run->stop; i++) {
        if (plane->runs[i].value != run->value) {
            continue;
        }
        uint32_t other = plane->runs[i].component;
        run->component = run->component == UINT32_MAX ? find_root(scan, other)
                                                      : join(scan, run->component, other);
    }
}

static int
new_component(struct mn_scan *scan, struct run *run, struct mn_text *text)
{
    void *array = scan->components;
    int rc = grow(&array, scan->n_components, &scan->room_components,
                  sizeof(struct component), text);
    if (rc < 0) {
        return rc;
    }
    scan->components = array;
    run->component = (uint32_t)scan->n_components++;
    scan->components[run->component] = (struct component){
        .parent = run->component,
        .value = run->value,
        .box = {{INT32_MAX, INT32_MAX, INT32_MAX}, {0, 0, 0}},
    };
    return 0;
}

/* Assigns components to the runs of row y of the current plane. */
static int
label_row(struct mn_scan *scan, int64_t y, struct mn_text *text)
{
    struct plane *now = &scan->current, *before = &scan->previous;
    uint32_t above = y > 0 ? now->first[y - 1] : 0, above_stop = y > 0 ? now->first[y] : 0;
    uint32_t behind = before->first[y], behind_stop = before->first[y + 1];
    for (uint32_t i = now->first[y]; i < now->first[y + 1]; i++) {
        struct run *run = &now->runs[i];
        join_row(scan, run, now, &above, above_stop);
        join_row(scan, run, before, &behind, behind_stop);
        if (run->component == UINT32_MAX) {
            int rc = new_component(scan, run, text);
            if (rc < 0) {
                return rc;
            }
        }
        include_run(&scan->components[find_root(scan, run->component)], run,
                    (int32_t)scan->z, (int32_t)y);
    }
    return 0;
}

static int
finish_plane(struct mn_scan *scan, struct mn_text *text)
{
    if (scan->current.n > 0) {
        for (int64_t y = 0; y < scan->height; y++) {
            int rc = label_row(scan, y, text);
            if (rc < 0) {
                return rc;
            }
        }
    }
    struct plane older = scan->previous;
    scan->previous = scan->current;
    scan->current = older;
    scan->current.n = 0;
    scan->z++;
    scan->y = 0;
    return 0;
}

static int
add_run(struct mn_scan *scan, int64_t start, int64_t stop, uint8_t value,
        struct mn_text *text)
{
    struct plane *now = &scan->current;
    void *array = now->runs;
    int rc = grow(&array, now->n, &now->capacity, sizeof(struct run), text);
    if (rc < 0) {
        return rc;
    }
    now->runs = array;
    now->runs[now->n++] = (struct run){(int32_t)start, (int32_t)stop, UINT32_MAX, value};
    return 0;
}

/* Records that the rows from scan->y to `y` have no further runs. */
static void
close_rows(struct mn_scan *scan, int64_t y)
{
    for (; scan->y <= y; scan->y++) {
        scan->current.first[scan->y + 1] = (uint32_t)scan->current.n;
    }
}

/* Scans `count` rows of the current plane, from scan->y on. */
static int
scan_piece(struct mn_scan *scan, const uint8_t *rows, int64_t count, struct mn_text *text)
{
    const int64_t top = scan->y, width = scan->width, n = count * width;
    int64_t at = scan->kernels->find_nonzero(rows, 0, n);
    while (at < n) {
        int64_t row = at / width, row_end = (row + 1) * width;
        close_rows(scan, top + row - 1);
        while (at < row_end) {
            int64_t stop = scan->kernels->find_other(rows, at, row_end, rows[at]);
            int rc = add_run(scan, at - row * width, stop - row * width, rows[at], text);
            if (rc < 0) {
                return rc;
            }
            at = stop < row_end && rows[stop] != 0
                     ? stop
                     : scan->kernels->find_nonzero(rows, stop, row_end);
        }
        at = scan->kernels->find_nonzero(rows, row_end, n);
    }
    close_rows(scan, top + count - 1);
    return 0;
}

int
mn_scan_rows(struct mn_scan *scan, const uint8_t *rows, int64_t count, struct mn_text *text)
{
    while (count > 0) {
        int64_t left = scan->height - scan->y, piece = count < left ? count : left;
        int rc = scan_piece(scan, rows, piece, text);
        if (rc == 0 && scan->y == scan->height) {
            rc = finish_plane(scan, text);
        }
        if (rc < 0) {
            return rc;
        }
        rows += piece * scan->width;
        count -= piece;
    }
    return 0;
}

int
mn_scan_open(struct mn_scan **scan, const int64_t *shape, const struct mn_kernels *kernels,
             struct mn_text *text)
{
    *scan = NULL;
    for (int axis = 0; axis < 3; axis++) {
        if (shape[axis] > INT32_MAX - 1) {
            return mn_fail(text, EINVAL, "a label volume's axis exceeds 2^31 - 2 voxels");
        }
    }
    struct mn_scan *s = calloc(1, sizeof(*s));
    size_t rows = (size_t)shape[1] + 1;
    if (s != NULL) {
        s->kernels = kernels;
        s->depth = shape[0];
        s->height = shape[1];
        s->width = shape[2];
        s->current.first = calloc(rows, sizeof(uint32_t));
        s->previous.first = calloc(rows, sizeof(uint32_t));
    }
    if (s == NULL || s->current.first == NULL || s->previous.first == NULL) {
        mn_scan_close(s);
        return mn_fail_memory(text, sizeof(*s) + 2 * rows * sizeof(uint32_t));
    }
    *scan = s;
    return 0;
}

void
mn_scan_close(struct mn_scan *scan)
{
    if (scan == NULL) {
        return;
    }
    free(scan->current.runs);
    free(scan->current.first);
    free(scan->previous.runs);
    free(scan->previous.first);
    free(scan->components);
    free(scan);
}

static int64_t
box_volume(const struct mn_box *box)
{
    int64_t volume = 1;
    for (int axis = 0; axis < 3; axis++) {
        volume *= box->high[axis] - box->low[axis];
    }
    return volume;
}

/* Sorts the box into the two largest; of equal ones the later counts as larger. */
static void
rank_box(struct mn_class_boxes *c, const struct mn_box *box)
{
    int64_t volume = box_volume(box);
    c->components++;
    if (c->n_boxes == 0) {
        c->boxes[c->n_boxes++] = *box;
    }
    else if (volume >= box_volume(&c->boxes[c->n_boxes - 1])) {
        c->boxes[0] = c->boxes[c->n_boxes - 1];
        c->boxes[1] = *box;
        c->n_boxes = 2;
    }
    else if (c->n_boxes == 1) {
        c->boxes[1] = c->boxes[0];
        c->boxes[0] = *box;
        c->n_boxes = 2;
    }
    else if (volume >= box_volume(&c->boxes[0])) {
        c->boxes[0] = *box;
    }
}

int
mn_scan_finish(struct mn_scan *scan, struct mn_boxes **boxes, struct mn_text *text)
{
    struct mn_class_boxes found[256];
    memset(found, 0, sizeof(found));
    int32_t n = 0;
    for (size_t i = 0; i < scan->n_components; i++) {
        const struct component *c = &scan->components[i];
        if (c->parent == i) {
            n += found[c->value].components == 0;
            rank_box(&found[c->value], &c->box);
        }
    }
    size_t bytes = mn_boxes_bytes(n);
    struct mn_boxes *result = calloc(1, bytes);
    if (result == NULL) {
        return mn_fail_memory(text, bytes);
    }
    for (int value = 1; value < 256; value++) {
        if (found[value].components > 0) {
            found[value].value = (uint8_t)value;
            result->classes[result->n_classes++] = found[value];
        }
    }
    *boxes = result;
    return 0;
}
