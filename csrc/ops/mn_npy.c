/* The headers of .npy files.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A header is a Python dict in text. The parser knows just the dict literals that NumPy writes and
 * accepts: string keys, and as values strings, True, False and tuples of integers. It never looks
 * past the length that it is given.
 */
#include "ops/mn_npy.h"

#include <errno.h>
#include <string.h>

#include "base/mn_attr.h"

MN_STATIC_ASSERT(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                 "voxels are used as they lie in the file, which is little-endian");

struct cursor {
    const char *at, *end;
    const char *path;
    struct mn_text *text;
};

struct header {
    bool has_descr, has_order, has_shape, fortran;
    char descr[16];
    int ndim;
    int64_t shape[MN_VOLUME_DIMS];
};

static const struct {
    const char *descr, *name;
    size_t size;
} dtypes[] = {
    [MN_DTYPE_NONE] = {"", "no dtype", 0},  [MN_DTYPE_U8] = {"|u1", "uint8", 1},
    [MN_DTYPE_I16] = {"<i2", "int16", 2},   [MN_DTYPE_U16] = {"<u2", "uint16", 2},
    [MN_DTYPE_I32] = {"<i4", "int32", 4},   [MN_DTYPE_F32] = {"<f4", "float32", 4},
    [MN_DTYPE_F64] = {"<f8", "float64", 8},
};

#define N_DTYPES ((int)(sizeof(dtypes) / sizeof(dtypes[0])))

size_t
mn_dtype_size(int dtype)
{
    return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].size : 0;
}

const char *
mn_dtype_name(int dtype)
{
    return dtypes[dtype > 0 && dtype < N_DTYPES ? dtype : 0].name;
}

const char *
mn_dtype_code(int dtype)
{
    return dtypes[dtype > 0 && dtype < N_DTYPES ? dtype : 0].descr;
}

static int
malformed(struct cursor *c, const char *what)
{
    return mn_fail(c->text, EINVAL, "%s: malformed .npy header: %s", c->path, what);
}

static void
skip_space(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t')) {
        c->at++;
    }
}

/* Returns whether the next character after space is `wanted`, and consumes it if so. */
static bool
accept(struct cursor *c, char wanted)
{
    skip_space(c);
    if (c->at < c->end && *c->at == wanted) {
        c->at++;
        return true;
    }
    return false;
}

static bool
accept_word(struct cursor *c, const char *word)
{
    size_t length = strlen(word);
    skip_space(c);
    if ((size_t)(c->end - c->at) >= length && memcmp(c->at, word, length) == 0) {
        c->at += length;
        return true;
    }
    return false;
}

/* Parses a quoted string without escapes; cuts it to fit `out`, which a known one always does. */
static int
parse_string(struct cursor *c, char *out, size_t size)
{
    skip_space(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) {
        return malformed(c, "a string was expected");
    }
    char quote = *c->at++;
    size_t length = 0;
    while (c->at < c->end && *c->at != quote) {
        if (*c->at == '\\') {
            return malformed(c, "a string with an escape");
        }
        if (length + 1 < size) {
            out[length++] = *c->at >= ' ' && *c->at <= '~' ? *c->at : '?'; /* for texts */
        }
        c->at++;
    }
    out[length] = '\0';
    return accept(c, quote) ? 0 : malformed(c, "a string without an end");
}

static int
parse_integer(struct cursor *c, int64_t *value)
{
    skip_space(c);
    const char *first = c->at;
    *value = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') {
        if (__builtin_mul_overflow(*value, (int64_t)10, value)
            || __builtin_add_overflow(*value, (int64_t)(*c->at - '0'), value)) {
            return mn_fail(c->text, EINVAL, "%s: a length in the shape exceeds 64 bits",
                           c->path);
        }
        c->at++;
    }
    if (c->at == first || (*first == '0' && c->at > first + 1)) {
        return malformed(c, "the shape is not a tuple of lengths"); /* 07 is no number */
    }
    if (c->at < c->end && *c->at == 'L') {
        c->at++; /* as Python 2 wrote long integers */
    }
    return 0;
}

static int
parse_shape(struct cursor *c, struct header *h)
{
    if (!accept(c, '(')) {
        return malformed(c, "the shape is not a tuple of lengths");
    }
    h->ndim = 0;
    while (!accept(c, ')')) {
        int64_t length;
        int rc = parse_integer(c, &length);
        if (rc < 0) {
            return rc;
        }
        if (h->ndim < MN_VOLUME_DIMS) {
            h->shape[h->ndim] = length;
        }
        if (h->ndim++ >= 64) {
            return malformed(c, "more than 64 axes");
        }
        if (!accept(c, ',')) {
            if (accept(c, ')')) {
                break;
            }
            return malformed(c, "the shape is not a tuple of lengths");
        }
    }
    h->has_shape = true;
    return 0;
}

static int
parse_descr(struct cursor *c, struct header *h)
{
    skip_space(c);
    if (c->at < c->end && *c->at == '[') {
        return mn_fail(c->text, EINVAL, "%s: holds a structured array, not voxels", c->path);
    }
    h->has_descr = true;
    return parse_string(c, h->descr, sizeof(h->descr));
}

