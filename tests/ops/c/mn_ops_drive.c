/* Drives csrc/ops without Python, for sanitizers: mn_ops_drive MODE SEED SECONDS FOLDER
 * SPDX-License-Identifier: Apache-2.0
 *
 * random   random pipelines over random volumes, from strided memory and from files
 * threads  four threads on one pipeline and its files, compared with one thread's bytes
 * kernels  every instruction set's inner loops, compared with the plain ones bit by bit; prints
 *          a hash of their results, which is the same for a seed whatever the machine
 * mapped   four threads that share a table of mappings with too little room, of files that one
 *          of them shortens while it reads them
 *
 * Prints what it did; any report of a sanitizer, and any failed check, ends it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ops/mn_pipeline.h"

#define CHECK(cond)                                                                     \
    do {                                                                                \
        if (!(cond)) {                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond);                  \
            abort();                                                                    \
        }                                                                               \
    } while (0)

static uint64_t seed, drawn;

static uint64_t
below(uint64_t bound)
{
    return mn_draw_below(seed, drawn++, 0, 0, bound);
}

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* -- random ------------------------------------------------------------------------------ */

static struct mn_op
random_op(const struct mn_operator *user)
{
    struct mn_op op = {.kind = (enum mn_op_kind)(1 + below(MN_OP_KINDS - 1))};
    op.flag = below(2);
    op.keep_boxes = below(2);
    op.p = (double)below(3) / 2;
    op.user = user;
    for (int axis = 1; axis < 4; axis++) {
        op.size[axis] = (int64_t)(1 + below(op.kind == MN_OP_PAD ? 14 : 5));
        op.per_axis[axis] = op.kind == MN_OP_RESAMPLE ? 0.3 + (double)below(20) / 10
                                                      : (double)below(2);
        if (op.kind == MN_OP_RESAMPLE && below(2)) {
            op.size[axis] = 0;
        }
    }
    op.values[0] = 0.5;
    op.values[1] = 1.5;
    op.values[3] = 1;
    if (op.kind == MN_OP_CAST) {
        op.dtypes[0] = below(2) ? MN_DTYPE_U8 : MN_DTYPE_F32;
        op.dtypes[1] = MN_DTYPE_U8;
    }
    return op;
}

static int
negate(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
       size_t errlen)
{
    (void)state;
    (void)in;
    (void)err;
    (void)errlen;
    unsigned char *bytes = out->image.data;
    size_t n = (size_t)(out->image.shape[0] * out->image.strides[0]);
    for (size_t i = 0; i < n; i++) {
        bytes[i] ^= 0x80; /* of a float: the sign or a bit of the mantissa */
    }
    return 0;
}

/* Memory of exactly the bytes that these strides reach, so that a step past is seen. */
static unsigned char *
strided_memory(struct mn_op_volume *volume, const int64_t *shape, int dtype)
{
    int64_t order[4] = {0, 1, 2, 3}, item = (int64_t)mn_dtype_size(dtype), low = 0, high = 0;
    for (int i = 3; i > 0; i--) {
        int j = (int)below((uint64_t)i + 1);
        int64_t swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    int64_t stride = item;
    memset(volume, 0, sizeof(*volume));
    for (int i = 3; i >= 0; i--) {
        int64_t axis = order[i];
        volume->shape[axis] = shape[axis];
        volume->strides[axis] = below(2) ? stride : -stride;
        int64_t reach = (shape[axis] - 1) * stride;
        *(volume->strides[axis] < 0 ? &low : &high) += reach;
        stride *= shape[axis] + (int64_t)below(2);
    }
    size_t bytes = (size_t)(low + high + item);
    unsigned char *memory = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        memory[i] = (unsigned char)(dtype == MN_DTYPE_U8 ? below(4) * below(2) : below(256));
    }
    volume->dtype = dtype;
    volume->data = memory + low;
    return memory;
}

static void
store(struct mn_work *work, const struct mn_view *view)
{
    if (view->dtype != MN_DTYPE_NONE) {
        size_t bytes = mn_view_bytes(view);
        void *out = malloc(bytes);
        CHECK(out != NULL && mn_work_store(work, view, out) == 0);
        free(out);
    }
}

