/* Multiplies and adds numbers that never leave the registers: the most that a core can do. */

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define CHAINS 12 /* that do not wait for each other */

typedef float vec __attribute__((vector_size(BYTES)));

const int operations = 2 * CHAINS * BYTES / 4; /* of a round */

float multiply_and_add(long rounds, float factor, float term) {
    vec sums[CHAINS], total = {0};
    for (int chain = 0; chain < CHAINS; chain++) sums[chain] = (vec){0} + chain * term;
    for (long round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int chain = 0; chain < CHAINS; chain++) sums[chain] = sums[chain] * factor + term;
    }
    for (int chain = 0; chain < CHAINS; chain++) total += sums[chain];
    return total[0];
}
