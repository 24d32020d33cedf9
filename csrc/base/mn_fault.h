/* Labelled points at which tests can make a process die, and faults that tests must notice.
 * SPDX-License-Identifier: Apache-2.0
 *
 * MN_FAULT("name")  Nothing unless built with -DMN_FAULTS; then it calls mn_fault_hook if
 *                   one is set, which may kill the process or fail the next system call.
 *                   The label is "module.step", naming what has just been done.
 *
 * The hook is process-wide and is set before any thread that may meet it starts; it is a plain
 * pointer for that reason. Only py/module/mn_module.c and tests set it.
 *
 * MN_BUG_NAME       Where a protocol or a promise rests on one statement, this macro turns it into
 *                   a wrong one. No normal build defines any. `make mutants` builds with each
 *                   (-DMN_BUG_NAME) and expects the runs in tests/test_mutants.py to fail.
 */
#ifndef MN_FAULT_H
#define MN_FAULT_H

/* Called with the label of each fault point; may be NULL. */
extern void (*mn_fault_hook)(const char *name);

#ifdef MN_FAULTS
#define MN_FAULT(name) (mn_fault_hook != 0 ? mn_fault_hook(name) : (void)0)
#else
#define MN_FAULT(name) ((void)0)
#endif

#endif
