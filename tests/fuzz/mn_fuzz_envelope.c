/* Envelopes as a worker may have written them: what is accepted lies within.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "mn_fuzz.h"

#include "engine/mn_batches.h"
#include "workers/mn_records.h"

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct mn_envelope head;
    unsigned char *at = copied(data, n);
    if (mn_envelope_look(at, n, &head)) {
        MUST(head.pickle_at <= n && head.pickle_bytes <= n - head.pickle_at);
        MUST(head.nparts <= n);
        struct mn_envelope_part *parts = calloc(head.nparts + 1, sizeof(*parts));
        MUST(parts != NULL);
        for (uint64_t i = 0; i < head.nparts; i++) {
            MUST(mn_envelope_part_look(at, n, &head, i, &parts[i]));
            MUST(parts[i].at <= n && parts[i].bytes <= n - parts[i].at);
            free(copied(at + parts[i].at, parts[i].bytes));
        }
        MUST(!mn_envelope_part_look(at, n, &head, head.nparts, &parts[head.nparts]));
        free(parts);
    }
    free(at);
    return 0;
}
