/* mn_envelope_seal.h - a seal shows that an envelope is whole and answers the right task.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The worker that writes an envelope seals it last, and the reader checks the seal over its own
 * copies. The seal covers the issue of the task that the envelope answers, the places of its
 * parts, and the pickle. A pickle with a changed byte may do anything when it is loaded, and parts
 * in other places are bytes of other samples. The seal does not cover the bytes of the parts: they
 * are data, like rows, and trigger no action.
 *
 * A seal protects against accidents, not against forgery.
 */
#ifndef MN_ENVELOPE_SEAL_H
#define MN_ENVELOPE_SEAL_H

#include "workers/mn_records.h"

/* Returns which issue of which task an envelope answers; word is the task's. */
static inline uint64_t
mn_issue(uint32_t task, uint64_t word)
{
    return (uint64_t)mn_word_gen(word) << 32 | task;
}

/* Returns the value for env->seal. parts: [env->nparts]; pickle: [env->pickle_bytes]. */
uint64_t
mn_seal(uint64_t issue, const struct mn_envelope *env, const struct mn_envelope_part *parts,
        const void *pickle);

#endif