static int
run_once(struct mn_pipeline *pipeline, const struct mn_source *source)
{
    char chars[200] = "";
    struct mn_text text = {chars, sizeof(chars)};
    struct mn_work *work = NULL;
    CHECK(mn_work_begin(pipeline, &work, &text) == 0);
    int tail = (int)below((uint64_t)mn_pipeline_tail_most(pipeline) + 1);
    uint64_t key = below(1000);
    int rc = mn_pipeline_apply(pipeline, work, tail, source, key, 0);
    if (rc == 0) {
        unsigned char *recipe = malloc(8 * (size_t)MN_RECIPE_WORDS(tail));
        CHECK(recipe != NULL);
        mn_pipeline_recipe(pipeline, tail, key, 0, recipe);
        free(recipe);
        store(work, &work->image);
        store(work, &work->label);
    }
    else {
        CHECK(chars[0] != '\0');
    }
    mn_work_end(pipeline, work);
    return rc;
}

static void
drive_random(double end)
{
    const struct mn_operator user = {.abi = MN_OPS_ABI, .size = sizeof(user), .name = "negate",
                                     .run = negate};
    long tried = 0, worked = 0;
    while (seconds() < end) {
        struct mn_op ops[6];
        int n = (int)below(6);
        for (int i = 0; i < n; i++) {
            ops[i] = random_op(&user);
        }
        const struct mn_kernels *kernels = mn_kernels_get((int)below(4));
        struct mn_pipeline *pipeline = NULL;
        CHECK(mn_pipeline_open(&pipeline, ops, n, kernels, NULL) == 0);
        int64_t shape[4] = {1};
        for (int axis = 1; axis < 4; axis++) {
            shape[axis] = (int64_t)(1 + below(12));
        }
        struct mn_source source = {0};
        int dtype = (int)(1 + below(MN_DTYPE_F64));
        unsigned char *image = strided_memory(&source.image, shape, dtype), *label = NULL;
        if (below(5) > 0) {
            label = strided_memory(&source.label, shape, MN_DTYPE_U8);
        }
        for (int k = 0; k < 3; k++) {
            worked += run_once(pipeline, &source) == 0;
            tried++;
        }
        free(image);
        free(label);
        mn_pipeline_close(pipeline);
    }
    CHECK(worked > 0);
    printf("%ld samples, %ld without an error\n", tried, worked);
}

/* -- kernels ----------------------------------------------------------------------------- */

#define MOST_VOXELS 400
#define HASHED_ROUNDS 200

enum { FIND_NONZERO, FIND_OTHER, REVERSE_1, REVERSE_4, SCALE, NORMALIZE, ADD_NOISE, MIX,
       RESIZE_ROW, MIX_ROWS, LOOPS };

/* What a loop is called with. Nothing is aligned better than it must be. */
struct call {
    int64_t n, from;
    uint64_t number;
    struct mn_key key;
    float a[MOST_VOXELS + 1], b[MOST_VOXELS + 1], low, high, mean, std, t;
    double factor;
};

static float
any_float(void)
{
    static const float odd[] = {0.0f, -0.0f, 1e-45f, -1e-39f, 3e38f, __builtin_inff(),
                                -__builtin_inff(), __builtin_nanf("")};
    if (below(12) == 0) {
        return odd[below(sizeof(odd) / sizeof(odd[0]))];
    }
    return ((float)below(1u << 24) - 0x1p23f) / (float)(1u << below(24));
}

static void
draw_call(struct call *c)
{
    c->n = (int64_t)below(MOST_VOXELS + 1);
    c->from = (int64_t)below((uint64_t)c->n + 1);
    c->number = below(UINT64_C(1) << 33); /* of the first normal; past 2^32 they repeat */
    c->key = (struct mn_key){below(UINT64_MAX), below(UINT64_MAX), (uint32_t)below(1 << 16)};
    c->low = any_float();
    c->high = c->low + 1;
    c->mean = (float)below(100) / 7;
    c->std = (float)(1 + below(100)) / 9;
    c->t = (float)below(101) / 100;
    c->factor = (double)below(1000) / 333;
    bool flat = below(2) == 0; /* long runs of one byte, for the searches */
    for (int i = 0; i <= MOST_VOXELS; i++) {
        c->a[i] = flat && i != c->n / 4 ? 0.0f : any_float();
        c->b[i] = any_float();
    }
}

#define MOST_TAPS 10

