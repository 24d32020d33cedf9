/* Signals that a scheduler sends to all processes of a job.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: SIGTERM before a job ends is meant for the trainer, which may save a checkpoint first
 * and needs its workers for that. A worker obeys the signal if the trainer, the worker's parent or
 * the worker itself has sent it, and ignores it otherwise. When the trainer ends, its workers end,
 * too.
 *
 * Signal handlers belong to the whole process, so the filters are its global state. A fork inherits
 * the handler and passes every signal on, until it has a filter of its own.
 */
#ifndef MN_SIGNAL_FILTER_H
#define MN_SIGNAL_FILTER_H

#include <sys/types.h>

/* Puts a filter before the process's present handling of the signal, which then applies only if
 * `trainer`, the parent or this process sends it. A handler that is set later replaces the filter.
 * Only one thread at a time may call this. Returns 0 or a negative errno. */
int
mn_signal_filter(int number, pid_t trainer);

#endif
