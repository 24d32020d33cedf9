/* mn_runqueue.c - see mn_runqueue.h for the argument.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_runqueue.h"

#include <stdbool.h>

#include "base/mn_fault.h"
#include "base/mn_error.h"

static inline mn_a64 *
ring_of(const struct mn_shm *shm, const struct mn_queue *queue)
{
    return (mn_a64 *)mn_at(shm, queue->ring_off);
}

static inline uint64_t
entry_of(uint32_t gen, uint32_t task)
{
    return (uint64_t)gen << 32 | task;
}

/* Returns whether the task that an entry names may still be claimed through it. */
static inline bool
claimable(const struct mn_shm *shm, uint64_t entry, uint64_t *word)
{
    struct mn_task *t = mn_task_at(shm, (uint32_t)entry);
    *word = mn_a64_load_relaxed(&t->word); /* the CAS that follows orders */
#ifdef MN_BUG_GENERATION
    return mn_word_status(*word) == MN_TASK_QUEUED;
#else
    return mn_word_status(*word) == MN_TASK_QUEUED
           && mn_word_gen(*word) == (uint32_t)(entry >> 32);
#endif
}

/* Moves the head to the first entry that may still be claimed, or to the tail. */
static void
move_head(const struct mn_shm *shm, struct mn_queue_head *head, const struct mn_queue *q)
{
    const mn_a64 *ring = ring_of(shm, q);
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    uint64_t word;
    while (head->head != tail
           && !claimable(shm, mn_a64_load_relaxed(&ring[head->head & q->mask]), &word)) {
        head->head++;
    }
}

int
mn_runqueue_publish(const struct mn_shm *shm, struct mn_queue_head *head, uint32_t queue,
                    uint32_t task, uint32_t gen, uint32_t attempt)
{
    struct mn_queue *q = mn_queue_at(shm, queue);
    mn_a64 *ring = ring_of(shm, q);
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    move_head(shm, head, q);
    if (tail - head->head > q->mask) {
        return MN_FULL;
    }
    struct mn_task *t = mn_task_at(shm, task);
    t->queue = queue;
    mn_a64_store_release(&t->word, mn_task_word(gen, 0, attempt, MN_TASK_QUEUED)); /* [T1] */
    MN_FAULT("runqueue.publish.word");
    mn_a64_store_relaxed(&ring[tail & q->mask], entry_of(gen, task));
    mn_a64_store_seqcst(&q->tail, tail + 1); /* [P1] */
    return MN_OK;
}

static int
claim_from(const struct mn_shm *shm, struct mn_queue *q, uint32_t worker, uint32_t *task)
{
    mn_a64 *ring = ring_of(shm, q), *running = &mn_worker_at(shm, worker)->running;
    uint64_t hint = mn_a64_load_acquire(&q->hint); /* so that tail below is at least as new */
    uint64_t tail = mn_a64_load_seqcst(&q->tail);  /* [P2]; seq_cst: the look after prepare_wait */
    uint64_t from = hint;
    if (tail - from > q->mask + 1) {
        from = tail - q->mask - 1; /* older places have been overwritten, see I2 */
    }
    for (uint64_t at = from; at != tail; at++) {
        uint64_t entry = mn_a64_load_relaxed(&ring[at & q->mask]); /* ordered by [P2] */
        uint64_t word;
        if (!claimable(shm, entry, &word)) {
            if (at == from) {
                from++;
            }
            continue;
        }
        uint64_t mine = mn_task_word(mn_word_gen(word), worker, mn_word_attempt(word),
                                     MN_TASK_RUNNING);
        mn_a64_store_relaxed(running, (uint64_t)(uint32_t)entry + 1); /* [A1], by the CAS */
        MN_FAULT("runqueue.claim.before");
        mn_a64 *its_word = &mn_task_at(shm, (uint32_t)entry)->word;
#ifdef MN_BUG_CLAIM
        mn_a64_store_release(its_word, mine);
        bool claimed = true;
#else
        bool claimed = mn_a64_cas_acqrel(its_word, &word, mine); /* [T2] */
#endif
        if (claimed) {
            MN_FAULT("runqueue.claim.after");
            *task = (uint32_t)entry;
            if (at == from) {
                from++;
            }
            if (from != hint) {
                (void)mn_a64_cas_seqcst(&q->hint, &hint, from); /* [P3] */
            }
            return MN_OK;
        }
        mn_a64_store_relaxed(running, 0);
        if (at == from) {
            from++; /* another worker has it: not claimable any more, I1 */
        }
    }
    if (from != hint) {
        (void)mn_a64_cas_seqcst(&q->hint, &hint, from); /* [P3] */
    }
    return MN_EMPTY;
}

/* Its own queue first, because no other worker claims from it; then tasks that were taken back, for
 * which the head may have waited long. */
int
mn_runqueue_claim(const struct mn_shm *shm, uint32_t worker, uint32_t *task)
{
    if (claim_from(shm, mn_queue_at(shm, MN_QUEUE_WORKER + worker), worker, task) == MN_OK) {
        return MN_OK;
    }
    if (claim_from(shm, mn_queue_at(shm, MN_QUEUE_EXPRESS), worker, task) == MN_OK) {
        return MN_OK;
    }
    return claim_from(shm, mn_queue_at(shm, MN_QUEUE_NORMAL), worker, task);
}

bool
mn_runqueue_waits(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t entry = mn_a64_load_relaxed(&ring_of(shm, q)[at & q->mask]); /* ours */
    uint64_t word;
    *task = (uint32_t)entry;
    return claimable(shm, entry, &word);
}

uint64_t
mn_runqueue_own_entries(const struct mn_shm *shm, uint32_t queue, uint64_t *first)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t hint = mn_a64_load_seqcst(&q->hint); /* [P4]; bounds a damaged hint */
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    uint64_t n = tail > hint ? tail - hint : 0;
    *first = tail - (n < MN_QUEUE_OWN_TASKS ? n : MN_QUEUE_OWN_TASKS);
    return tail;
}

uint64_t
mn_runqueue_waiting(const struct mn_shm *shm, uint32_t queue)
{
    uint64_t at, waiting = 0, end = mn_runqueue_own_entries(shm, queue, &at);
    for (; at < end; at++) {
        uint32_t task;
        waiting += mn_runqueue_waits(shm, queue, at, &task);
    }
    return waiting;
}

bool
mn_runqueue_withdraw(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t entry = mn_a64_load_relaxed(&ring_of(shm, q)[at & q->mask]); /* ours */
    uint64_t word;
    if (!claimable(shm, entry, &word)) {
        return false;
    }
    *task = (uint32_t)entry;
    return mn_a64_cas_acqrel(&mn_task_at(shm, *task)->word, &word,
                             mn_task_word(mn_word_gen(word), 0, 0, MN_TASK_CANCELLED));
}

bool
mn_runqueue_cancel(const struct mn_shm *shm, uint32_t task)
{
    struct mn_task *t = mn_task_at(shm, task);
    uint64_t word = mn_a64_load_relaxed(&t->word); /* the CAS decides */
    while (mn_word_status(word) == MN_TASK_QUEUED || mn_word_status(word) == MN_TASK_WAITING) {
        uint64_t none = mn_task_word(mn_word_gen(word), 0, 0, MN_TASK_CANCELLED);
        if (mn_a64_cas_acqrel(&t->word, &word, none)) {
            MN_FAULT("runqueue.cancelled");
            return true;
        }
    }
    return false;
}