/* Resizes a row of bytes, or mixes several: what the two loops of photos do. */
static void
run_photo_loop(const struct mn_kernels *k, int loop, const struct call *c, const uint8_t *bytes,
               uint8_t *out)
{
    static uint32_t first[MOST_VOXELS / 4];
    static int32_t weights[MOST_VOXELS / 4 * MOST_TAPS * 4];
    const uint8_t *rows[MOST_TAPS];
    int taps = 2 * (1 + (int)c->from % (MOST_TAPS / 2));
    for (int i = 0; i < MOST_VOXELS / 4; i++) {
        first[i] = (uint32_t)(i + (int)c->from % 7);
        for (int tap = 0; tap < taps; tap++) {
            for (int copy = 0; copy < 4; copy++) {
                weights[(i * taps + tap) * 4 + copy] =
                    loop == RESIZE_ROW ? (1 << MN_WEIGHT_BITS) / taps - (i + tap) % 5 : 0;
            }
        }
    }
    if (loop == RESIZE_ROW) {
        k->resize_row(out, bytes, first, weights, taps / 2, c->n / 4);
        return;
    }
    for (int tap = 0; tap < taps; tap++) {
        rows[tap] = bytes + 13 * tap;
        weights[tap] = (1 << MN_WEIGHT_BITS) / taps + tap % 2;
    }
    k->mix_rows(out, rows, weights, taps, c->n / 16 * 16);
}

/* The bytes that a loop gives, in out[MOST_VOXELS], which starts as the call's a. */
static void
run_loop(const struct mn_kernels *k, int loop, struct call *c, float *out)
{
    const uint8_t *bytes = (const uint8_t *)c->a + c->number % 4;
    int64_t found = -1, first = (int64_t)c->number;
    memcpy(out, c->a, MOST_VOXELS * sizeof(float));
    switch (loop) {
    case FIND_NONZERO:
        found = k->find_nonzero(bytes, c->from, 4 * c->n);
        break;
    case FIND_OTHER:
        found = k->find_other(bytes, c->from, 4 * c->n, (uint8_t)(c->number >> 32));
        break;
    case REVERSE_1:
        k->reverse_1(out, bytes, 4 * c->n);
        break;
    case REVERSE_4:
        k->reverse_4(out, bytes, c->n);
        break;
    case SCALE:
        k->scale(out, c->n, c->factor);
        break;
    case NORMALIZE:
        k->normalize(out, c->n, c->low, c->high, c->mean, c->std);
        break;
    case ADD_NOISE:
        k->add_noise(out, c->n, first, &c->key, c->mean, c->std);
        break;
    case MIX:
        k->mix(out, c->a, c->b, c->t, c->n);
        break;
    default:
        run_photo_loop(k, loop, c, bytes, (uint8_t *)out);
    }
    if (found >= 0) {
        memcpy(out, &found, sizeof(found));
    }
}

static uint64_t
hash_of(uint64_t hash, const float *values)
{
    for (int i = 0; i < MOST_VOXELS; i++) {
        uint32_t bits = 0x7fc00000; /* processors differ in the sign of the NaNs that they make */
        if (values[i] == values[i]) {
            memcpy(&bits, &values[i], sizeof(bits));
        }
        hash = (hash ^ bits) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static void
drive_kernels(double end)
{
    static struct call call;
    static float plain[MOST_VOXELS], other[MOST_VOXELS];
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    int levels = 0;
    for (long round = 0; round < HASHED_ROUNDS || seconds() < end; round++) {
        draw_call(&call);
        for (int loop = 0; loop < LOOPS; loop++) {
            run_loop(mn_kernels_get(0), loop, &call, plain);
            hash = round < HASHED_ROUNDS ? hash_of(hash, plain) : hash;
            for (levels = 1; mn_kernels_get(levels) != NULL; levels++) {
                run_loop(mn_kernels_get(levels), loop, &call, other);
                if (memcmp(plain, other, sizeof(plain)) != 0) {
                    fprintf(stderr, "loop %d of %s\n", loop, mn_kernels_get(levels)->name);
                    abort();
                }
            }
        }
    }
    printf("%016llx of %d sets, the best %s\n", (unsigned long long)hash, levels,
           mn_kernels_best()->name);
}

/* -- threads ----------------------------------------------------------------------------- */

#define CASES 3
#define PATCH 8
#define VOXELS (PATCH * PATCH * PATCH)
#define SAMPLES 24
#define TAIL 1 /* operators that are left as a recipe */

struct result {
    float image[VOXELS];
    uint8_t label[VOXELS];
    uint64_t recipe[MN_RECIPE_WORDS(TAIL)];
};

static struct result expected[SAMPLES];

static char *
write_volume(const char *folder, int number, char kind)
{
    char *path = NULL, head[128];
    CHECK(asprintf(&path, "%s/%d_%c.npy", folder, number, kind) > 0);
    int side = 12 + number, item = kind == 'x' ? 4 : 1;
    size_t bytes = (size_t)(side * side * side * item);
    memset(head, ' ', sizeof(head));
    memcpy(head, "\x93NUMPY\x01\x00\x76\x00", 10);
    int length = snprintf(head + 10, 117,
                          "{'descr': '%s', 'fortran_order': False, 'shape': (1, %d, %d, %d), }",
                          kind == 'x' ? "<f4" : "|u1", side, side, side);
    head[10 + length] = ' ';
    head[127] = '\n';
    unsigned char *body = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        body[i] = (unsigned char)(kind == 'x' ? below(100) : below(3) * below(2));
    }
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(head, 128, 1, file) == 1 && fwrite(body, bytes, 1, file) == 1);
    CHECK(fclose(file) == 0);
    free(body);
    return path;
}

