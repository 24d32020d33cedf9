/* mn_envelope_seal.c - see mn_envelope_seal.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_envelope_seal.h"

#include <string.h>

/* One round of a multiplicative hash: each bit of the word affects half of all bits. */
static uint64_t
fold(uint64_t seal, uint64_t word)
{
    seal = (seal ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return seal ^ seal >> 32;
}

uint64_t
mn_seal(uint64_t issue, const struct mn_envelope *env, const struct mn_envelope_part *parts,
        const void *pickle)
{
    const char *bytes = pickle;
    uint64_t seal = fold(fold(fold(issue + 1, env->nparts), env->pickle_at), env->pickle_bytes);
    for (uint64_t i = 0; i < env->nparts; i++) {
        seal = fold(fold(seal, parts[i].at), parts[i].bytes);
    }
    uint64_t at = 0, word;
    for (; env->pickle_bytes - at >= sizeof(word); at += sizeof(word)) {
        memcpy(&word, bytes + at, sizeof(word));
        seal = fold(seal, word);
    }
    word = 0;
    memcpy(&word, bytes + at, env->pickle_bytes - at);
    return fold(seal, word);
}
