/* Names of results, for messages and logs.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_error.h"

#include <stddef.h>

struct mn_error_name {
    int result;
    const char *name;
};

/* What the floors above return; a code that is missing here is a gap in this table. */
static const struct mn_error_name mn_error_names[] = {
    {MN_OK, "MN_OK"},
    {MN_EMPTY, "MN_EMPTY"},
    {MN_FULL, "MN_FULL"},
    {MN_CLOSED, "MN_CLOSED"},
    {-EACCES, "EACCES"},
    {-EAGAIN, "EAGAIN"},
    {-EBADF, "EBADF"},
    {-EBUSY, "EBUSY"},
    {-ECANCELED, "ECANCELED"},
    {-ECHILD, "ECHILD"},
    {-EDEADLK, "EDEADLK"},
    {-EEXIST, "EEXIST"},
    {-EFAULT, "EFAULT"},
    {-EFBIG, "EFBIG"},
    {-EINTR, "EINTR"},
    {-EINVAL, "EINVAL"},
    {-EIO, "EIO"},
    {-EMFILE, "EMFILE"},
    {-EMSGSIZE, "EMSGSIZE"},
    {-ENFILE, "ENFILE"},
    {-ENODEV, "ENODEV"},
    {-ENOENT, "ENOENT"},
    {-ENOMEM, "ENOMEM"},
    {-ENOSPC, "ENOSPC"},
    {-ENOSYS, "ENOSYS"},
    {-ENOTSUP, "ENOTSUP"},
    {-EOVERFLOW, "EOVERFLOW"},
    {-EPERM, "EPERM"},
    {-EPIPE, "EPIPE"},
    {-EPROTO, "EPROTO"},
    {-ERANGE, "ERANGE"},
    {-ESRCH, "ESRCH"},
    {-ETIMEDOUT, "ETIMEDOUT"},
};

const char *
mn_strerror_name(int result)
{
    size_t n = sizeof(mn_error_names) / sizeof(mn_error_names[0]);
    for (size_t i = 0; i < n; i++) {
        if (mn_error_names[i].result == result) {
            return mn_error_names[i].name;
        }
    }
    return "EUNKNOWN";
}
