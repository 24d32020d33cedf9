/* Reading mapped files that may shrink meanwhile.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A mapped page may be missing: its file has shrunk, or the disk cannot deliver it. Reading the
 *   page raises SIGBUS in the thread, which ends the program. Between mn_guard_enter and
 *   mn_guard_leave it does not: the mapping reads as zeros from then on, and mn_guard_leave
 *   says that they must not be used.
 *
 * How
 *   The handler checks whether the fault lies in the range that its own thread has entered (a
 *   thread-local pointer). If so it puts zero pages in place of the whole range, notes it, and
 *   lets the instruction run again. It never jumps out of the reading code, so nothing is left
 *   half done. The range must belong to this thread alone: it is replaced.
 *
 *   Each mn_guard_enter checks that our handler is installed and installs it if it is not. So
 *   code that installs another one later (faulthandler.enable, another library) disables ours
 *   only until the next section. The previous handler is remembered. A SIGBUS that is not
 *   ours puts it back and comes again. A fault by running the instruction again, and a signal that
 *   was sent by sending it again. If that leads back here, the other code has our handler as its
 *   predecessor; then the default action is taken. The handler stays installed after
 *   mn_guard_leave, where it has no range and so only does that.
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
    mn_a32 lost;  /* zeros have replaced the mapping */
    bool blocked; /* whether SIGBUS was blocked before mn_guard_enter */
};

/* Begins a section in which the calling thread reads the range. Sections do not nest. */
void
mn_guard_enter(struct mn_guard *guard);

/* Ends the section. Returns false if the thread may have read something else than the file. */
bool
mn_guard_leave(struct mn_guard *guard);

#endif
