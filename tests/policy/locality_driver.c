/* The locality policy behind plain functions, for ctypes. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "schedule/policy_locality.h"

struct mn_locality *
locality_new(void)
{
    struct mn_locality *l = malloc(sizeof(*l));
    if (l != NULL) {
        mn_locality_init(l);
    }
    return l;
}

void
locality_free(struct mn_locality *l)
{
    free(l);
}

int
locality_near(const struct mn_locality *l)
{
    return (int)l->near.answer;
}

int
locality_home(const struct mn_locality *l)
{
    return (int)l->home.answer;
}

int
locality_spreads(int64_t n, const int64_t *first_ns, const int64_t *second_ns)
{
    struct mn_locality_pairs pairs = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        mn_locality_pair(&pairs, first_ns[i], second_ns[i]);
    }
    return mn_locality_spreads(&pairs);
}

int
locality_place(const struct mn_locality *l, int declared, int begins, int batch, int marks,
               uint64_t number, int64_t length, int64_t rows, int64_t most)
{
    struct mn_locality_place place = {declared != 0, begins != 0, batch != 0, (uint8_t)marks,
                                      number, length, rows, most};
    return mn_locality_breaks(l, &place);
}
