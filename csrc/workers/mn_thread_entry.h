/* mn_thread_entry.h - the entry of a worker that is a thread of the trainer.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is the thread's own business, because there is no zygote: WANTED -> READY when it begins,
 * READY -> EXITED when it was asked to leave, SWEPT -> EMPTY once the engine has looked, and
 * then it waits until it is wanted again. A thread cannot be killed, so a task is waited for
 * and never given to another; only a thread that ends by its own error says EXITED under a
 * task.
 *
 * Called by that thread alone, which holds no lock and, where it waits, no GIL.
 */
#ifndef MN_THREAD_ENTRY_H
#define MN_THREAD_ENTRY_H

#include <stdbool.h>

#include "workers/mn_worker.h"

/* Whether the loader closes, or the interpreter exits: nothing more is begun, and what is in
 * hand is not published. */
bool
mn_entry_over(const struct mn_worker_side *w);

/* Waits until somebody wants this worker, which is then not there yet. False: it is over. */
bool
mn_entry_await(struct mn_worker_side *w);

/* Waits likewise, and is there. False: it is over. */
bool
mn_entry_begin(struct mn_worker_side *w);

/* It was asked to leave: as an orderly end, or as what terminate() does to a process. */
void
mn_entry_leave(struct mn_worker_side *w);

/* This thread will not come back; what it holds is lost with it. */
void
mn_entry_die(struct mn_worker_side *w, int32_t status);

#endif
