/* mn_waits.c - see mn_waits.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_waits.h"

int64_t
mn_waits_ask(struct mn_waits *w, uint64_t now_ns)
{
    int64_t used = -1;
    if (!w->asking) {
        w->asking = true;
        w->asked_ns = now_ns;
        w->starting = w->given_ns == 0;
    }
    w->part_ns = now_ns;
    if (w->given_ns != 0) {
        used = (int64_t)(now_ns - w->given_ns);
        w->used_ns += (uint64_t)used;
        w->given_ns = 0;
    }
    return used;
}

void
mn_waits_give(struct mn_waits *w, uint64_t now_ns, bool got)
{
    uint64_t waited = now_ns - w->asked_ns;
    w->given_ns = got ? now_ns : 0;
    w->asking = !got;
    w->wait_ns += now_ns - w->part_ns;
    w->n += got;
    w->max_ns = waited > w->max_ns ? waited : w->max_ns;
    if (!got) {
        return;
    }
    if (w->n == 1) {
        w->first_ns = waited;
    }
    else if (w->starting) {
        w->starts++;
        w->starts_ns += waited;
    }
    else if (waited > w->steady_max_ns) {
        w->steady_max_ns = waited;
    }
}

void
mn_waits_forget(struct mn_waits *w)
{
    w->given_ns = 0;
}
