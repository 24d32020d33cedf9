/* Whether a dead worker is replaced, and after which pause.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   What ends one worker may end the next as well: a sample, worker_init_fn, a lack of memory.
 *   The caller must not wait for workers that will never exist, and the machine must not be
 *   busy with starting them.
 *
 * Rule, for each place of the crew
 *   A death after a finished task begins anew. A series of deaths without one is a crash loop.
 *   The pause before the next worker is none, then MN_RESPAWN_PAUSE_FIRST_MS, and doubles up
 *   to MN_RESPAWN_PAUSE_MOST_MS. The series has no end here: if the workers die while they run
 *   a task, it ends with that task's attempts (mn_tasks.h).
 *   Workers that die while they start have no task. After MN_RESPAWN_DEATHS of them in a row,
 *   over a time, the place is not filled again. The time is MN_RESPAWN_NS, or
 *   MN_RESPAWN_KILLED_NS if the last one was killed. A worker that the system would not make
 *   was tried for seconds already, and counts as if that time was over. So does one whose records
 *   made no sense.
 *
 * A pure state machine: no clock, no lock, no system call.
 */
#ifndef MN_POLICY_RESPAWN_H
#define MN_POLICY_RESPAWN_H

#include <stdbool.h>
#include <stdint.h>

/* From a tenth of a second, which a user does not notice, to one second, which costs the machine
 * next to nothing. */
#define MN_RESPAWN_PAUSE_FIRST_MS 100u
#define MN_RESPAWN_PAUSE_MOST_MS 1000u
/* A cause that ends this many in a row, for this long, does not go away. A process that kills at
 * random, or a machine that is short of memory, hits one or two. */
#define MN_RESPAWN_DEATHS 3u
#define MN_RESPAWN_NS UINT64_C(3000000000)
/* A killer, usually another program, may hit several in a row. */
#define MN_RESPAWN_KILLED_NS UINT64_C(30000000000)

/* The history of one place. Zeroed memory is a place without deaths. */
struct mn_respawn {
    uint32_t crash_loop; /* deaths in a row without a finished task */
    uint32_t unready;    /* how many of them, the last ones, while the worker started */
    uint64_t unready_ns; /* when the first of those was seen */
};

struct mn_respawn_death {
    bool finished;    /* the worker has finished a task */
    bool began;       /* it had started: it was READY */
    bool killed;      /* by SIGKILL or SIGTERM */
    bool not_started; /* the system has not made it, or its records made no sense */
    uint64_t now_ns;
};

/* Records a death that was not asked for. Returns whether to replace the worker. */
bool
mn_respawn_died(struct mn_respawn *r, const struct mn_respawn_death *death);

/* Returns how long the next worker waits. */
uint16_t
mn_respawn_pause_ms(const struct mn_respawn *r);

#endif