static struct mn_cases *
open_cases(struct mn_pipeline **pipeline, char *const *paths)
{
    struct mn_op ops[5] = {{.kind = MN_OP_READ_NPY, .dtypes = {MN_DTYPE_F32, MN_DTYPE_U8}},
                           {.kind = MN_OP_RAND_BALANCED_CROP, .flag = true,
                            .keep_boxes = true, .p = 0.7,
                            .size = {0, PATCH, PATCH, PATCH}},
                           {.kind = MN_OP_RAND_FLIP, .per_axis = {0, 0.5, 0.5, 0.5}},
                           {.kind = MN_OP_RAND_SCALE_INTENSITY, .p = 0.5, .values = {0.7, 1.3, 1}},
                           {.kind = MN_OP_RAND_GAUSSIAN_NOISE, .p = 0.5, .values = {0.1}}};
    struct mn_case *list = calloc(CASES, sizeof(*list));
    for (int i = 0; i < CASES; i++) {
        list[i] = (struct mn_case){strdup(paths[2 * i]), strdup(paths[2 * i + 1])};
    }
    struct mn_cases *cases = NULL;
    char chars[300] = "";
    struct mn_text text = {chars, sizeof(chars)};
    CHECK(mn_pipeline_open(pipeline, ops, 5, NULL, &text) == 0);
    int rc = mn_cases_open(&cases, *pipeline, list, CASES, SAMPLES / CASES, false, TAIL, false,
                           &text);
    if (rc != 0) {
        fprintf(stderr, "%s\n", chars);
    }
    CHECK(rc == 0);
    return cases;
}

static void
make(struct mn_cases *cases, int index, struct result *result)
{
    const struct mn_native_pipeline *native = &cases->native;
    char err[200];
    void *out[3] = {result->image, result->label, result->recipe};
    uint64_t hi, lo;
    mn_native_key(native->keying, 5, 0, index, 0, &hi, &lo);
    CHECK(native->run(native->state, index, hi, lo, out, err, sizeof(err)) == 0);
}

static void *
thread_main(void *arg)
{
    struct result *result = malloc(sizeof(*result));
    for (int round = 0; round < 4; round++) {
        for (int index = 0; index < SAMPLES; index++) {
            make(arg, index, result);
            CHECK(memcmp(result, &expected[index], sizeof(*result)) == 0);
        }
    }
    free(result);
    return NULL;
}

static void
drive_threads(double end, const char *folder)
{
    char *paths[2 * CASES];
    long rounds = 0;
    struct mn_pipeline *pipeline;
    for (int i = 0; i < CASES; i++) {
        paths[2 * i] = write_volume(folder, i, 'x');
        paths[2 * i + 1] = write_volume(folder, i, 'y');
    }
    struct mn_cases *cases = open_cases(&pipeline, paths);
    for (int index = 0; index < SAMPLES; index++) {
        make(cases, index, &expected[index]);
    }
    do {
        mn_cases_close(cases);
        mn_pipeline_close(pipeline);
        cases = open_cases(&pipeline, paths); /* caches and pool empty again */
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_create(&threads[i], NULL, thread_main, cases) == 0);
        }
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        rounds++;
    } while (seconds() < end);
    mn_cases_close(cases);
    mn_pipeline_close(pipeline);
    for (int i = 0; i < 2 * CASES; i++) {
        free(paths[i]);
    }
    printf("%ld rounds of 4 threads\n", rounds);
}

/* -- mapped ------------------------------------------------------------------------------ */

#define FILES 12
#define PAGE 4096
#define PAGES 8

