/* Whether a batch with a collate_fn of the user's is split: see policy_split_collate.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_split_collate.h"

bool
mn_split_worth(bool on, const struct mn_histogram *wall, int64_t mean_ns, int64_t send_ns)
{
    if (send_ns < 0 || wall->total < MN_SPLIT_EVIDENCE) {
        return false;
    }
    int64_t most = mean_ns / MN_SPLIT_SHARE;
    if (send_ns > (on ? most + most / 2 : most)) {
        return false;
    }
    int64_t quartile = mn_histogram_quantile(wall, 250);
    if (quartile > INT64_MAX / 2) {
        return false;
    }
    return mn_histogram_weight(wall, 2 * quartile) >= (on ? MN_SPLIT_OFF : MN_SPLIT_ON);
}
