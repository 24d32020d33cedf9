/* mn_engine_internal.h - what the plan and all above it know of the engine.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_INTERNAL_H
#define MN_ENGINE_INTERNAL_H

#include "engine/mn_batch.h"
#include "engine/mn_blocks.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_results.h"

#endif
