/* Prints the results of mn_cpu and mn_mem below the given root for the Python side to check.
 * Without a root it prints those of this system, and the private memory of this process and of one
 * that does not exist.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <unistd.h>

#include "mn_test.h"
#include "os/mn_limits.h"

int
main(int argc, char **argv)
{
    if (argc == 2) {
        uint64_t ns;
        int rc = mn_cpu_throttled(argv[1], &ns);
        printf("%d %" PRIu64 " %" PRIu64 " %" PRIi64 "\n", mn_cpu_count(argv[1]),
               mn_mem_total(argv[1]), mn_mem_available(argv[1]), rc == 0 ? (int64_t)ns : -1);
    }
    else {
        printf("%d %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", mn_cpu_count(""),
               mn_mem_total(""), mn_mem_available(""), mn_mem_private(getpid()),
               mn_mem_private(0));
    }
    return 0;
}
