/* mn_thread_entry.h - the entry of a worker that is a thread of the trainer.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The thread manages the entry itself, because there is no zygote. WANTED -> READY: the thread
 * begins. READY -> EXITED: it was asked to exit. SWEPT -> EMPTY: the engine has looked. Then it
 * waits until it is wanted again. A thread cannot be killed, so the engine waits for its task and
 * never gives it to another worker. Only a thread that ends by its own error sets EXITED while it
 * runs a task.
 *
 * Only that thread calls these functions. It holds no lock and, where it waits, no GIL.
 */
#ifndef MN_THREAD_ENTRY_H
#define MN_THREAD_ENTRY_H

#include <stdbool.h>

#include "workers/mn_worker.h"

/* Returns whether the loader closes, or the interpreter exits: the thread begins nothing more, and
 * does not publish its current task. */
bool
mn_entry_over(const struct mn_worker_side *w);

/* Waits until this worker is wanted; it is not READY yet. Returns false if it is over. */
bool
mn_entry_await(struct mn_worker_side *w);

/* Waits likewise, and makes it READY. Returns false if it is over. */
bool
mn_entry_begin(struct mn_worker_side *w);

/* The worker was asked to exit: ends in order, or as terminate() ends a process. */
void
mn_entry_leave(struct mn_worker_side *w);

/* This thread will not come back; its current task is lost with it. */
void
mn_entry_die(struct mn_worker_side *w, int32_t status);

#endif