static int
parse_item(struct cursor *c, struct header *h)
{
    char name[16];
    int rc = parse_string(c, name, sizeof(name));
    if (rc < 0) {
        return rc;
    }
    if (!accept(c, ':')) {
        return malformed(c, "':' was expected");
    }
    if (strcmp(name, "descr") == 0 && !h->has_descr) {
        return parse_descr(c, h);
    }
    if (strcmp(name, "shape") == 0 && !h->has_shape) {
        return parse_shape(c, h);
    }
    if (strcmp(name, "fortran_order") == 0 && !h->has_order) {
        h->has_order = true;
        h->fortran = accept_word(c, "True");
        return h->fortran || accept_word(c, "False")
                   ? 0
                   : malformed(c, "fortran_order is neither True nor False");
    }
    return malformed(c, "an unknown or repeated key; allowed are descr, fortran_order and shape");
}

static int
parse_dict(struct cursor *c, struct header *h)
{
    if (!accept(c, '{')) {
        return malformed(c, "no dict");
    }
    while (!accept(c, '}')) {
        int rc = parse_item(c, h);
        if (rc < 0) {
            return rc;
        }
        if (!accept(c, ',')) {
            if (accept(c, '}')) {
                break;
            }
            return malformed(c, "',' or '}' was expected");
        }
    }
    skip_space(c);
    if (c->at != c->end) {
        return malformed(c, "text after the dict");
    }
    if (!h->has_descr || !h->has_order || !h->has_shape) {
        return malformed(c, "descr, fortran_order or shape is missing");
    }
    return 0;
}

static int
check_dtype(struct cursor *c, const struct header *h, struct mn_npy *npy)
{
    const char *descr = strcmp(h->descr, "<u1") == 0 ? "|u1" : h->descr;
    for (int d = 1; d < N_DTYPES; d++) {
        if (strcmp(descr, dtypes[d].descr) == 0) {
            npy->dtype = d;
            return 0;
        }
    }
    return mn_fail(c->text, EINVAL,
                   "%s: dtype '%s' is not supported; it must be uint8 or little-endian "
                   "int16, uint16, int32, float32 or float64",
                   c->path, h->descr);
}

static int
check_shape(struct cursor *c, const struct header *h, struct mn_npy *npy,
            uint64_t file_size)
{
    if (h->ndim != MN_VOLUME_DIMS) {
        return mn_fail(c->text, EINVAL,
                       "%s: has %d axes; a volume has 4 (channel, depth, height, width)",
                       c->path, h->ndim);
    }
    int64_t bytes = (int64_t)mn_dtype_size(npy->dtype);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        npy->shape[axis] = h->shape[axis];
        if (h->shape[axis] == 0) {
            return mn_fail(c->text, EINVAL, "%s: axis %d is empty", c->path, axis);
        }
        if (__builtin_mul_overflow(bytes, h->shape[axis], &bytes)) {
            return mn_fail(c->text, EINVAL, "%s: its shape needs more than 2^63 bytes",
                           c->path);
        }
    }
    npy->data_bytes = (uint64_t)bytes;
    uint64_t body = file_size - npy->data_off;
    if (body != npy->data_bytes) {
        return mn_fail(c->text, EINVAL,
                       "%s: %s: the header promises %llu bytes of voxels, the file has "
                       "%llu",
                       c->path, body < npy->data_bytes ? "truncated" : "too long",
                       (unsigned long long)npy->data_bytes, (unsigned long long)body);
    }
    return 0;
}

/* Parses the bytes before the dict, which end in its length. */
static int
parse_prefix(const unsigned char *head, size_t length, struct cursor *c, uint64_t *start,
             uint64_t *dict_bytes, uint64_t *need)
{
    if (length < 12) {
        *need = 12;
        return 1;
    }
    if (memcmp(head, "\x93NUMPY", 6) != 0) {
        return mn_fail(c->text, EINVAL, "%s: is not a .npy file", c->path);
    }
    if (head[6] < 1 || head[6] > 3 || head[7] != 0) {
        return mn_fail(c->text, EINVAL, "%s: .npy format version %d.%d is unknown", c->path,
                       head[6], head[7]);
    }
    *dict_bytes = (uint64_t)head[8] | (uint64_t)head[9] << 8;
    *start = 10;
    if (head[6] > 1) {
        *dict_bytes |= (uint64_t)head[10] << 16 | (uint64_t)head[11] << 24;
        *start = 12;
    }
    return 0;
}

int
mn_npy_parse(struct mn_npy *npy, const unsigned char *head, size_t length,
             uint64_t file_size, const char *path, uint64_t *need, struct mn_text *text)
{
    struct cursor c = {.path = path, .text = text};
    struct header h = {0};
    uint64_t start = 0, dict_bytes = 0;
    if (file_size < 12) {
        return mn_fail(text, EINVAL, "%s: is not a .npy file: it has %llu bytes", path,
                       (unsigned long long)file_size);
    }
    int rc = parse_prefix(head, length, &c, &start, &dict_bytes, need);
    if (rc != 0) {
        return rc;
    }
    npy->data_off = start + dict_bytes;
    if (npy->data_off > file_size) {
        return mn_fail(text, EINVAL, "%s: truncated within its header", path);
    }
    if (npy->data_off > MN_NPY_HEADER_MAX) {
        return malformed(&c, "longer than 64 KiB");
    }
    if (npy->data_off > length) {
        *need = npy->data_off;
        return 1;
    }
    c.at = (const char *)head + start;
    c.end = c.at + dict_bytes;
    rc = parse_dict(&c, &h);
    if (rc == 0) {
        rc = check_dtype(&c, &h, npy);
    }
    if (rc == 0 && h.fortran) {
        rc = mn_fail(text, EINVAL,
                     "%s: is in Fortran order; save numpy.ascontiguousarray of it", path);
    }
    return rc == 0 ? check_shape(&c, &h, npy, file_size) : rc;
}
