/* Which free memory of the arena goes back to the system, and when.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Pages that were in use are several times as fast to write as fresh ones. So memory that
 *   the load will need again stays, and the rest is returned. Recent use shows what it needs. The
 *   allocator hands out the lowest address first, so under a steady load the same ranges are used
 *   again and again. The excess of an earlier load is not touched.
 *
 * Terms
 *   turn   the unit of age: MN_TRIM_TURN_NS in which memory was allocated, or
 *          MN_TRIM_PAUSE_NS in which none was. A loader whose consumer pauses, or that is
 *          between two epochs, ages ten times as slowly as one at work.
 *   warm   free, and may have pages
 *   pass   one walk over the free ranges, from the lowest address up; one per turn at most
 *
 * Rule
 *   Warm memory that was freed MN_TRIM_COLD turns ago is returned, except for a spare at the lowest
 *   addresses. The spare is a quarter of what batches in the making or ready use, at least
 *   MN_TRIM_SPARE. That amount comes and goes as slow samples do.
 *   Every MN_TRIM_COLD * MN_TRIM_LONG turns, memory of that age is returned without a spare.
 *   Warm memory counts against the memory limit. Over the limit the spare is at most what is
 *   left below it, and half of the age is enough.
 *
 * So memory that a load at work does not need is returned after about a second, the spare in ten to
 * twenty. When nothing is loaded, it takes eight to ten seconds, and the spare a hundred to two
 * hundred.
 *
 * A pure state machine: no clock, no lock, no system call.
 */
#ifndef MN_POLICY_TRIM_H
#define MN_POLICY_TRIM_H

#include <stdbool.h>
#include <stdint.h>

#define MN_TRIM_TURN_NS UINT64_C(250000000)
#define MN_TRIM_PAUSE_NS UINT64_C(2500000000)
/* Turns; longer than memory lies idle at an ordinary pace of the consumer. A training step of up to
 * some seconds is a pause of one or two turns. */
#define MN_TRIM_COLD 4u
#define MN_TRIM_LONG 10u
/* A batch or two of large samples. */
#define MN_TRIM_SPARE (UINT64_C(16) << 20)

/* Bytes. */
struct mn_trim_view {
    uint64_t used;  /* allocated */
    uint64_t kept;  /* of these, retained by the program */
    uint64_t warm;
    uint64_t limit;
};

struct mn_trim {
    uint64_t turned_ns; /* start of the current turn, 0 before the first */
    uint64_t allocs;    /* number of allocations at that time */
    uint32_t turns;     /* since the last pass without a spare */
    uint32_t age;       /* minimum age for the current pass, in turns; 0: there is no pass */
    uint64_t spare;     /* bytes that it leaves in place */
};

/* Returns whether a turn is over; then a pass may begin. allocs: allocations so far. */
bool
mn_trim_turn(struct mn_trim *r, uint64_t now_ns, uint64_t allocs);

/* Begins a pass if there may be something for it to find. */
void
mn_trim_begin(struct mn_trim *r, const struct mn_trim_view *view);

/* The pass has found len bytes that are old enough. Returns how many of them, from the start,
 * stay. */
uint64_t
mn_trim_keep(struct mn_trim *r, uint64_t len);

#endif
