/* mn_envelope.h - how a pickled message with buffers out of band lies in the arena.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   struct mn_envelope | struct mn_envelope_part[nparts] | pickle | small parts | big parts
 *
 * Big parts (MN_FIELD_BIG and more) begin on pages of their own, so each can be handed to
 * the caller and freed by itself; the small ones are copied out.  Offsets are relative to
 * the envelope, whose first byte is on a page.
 */
#ifndef MN_ENVELOPE_H
#define MN_ENVELOPE_H

#include <stdint.h>

#include "base/mn_attr.h"

struct mn_envelope {
    uint64_t nparts;
    uint64_t pickle_at;
    uint64_t pickle_bytes;
    uint64_t pad0;
};

struct mn_envelope_part {
    uint64_t at;
    uint64_t bytes;
};
MN_STATIC_ASSERT(sizeof(struct mn_envelope) == 32, "layout shared between processes");

#endif
