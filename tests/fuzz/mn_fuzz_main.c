/* mn_fuzz_main.c - runs a fuzz target on files, and on changed ones, where there is no libFuzzer.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     program SEED ROUNDS FILE...
 *
 * The same inputs for the same seed. A round changes one of the files in up to four places.
 */
#include "mn_fuzz.h"

enum { MOST = 1 << 16 };

static uint64_t state;

static uint64_t
draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

struct input {
    uint8_t *bytes;
    size_t n;
};

static struct input
read_file(const char *path)
{
    static uint8_t buffer[MOST];
    FILE *file = fopen(path, "rb");
    MUST(file != NULL);
    size_t n = fread(buffer, 1, sizeof(buffer), file);
    (void)fclose(file);
    return (struct input){copied(buffer, n), n};
}

static size_t
change(uint8_t *bytes, size_t n)
{
    static const uint64_t odd[] = {0, 1, 0xff, 0x7fffffff, INT64_MAX, UINT64_MAX, 1ull << 63};
    size_t at = n != 0 ? (size_t)draw(n) : 0, rest = n - at;
    uint64_t value = odd[draw(sizeof(odd) / sizeof(odd[0]))];
    switch (draw(6)) {
    case 0:
        return at; /* cut off */
    case 1: /* a byte more */
        if (n < MOST) {
            memmove(bytes + at + 1, bytes + at, rest);
            bytes[at] = (uint8_t)draw(256);
            return n + 1;
        }
        return n;
    case 2: /* a byte less */
        if (rest != 0) {
            memmove(bytes + at, bytes + at + 1, rest - 1);
            return n - 1;
        }
        return n;
    case 3: /* a number, mostly where one may be */
        at -= draw(4) != 0 ? at % sizeof(value) : 0;
        rest = n - at;
        memcpy(bytes + at, &value, rest < sizeof(value) ? rest : sizeof(value));
        return n;
    case 4: /* a piece of it elsewhere */
        if (rest != 0) {
            memmove(bytes + draw(n - (rest < 8 ? rest : 8) + 1), bytes + at, rest < 8 ? rest : 8);
        }
        return n;
    default:
        if (rest != 0) {
            bytes[at] = (uint8_t)draw(256);
        }
        return n;
    }
}

int
main(int argc, char **argv)
{
    static uint8_t bytes[MOST];
    MUST(argc > 3);
    int files = argc - 3;
    struct input *inputs = calloc((size_t)files, sizeof(*inputs));
    MUST(inputs != NULL);
    state = strtoull(argv[1], NULL, 10) * 2 + 1;
    for (int i = 0; i < files; i++) {
        inputs[i] = read_file(argv[3 + i]);
        (void)LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].n);
    }
    for (unsigned long long rounds = strtoull(argv[2], NULL, 10); rounds != 0; rounds--) {
        const struct input *of = &inputs[draw((uint64_t)files)];
        size_t n = of->n;
        memcpy(bytes, of->bytes, n);
        for (uint64_t changes = 1 + draw(4); changes != 0; changes--) {
            n = change(bytes, n);
        }
        (void)LLVMFuzzerTestOneInput(bytes, n);
    }
    for (int i = 0; i < files; i++) {
        free(inputs[i].bytes);
    }
    free(inputs);
    return 0;
}
