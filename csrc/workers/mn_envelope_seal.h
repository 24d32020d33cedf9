/* mn_envelope_seal.h - what tells an envelope from one that was damaged, or is another task's.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The worker that writes an envelope seals it last, and whoever reads it breaks the seal over
 * copies of its own.  Sealed are the issue of the task that it answers, where its parts lie and the
 * pickle: a pickle in which a byte is not what it was may do anything when it is loaded, and parts
 * in other places are other samples' bytes.  The parts' own bytes are not: they are data, like
 * rows, and nothing is done by them.
 *
 * A seal is against accidents.  Who means to forge one can.
 */
#ifndef MN_ENVELOPE_SEAL_H
#define MN_ENVELOPE_SEAL_H

#include "workers/mn_records.h"

/* Which issue of which task an envelope answers: word is the task's. */
static inline uint64_t
mn_issue(uint32_t task, uint64_t word)
{
    return (uint64_t)mn_word_gen(word) << 32 | task;
}

/* What belongs into env->seal. parts: [env->nparts]; pickle: [env->pickle_bytes]. */
uint64_t
mn_seal(uint64_t issue, const struct mn_envelope *env, const struct mn_envelope_part *parts,
        const void *pickle);

#endif
