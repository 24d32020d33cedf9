/* Pipelines: a list of operators, run on one sample after the other by any thread.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pipeline never changes once made, except for its cache, mappings, pool and counters, which are
 * atomic. So any number of threads may run it at once, and a fork finds no lock held.
 *
 * Running is split in two, so that the caller can allocate outputs whose shape depends on the
 * input: mn_pipeline_apply leaves views (mn_pipeline_sample.h), mn_work_store writes them.
 *
 * Draws of the operators. All are from stream 0 of the sample's key, with the operator's place in
 * its pipeline as number (minato/ops.h). `u` is mn_draw_uniform, `below` mn_draw_below:
 *   RandBalancedCrop  0 u: foreground if under p; 1 below: class; 2 below: component;
 *                     3, 4, 5 below: depth, height, width
 *   RandCrop          3, 4, 5 below: depth, height, width
 *   RandFlip          0, 1, 2 u: depth, height, width, each if under p
 *   RandScaleIntensity 0 u: if under p; 1 u: the factor
 *   RandGaussianNoise 0 u: if under p; 1 u: the standard deviation; stream 1: the normals
 */
#ifndef MN_PIPELINE_H
#define MN_PIPELINE_H

#include "base/mn_atomic.h"
#include "minato/ops.h"
#include "ops/mn_pipeline_sample.h"
#include "ops/mn_recipe.h"

enum mn_op_kind {
    MN_OP_READ_NPY,
    MN_OP_RAND_BALANCED_CROP,
    MN_OP_RAND_CROP,
    MN_OP_RAND_FLIP,
    MN_OP_CAST,
    MN_OP_RAND_SCALE_INTENSITY,
    MN_OP_RAND_GAUSSIAN_NOISE,
    MN_OP_NORMALIZE,
    MN_OP_PAD,
    MN_OP_RESAMPLE,
    MN_OP_USER,
    MN_OP_KINDS
};

struct mn_op {
    enum mn_op_kind kind;
    bool flag;         /* read: direct; crops: include the last start; pad: constant */
    bool keep_boxes;   /* balanced crop: cache the boxes of files */
    int dtypes[2];     /* read, cast: image, label; MN_DTYPE_NONE: unchanged */
    int64_t size[4];   /* crops: patch; pad: least size; resample: size, or 0; [0] unused */
    double p;          /* probability */
    double per_axis[4]; /* flip: probabilities; resample: factors; [0] unused */
    double values[4];  /* scale: low, high, offset. noise: largest std, mean.
                        * normalize: low, high, mean, std. pad: image, label */
    const struct mn_operator *user;
};

/* Idle works. Threads beyond this number allocate one for each sample. */
#define MN_POOL 64

struct mn_pipeline {
    const struct mn_kernels *kernels;
    struct mn_filecache cache;
    mn_a64 pool[MN_POOL]; /* struct mn_work *, or 0 */
    struct mn_maps maps;
    mn_a64 samples, bytes_read, bytes_touched, scans, headers_parsed, files_mapped;
    int n_ops;
    struct mn_op ops[];
};

/* The source of a sample: paths for a pipeline that begins with ReadNpy, else arrays. A label path
 * of NULL, or a label of dtype MN_DTYPE_NONE: there is no label. */
struct mn_source {
    const char *image_path, *label_path;
    struct mn_op_volume image, label;
};

/* Makes a pipeline of a copy of these operators. Kernels NULL: the best. */
int
mn_pipeline_open(struct mn_pipeline **pipeline, const struct mn_op *ops, int n_ops,
                 const struct mn_kernels *kernels, struct mn_text *text);

void
mn_pipeline_close(struct mn_pipeline *pipeline);

/* Gives the calling thread a work, to be returned by mn_work_end(). */
int
mn_work_begin(struct mn_pipeline *pipeline, struct mn_work **work, struct mn_text *text);

/* Returns a work to the pipeline, which closes its files and frees its blocks. */
void
mn_work_end(struct mn_pipeline *pipeline, struct mn_work *work);

/* Runs all operators but the last `tail`. work->image and work->label then say what to store. */
int
mn_pipeline_apply(struct mn_pipeline *pipeline, struct mn_work *work, int tail,
                  const struct mn_source *source, uint64_t key_hi, uint64_t key_lo);

/* Returns how many operators at the end are all steps (mn_recipe.h), which may be left to a device:
 * the largest possible `tail`. */
int
mn_pipeline_tail_most(const struct mn_pipeline *pipeline);

/* Writes what the last `tail` operators do to the sample of this key: MN_RECIPE_WORDS(tail) words,
 * at any alignment. */
void
mn_pipeline_recipe(const struct mn_pipeline *pipeline, int tail, uint64_t key_hi,
                   uint64_t key_lo, void *recipe);

/* Writes a view, C contiguous. */
int
mn_work_store(struct mn_work *work, const struct mn_view *view, void *to);

/* -- A list of cases: the samples of a dataset, made by any thread ---------------------- */

struct mn_case {
    char *image, *label; /* paths; label may be NULL */
};

/* Owns its paths; borrows the pipeline. Never changes once made. */
struct mn_cases {
    struct mn_pipeline *pipeline;
    int64_t n_cases;
    struct mn_case *cases;
    bool has_label, with_index;
    int tail; /* operators at the end that are left as a recipe */
    bool windows; /* the volumes are elsewhere: a sample only says which window of which case */
    struct mn_native_pipeline native; /* its state is this structure */
};

/* Opens a list. Takes over `list` (malloc'ed, like its strings), even on failure. The fields follow
 * from the first case's headers and the pipeline; it is an error if a shape would depend on the
 * case. The samples are the cases, `repeat` times.
 * If `tail` is above 0, the last `tail` operators are not run. A field of 64-bit words behind the
 * volumes then has the sample's recipe (mn_recipe.h). With `windows` a sample has its window in
 * place of the volumes, and always a recipe. The pipeline must then be ReadNpy, a crop and that
 * tail. */
int
mn_cases_open(struct mn_cases **cases, struct mn_pipeline *pipeline, struct mn_case *list,
              int64_t n_cases, int64_t repeat, bool with_index, int tail, bool windows,
              struct mn_text *text);

void
mn_cases_close(struct mn_cases *cases);

/* Finds the boxes of case number `at` now, if the pipeline has a balanced crop that caches them.
 * Later samples then never wait for a scan. */
int
mn_cases_warm(const struct mn_cases *cases, int64_t at, struct mn_text *text);

/* -- Private to the pipeline's files --------------------------------------------------- */

/* Computes the shape after padding or resampling; axes of -1 stay unknown. */
int
mn_op_pad_shape(const struct mn_op *op, int64_t *shape, struct mn_text *text);

int
mn_op_resample_shape(const struct mn_op *op, int64_t *shape, struct mn_text *text);

#endif /* MN_PIPELINE_H */
