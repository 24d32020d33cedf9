/* A list of cases with a pipeline: the samples of a dataset, made by any thread.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns its paths; borrows the pipeline. Never changes once made.
 */
#ifndef MN_CASE_LIST_H
#define MN_CASE_LIST_H

#include "ops/mn_pipeline.h"

struct mn_case {
    char *image, *label; /* paths; label may be NULL */
};

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

#endif
