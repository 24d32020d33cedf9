/* See mn_seed_left.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed_left.h"

int
mn_seed_left_set(struct mn_seed_left *left, struct mn_seed_target *targets, Py_ssize_t n,
                 PyObject *states)
{
    PyObject *list = PySequence_Fast(states, "the states must be a sequence");
    if (list == NULL) {
        return -1;
    }
    Py_ssize_t most = PySequence_Fast_GET_SIZE(list);
    left->count = 0;
    left->trying = false;
    for (Py_ssize_t i = 0; i < most && i < n; i++) {
        PyObject *state = PySequence_Fast_GET_ITEM(list, i);
        if (state != Py_None) {
            mn_seed_target_leave(&targets[i], state);
            left->count += targets[i].left;
        }
    }
    Py_DECREF(list);
    return 0;
}

/* Asks for a trial of the targets that were drawn from. 1: the sample is to be made from the same
 * states again; 0: no; -1. */
static int
begin_trial(struct mn_seed_left *left, const struct mn_seed_target *targets, Py_ssize_t n)
{
    PyObject *drawn = PyList_New(0), *answer = NULL;
    for (Py_ssize_t i = 0; drawn != NULL && i < n; i++) {
        PyObject *number = targets[i].drawn ? PyLong_FromSsize_t(i) : NULL;
        if (targets[i].drawn && (number == NULL || PyList_Append(drawn, number) < 0)) {
            Py_CLEAR(drawn);
        }
        Py_XDECREF(number);
    }
    if (drawn != NULL) {
        answer = PyObject_CallOneArg(left->trial, drawn);
        Py_DECREF(drawn);
    }
    int rc = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    left->trying = rc == 1;
    return rc;
}

static int
end_trial(struct mn_seed_left *left)
{
    left->trying = false;
    PyObject *answer = PyObject_CallOneArg(left->trial, Py_None);
    Py_XDECREF(answer);
    return answer != NULL ? 0 : -1;
}

int
mn_seed_left_drawn(struct mn_seed_left *left, struct mn_seed_target *targets, Py_ssize_t n)
{
    bool any = left->trying;
    for (Py_ssize_t i = 0; left->count > 0 && i < n; i++) {
        struct mn_seed_target *t = &targets[i];
        int rc = t->left ? mn_seed_target_drawn(t) : 0;
        if (rc < 0) {
            return -1;
        }
        /* Targets of the first run are seeded after the trial, no matter what the trial drew
         * from. */
        t->drawn = rc == 1 || (left->trying && t->drawn);
        any = any || rc == 1;
    }
    if (!any) {
        return 0;
    }
    if (left->trying) {
        if (end_trial(left) < 0) {
            return -1;
        }
    }
    else if (left->trial != NULL) {
        int rc = begin_trial(left, targets, n);
        if (rc != 0) {
            return rc;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (targets[i].drawn) {
            targets[i].left = targets[i].drawn = false;
            left->count--;
        }
    }
    return 1;
}
