/* Whether another worker comes where one has died, and after which pause.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   What ends one worker may end the next as well: a sample, worker_init_fn, a lack of memory.
 *   Nobody is to wait for workers that will never be, and no machine to be kept busy with
 *   starting them.
 *
 * Rule, for each place of the crew
 *   A death after a finished task begins anew. A row of deaths without one is a crash loop: the
 *   pause before the next worker is none, then MN_RESPAWN_PAUSE_FIRST_MS, and doubles up to
 *   MN_RESPAWN_PAUSE_MOST_MS. It has no end here: deaths with a task in hand end with that
 *   task's attempts (mn_tasks.h).
 *   Workers that die while they start have no task in hand. After MN_RESPAWN_DEATHS of them in a
 *   row, over a time, no other comes: MN_RESPAWN_NS, or MN_RESPAWN_KILLED_NS where the last was
 *   killed. One that the system would not make was tried for seconds already, and counts as if
 *   that time was over; so does one whose records made no sense.
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
/* What ends so many in a row, for so long, does not go away. Whoever kills at random, and a
 * machine that is short of memory, hits one or two. */
#define MN_RESPAWN_DEATHS 3u
#define MN_RESPAWN_NS UINT64_C(3000000000)
/* Whoever kills, as a rule somebody else, may hit several in a row. */
#define MN_RESPAWN_KILLED_NS UINT64_C(30000000000)

/* What is known of one place. Zeroed memory is one in which nobody has died. */
struct mn_respawn {
    uint32_t crash_loop; /* deaths in a row without a finished task, */
    uint32_t unready;    /* and how many of them, the last ones, while the worker started */
    uint64_t unready_ns; /* when the first of those was seen */
};

struct mn_respawn_death {
    bool finished;    /* the worker has finished a task */
    bool began;       /* it had started: it was READY */
    bool killed;      /* by SIGKILL or SIGTERM */
    bool not_started; /* the system has not made it, or what it wrote makes no sense */
    uint64_t now_ns;
};

/* Notes a death that nobody asked for. Whether there is to be another worker in its place. */
bool
mn_respawn_died(struct mn_respawn *r, const struct mn_respawn_death *death);

/* How long the one that comes next waits. */
uint16_t
mn_respawn_pause_ms(const struct mn_respawn *r);

#endif /* MN_POLICY_RESPAWN_H */