static struct mn_maps maps;
static mn_a64 shortened;
static char *mapped_paths[FILES];

static void
write_pages(const char *path, int number)
{
    unsigned char page[PAGE];
    memset(page, number + 1, sizeof(page));
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    for (int i = 0; i < PAGES; i++) {
        CHECK(fwrite(page, sizeof(page), 1, file) == 1);
    }
    CHECK(fclose(file) == 0);
}

/* Reads the file whole. With `shorten` its last part goes after the first half was read. */
static int
read_pages(int number, bool shorten)
{
    struct mn_npy_file file;
    struct mn_npy_count count = {0};
    struct mn_npy_buffer buffer = {0};
    const unsigned char *bytes = NULL;
    bool right = true;
    char chars[300] = "";
    struct mn_text text = {chars, sizeof(chars)};
    CHECK(mn_npy_open(&file, &maps, mapped_paths[number], false, &text) == 0);
    mn_npy_header_known(&file);
    CHECK((file.map != NULL) == (file.fd == -1) && file.identity.size == PAGES * PAGE);
    mn_npy_begin(&file);
    CHECK(mn_npy_read(&file, &buffer, 0, PAGES * PAGE, &bytes, &count, &text) == 0);
    shorten = shorten && file.map != NULL;
    mn_a64_add_relaxed(&shortened, shorten);
    for (int i = 0; i < PAGES * PAGE; i++) {
        if (shorten && i == PAGES * PAGE / 2) {
            int left = i + (number % 3 == 0 ? PAGE : number % 3 == 1 ? -PAGE : 1);
            CHECK(truncate(mapped_paths[number], left) == 0);
        }
        right = right && bytes[i] == number + 1;
    }
    int rc = mn_npy_end(&file, 0, &text);
    CHECK(rc == (shorten ? -EIO : 0) && (right || rc != 0));
    CHECK((rc != 0) == (strstr(chars, "became shorter while it was read") != NULL));
    mn_npy_close(&file, &maps);
    free(buffer.bytes);
    return rc;
}

static void *
mapped_main(void *arg)
{
    int me = *(int *)arg;
    for (int round = 0; round < 40; round++) {
        for (int number = me; number < FILES; number++) {
            bool mine = number % 4 == me, others = number < FILES - 4;
            if (others) {
                CHECK(read_pages(number, false) == 0);
            }
            else if (mine) { /* alone with it, so that it is known who notices */
                (void)read_pages(number, round % 2 == 0);
                write_pages(mapped_paths[number], number);
            }
        }
    }
    return NULL;
}

static void
drive_mapped(double end, const char *folder)
{
    long rounds = 0;
    for (int i = 0; i < FILES; i++) {
        CHECK(asprintf(&mapped_paths[i], "%s/%d.bytes", folder, i) > 0);
        write_pages(mapped_paths[i], i);
    }
    do {
        int numbers[4] = {0, 1, 2, 3};
        pthread_t threads[4];
        maps = (struct mn_maps){.most_bytes = rounds % 2 == 0 ? 3 * PAGES * PAGE : UINT64_MAX};
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_create(&threads[i], NULL, mapped_main, &numbers[i]) == 0);
        }
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        uint64_t found = 0;
        for (int i = 0; i < MN_MAPS; i++) {
            found += mn_a64_load_relaxed(&maps.slots[i].map) != 0;
        }
        CHECK(mn_a64_load_relaxed(&maps.bytes) == found * PAGES * PAGE);
        CHECK(found > 0 && found * PAGES * PAGE <= maps.most_bytes);
        mn_maps_fini(&maps);
        CHECK(mn_a64_load_relaxed(&maps.bytes) == 0);
        rounds++;
    } while (seconds() < end || rounds < 2);
    for (int i = 0; i < FILES; i++) {
        free(mapped_paths[i]);
    }
    CHECK(mn_a64_load_relaxed(&shortened) > 0);
    printf("%ld rounds of 4 threads\n", rounds);
}

int
main(int argc, char **argv)
{
    CHECK(argc == 5);
    seed = strtoull(argv[2], NULL, 10);
    double end = seconds() + strtod(argv[3], NULL);
    if (strcmp(argv[1], "random") == 0) {
        drive_random(end);
    }
    else if (strcmp(argv[1], "kernels") == 0) {
        drive_kernels(end);
    }
    else if (strcmp(argv[1], "mapped") == 0) {
        drive_mapped(end, argv[4]);
    }
    else {
        drive_threads(end, argv[4]);
    }
    return 0;
}
