/* The result codes inside the C engine.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A function returns 0 or a negative errno. Where "nothing there", "no space" and "over" are
 * ordinary outcomes they are positive values, so that a caller cannot mistake them for failures.
 * One file in py/ turns codes into exceptions; nothing below it does.
 */
#ifndef MN_ERROR_H
#define MN_ERROR_H

#include <errno.h>

#define MN_OK 0
#define MN_EMPTY 1
#define MN_FULL 2
#define MN_CLOSED 3

#endif
