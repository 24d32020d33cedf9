/* mn_engine_waits.c - when the caller waits for a batch, and when it has got one.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine.h"
#include "os/mn_clock.h"

/* How long the consumer needed since its last batch, and when it asked. The counters in the
 * control page are relaxed: people look at them. */
void
mn_engine_asked(struct mn_engine *e)
{
    uint64_t now = mn_now_ns();
    if (!e->asking) { /* else the last call was a part of this wait and gave nothing */
        e->asking = true;
        e->asked_ns = now;
    }
    e->counted_ns = now;
    mn_a64_store_relaxed(&e->shm.ctl->waiting_since_ns, now);
    if (e->given_ns != 0) {
        int64_t took = (int64_t)(now - e->given_ns);
        e->used_ns += (uint64_t)took;
        e->given_ns = 0;
        if (e->plan != NULL) {
            struct mn_plan *p = e->plan;
            p->consumer_ns = p->consumer_ns == 0 ? took : (3 * p->consumer_ns + took) / 4;
        }
    }
}

void
mn_engine_given(struct mn_engine *e, bool got)
{
    struct mn_ctl *c = e->shm.ctl;
    uint64_t now = mn_now_ns(), waited = now - e->asked_ns;
    e->given_ns = got ? now : 0;
    e->asking = !got;
    e->wait_ns += now - e->counted_ns;
    e->waits += got;
    e->wait_first_ns = e->waits == 1 && got ? waited : e->wait_first_ns;
    e->wait_max_ns = waited > e->wait_max_ns ? waited : e->wait_max_ns;
    mn_a64_store_relaxed(&c->wait_ns, e->wait_ns);
    mn_a64_store_relaxed(&c->waiting_since_ns, 0);
    mn_a64_store_relaxed(&c->given, e->waits);
}

void
mn_engine_span_begin(struct mn_engine *e)
{
    mn_engine_asked(e);
    e->spanned = true;
    e->served = e->plan != NULL && mn_plan_in_hand(e->plan, -1);
}

void
mn_engine_span_end(struct mn_engine *e, bool got)
{
    mn_engine_given(e, got);
    if (e->served && !got) {
        (void)mn_plan_in_hand(e->plan, 1); /* it has it still */
    }
    e->spanned = e->asking = e->served = false;
}

void
mn_engine_handed(struct mn_engine *e)
{
    mn_engine_span_begin(e);
    mn_engine_span_end(e, true);
}
