/* How many neighbouring samples form one task: see policy_chunk.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_chunk.h"

static int64_t
ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t
target_of(int64_t overhead_ns)
{
    if (overhead_ns > INT64_MAX / MN_CHUNK_AMORTISE) {
        return INT64_MAX;
    }
    int64_t amortised = overhead_ns * MN_CHUNK_AMORTISE;
    return amortised > MN_CHUNK_TARGET_NS ? amortised : MN_CHUNK_TARGET_NS;
}

int64_t
mn_chunk_size(int64_t cost_ns, int64_t overhead_ns, int64_t batch, int64_t idle)
{
    if (batch <= 1 || cost_ns <= 0) {
        return 1;
    }
    overhead_ns = overhead_ns < 0 ? 0 : overhead_ns;
    int64_t target = target_of(overhead_ns);
    int64_t size = ceil_div(target, cost_ns);
    if (idle > 1) {
        int64_t share = ceil_div(batch, idle);
        int64_t least = ceil_div(target / MN_CHUNK_AMORTISE * MN_CHUNK_SPREAD, cost_ns);
        int64_t spread = share > least ? share : least;
        size = size < spread ? size : spread;
    }
    size = size < batch ? size : batch;
    return ceil_div(batch, ceil_div(batch, size));
}

int64_t
mn_chunk_next(const int64_t *costs_ns, int64_t n, int64_t overhead_ns, int64_t limit)
{
    int64_t target = target_of(overhead_ns < 0 ? 0 : overhead_ns);
    int64_t sum = 0;
    int64_t i = 0;
    for (; i < n && (i == 0 || i < limit); i++) {
        int64_t c = costs_ns[i] > 0 ? costs_ns[i] : 0;
        if (i > 0 && (c >= target || sum >= target - c)) {
            /* A costly sample begins its own task; one that fills the target joins. */
            return c >= target ? i : i + 1;
        }
        sum += c;
        if (sum >= target) {
            return i + 1;
        }
    }
    return i;
}
