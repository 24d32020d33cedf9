/* mn_batch.c - see mn_batch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_batch.h"

#include "engine/mn_engine_state.h"

void
mn_engine_unlock(struct mn_engine *e)
{
    struct mn_wakes due = mn_crew_take_wakes(&e->crew);
    due.engine |= mn_arena_room_came(&e->arena);
    mn_mutex_unlock(&e->mutex);
    mn_crew_wake(&e->crew, &due);
}

struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    struct mn_flight *f = &e->flight;
    struct mn_batch *b = block->ntasks != 0 ? f->by_task[mn_block_tasks(block)[0]] : f->last;
    while (b != NULL && b->block_off != block_off) {
        b = b->prev; /* without tasks: made just now, for rows gathered from other batches */
    }
    return b;
}

void
mn_batch_link(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_flight *f = &e->flight;
    b->prev = f->last;
    if (f->last != NULL) {
        f->last->next = b;
    }
    else {
        f->first = b;
    }
    f->last = b;
    f->n++;
}

void
mn_batch_unlink(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_flight *f = &e->flight;
    if (b->prev != NULL) {
        b->prev->next = b->next;
    }
    else {
        f->first = b->next;
    }
    if (b->next != NULL) {
        b->next->prev = b->prev;
    }
    else {
        f->last = b->prev;
    }
    f->n--;
}

bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        enum mn_task_status st = mn_word_status(mn_tasks_word(&e->tasks, tasks[i]));
        if (st == MN_TASK_QUEUED || st == MN_TASK_RUNNING) {
            return false;
        }
    }
    return true;
}

enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    enum mn_block_status out = MN_BLOCK_DONE;
    bool waiting = false; /* for a collate task, which does not run once a part is lost */
    for (uint32_t i = 0; i < block->ntasks; i++) {
        /* seq_cst: the look after prepare_wait, see [T3] in mn_records.h */
        uint64_t word = mn_tasks_word(&e->tasks, tasks[i]);
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_LOST) {
            out = MN_BLOCK_LOST;
        }
        else if (st == MN_TASK_WAITING) {
            waiting = true;
        }
        else if (st != MN_TASK_DONE) {
            return MN_BLOCK_BUSY;
        }
    }
    return waiting && out == MN_BLOCK_DONE ? MN_BLOCK_BUSY : out;
}

uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    uint64_t last = 0;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->tasks.results[tasks[i]];
        uint64_t done = r->accepted ? r->done_ns : 0;
        last = done > last ? done : last;
    }
    return last;
}
