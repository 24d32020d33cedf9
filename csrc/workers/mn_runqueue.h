/* mn_runqueue.h - the claim order: queues of tasks, filled by the trainer, emptied by workers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors. One producer (the trainer, under the engine's mutex); any number of workers.
 *
 * A queue is a ring of 64-bit entries {generation, task number}.  An entry is only advice: the task
 * word decides. A worker reads entries from the queue's hint on. It claims the first whose task
 * word is QUEUED with the entry's generation, by one compare-and-swap QUEUED -> RUNNING(worker). So
 * a worker that dies anywhere either owns the task or does not.
 *
 * Before the claim, a worker writes in its own entry which task it is about to claim [A1]. A task
 * that no entry names is owned by no worker, whatever a worker may have written over its word.
 *
 * Owners. tail and the ring: trainer. hint: any worker, forward only (CAS from the value it
 * scanned from). Task words: see mn_records.h.
 *
 * Invariants.
 *   I1  An entry whose task was seen not QUEUED with the entry's generation never becomes claimable
 *       again. A re-issue moves the generation and writes a new entry. Hence a worker may move the
 *       hint past every entry that it has seen in that state.
 *   I2  The producer never overwrites an entry that is still claimable. It has its own
 *       head, moves it over entries that are not claimable, and refuses (MN_FULL) when the
 *       ring is full between head and tail.
 *
 * Order pairs.
 *   [P1] publish: tail, seq_cst store     with [P2] claim: tail, seq_cst load: the entry and,
 *        through [T1], the task and its block are seen. seq_cst because the publisher looks
 *        at sleepers' events next (mn_event.h: publish, then look).
 *   [P3] claim: hint, seq_cst CAS         with [P4] the engine: hint, seq_cst load, between
 *        prepare_wait and commit_wait. A worker that takes the run queues below the low water
 *        mark notifies the engine next (mn_event.h): the engine sees the hint, or is notified.
 *   [T1]/[T2] the task word itself, see mn_records.h.
 *   Relaxed: entries themselves (ordered by tail). As advice to claims the hint needs no
 *   order: a stale one costs a longer scan, and I1 makes a too-new one impossible.
 *
 * Wrap. tail and hint are 64-bit counts and do not wrap; positions are taken modulo the ring.
 *   A worker that stalls between reading tail and an entry may read a newer entry at that
 *   place. That is just as good: the CAS decides.
 *
 * Crash. A worker killed before its CAS leaves only its entry's statement, until it is swept. After
 * the CAS, it leaves a RUNNING word that names it.
 *
 *   may run at once      publish   claim   cancel
 *   publish                no        yes     no
 *   claim                  yes       yes     yes
 *   cancel (trainer)       no        yes     no
 */
#ifndef MN_RUNQUEUE_H
#define MN_RUNQUEUE_H

#include "workers/mn_records.h"

/* The trainer's private side of a queue. */
struct mn_queue_head {
    uint64_t head;
};

/* Makes a task claimable. Its descriptor and block must be complete. Returns MN_OK or MN_FULL. */
int
mn_runqueue_publish(const struct mn_shm *shm, struct mn_queue_head *head, uint32_t queue,
                    uint32_t task, uint32_t gen, uint32_t attempt);

/* Claims the next task for worker: its own queue, express, normal. Returns MN_OK or MN_EMPTY. */
int
mn_runqueue_claim(const struct mn_shm *shm, uint32_t worker, uint32_t *task);

/* Returns the entries of a worker's own queue that may wait to be claimed: counts from *first up
 * to, but not including, the returned one. */
uint64_t
mn_runqueue_own_entries(const struct mn_shm *shm, uint32_t queue, uint64_t *first);

/* Returns whether the entry of a queue at a count before its tail waits to be claimed, and which
 * task it names. An entry may have been claimed, or taken back, while those before it wait. */
bool
mn_runqueue_waits(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task);

/* Returns how many entries of a worker's own queue wait to be claimed. */
uint64_t
mn_runqueue_waiting(const struct mn_shm *shm, uint32_t queue);

/* Takes back the task of an entry of a queue, at a count before its tail, if no worker has claimed
 * it. Returns whether it did, and which task. */
bool
mn_runqueue_withdraw(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task);

/* Takes back a task that no worker has claimed yet. Returns whether it did. */
bool
mn_runqueue_cancel(const struct mn_shm *shm, uint32_t task);

#endif
