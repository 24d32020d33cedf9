/* Reading mapped files that may shrink meanwhile.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A page of a mapping that its file no longer has, or that the disk does not give, raises
 *   SIGBUS in whoever reads it, which ends the program. Between mn_guard_enter and
 *   mn_guard_leave it does not: the mapping reads as zeros from then on, and mn_guard_leave
 *   says that they are not to be believed.
 *
 * How
 *   The handler looks whether the fault lies in the range that its own thread has entered (a
 *   thread-local pointer), puts zero pages in place of the whole range, notes it, and lets
 *   the instruction run again. No jump out of the reading code, so nothing is left half done.
 *   The range must belong to this thread alone: it is replaced.
 *
 *   Each mn_guard_enter asks for the handler in place and puts ours there if it is not, so
 *   whoever came later (faulthandler.enable, another library) takes it away for no longer than
 *   the section in which they do. What was there before is remembered. A SIGBUS that is not
 *   ours puts it back and comes again: a fault by running the instruction again, a signal that
 *   was sent by sending it again. If that leads back here, the others have ours as what was
 *   there before theirs; then the default action is taken. The handler stays in place after
 *   mn_guard_leave, where it knows of no range and so only does that.
 *
 *   The kernel ends the program if a fault's signal is blocked, as it is in native workers, so
 *   SIGBUS is unblocked within the section.
 *
 * Processes
 *   A fork inherits the handler with all that it needs; its one thread is in no section. An
 *   exec resets it.
 */
#ifndef MN_SIGBUS_GUARD_H
#define MN_SIGBUS_GUARD_H

#include <stdbool.h>
#include <stddef.h>

#include "base/mn_atomic.h"

struct mn_guard {
    unsigned char *bytes; /* page aligned */
    size_t size;
    mn_a32 lost;  /* zeros took the place of the mapping */
    bool blocked; /* whether SIGBUS was, before mn_guard_enter */
};

/* The calling thread reads the range until mn_guard_leave. Sections do not nest. */
void
mn_guard_enter(struct mn_guard *guard);

/* Returns false if what was read was not, or not only, the file. */
bool
mn_guard_leave(struct mn_guard *guard);

#endif /* MN_SIGBUS_GUARD_H */
