/* Vectors of floats: the only file that knows instruction sets.
 *
 * Everything else is written with the vector extensions of GCC and Clang. A vector has LANES
 * floats, as many as fit in a register of the instruction set that the file is compiled for. */

#ifndef SETFOLD_VECTOR_H
#define SETFOLD_VECTOR_H

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define HELPER static __attribute__((unused)) /* not every kernel needs it */
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef double dvec __attribute__((vector_size(LANES * 8)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef double unaligned_dvec __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec value) { *(unaligned_vec *)to = value; }
INLINE vec spread(float value) { return (vec){0} + value; }

/* The first `count` numbers, at most LANES, and zeros; nothing beyond them is read. */
INLINE vec load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
#if LANES == 16
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    float parts[LANES] = {0};
    for (int64_t l = 0; l < count; l++) parts[l] = from[l];
    return load(parts);
#endif
}

/* The number of floats that a row of `width` numbers takes when it is padded to whole vectors. */
INLINE int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* The smaller and the larger of two numbers; `b` if one of them is NaN. */
#if LANES == 16
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
#elif LANES == 8
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__x86_64__)
INLINE vec smaller(vec a, vec b) { return (vec)_mm_min_ps((__m128)a, (__m128)b); }
INLINE vec larger(vec a, vec b) { return (vec)_mm_max_ps((__m128)a, (__m128)b); }
#else
INLINE vec choose(ivec where, vec a, vec b) {
    return (vec)(((ivec)a & where) | ((ivec)b & ~where));
}
INLINE vec smaller(vec a, vec b) { return choose(a < b, a, b); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
#endif

/* 1 / x for x from 1 to 2^126; NaN stays NaN. */
INLINE vec reciprocal(vec x) {
#if LANES == 16
    vec guess = (vec)_mm512_rcp14_ps((__m512)x);
    return guess * (2.0f - x * guess);
#elif LANES == 8
    vec guess = (vec)_mm256_rcp_ps((__m256)x);
    return guess * (2.0f - x * guess);
#else
    return 1.0f / x;
#endif
}

/* mantissa * 2^exponent for whole exponents from -150 to 128. */
INLINE vec scale_by_power(vec mantissa, vec exponent) {
#if LANES == 16
    return (vec)_mm512_scalef_ps((__m512)mantissa, (__m512)exponent);
#else
    ivec whole = __builtin_convertvector(exponent, ivec), half = whole >> 1;
    vec low = (vec)((half + 127) << 23), high = (vec)((whole - half + 127) << 23);
    return mantissa * low * high; /* two steps, because 2^exponent may be subnormal */
#endif
}

/* exp(x) to 2e-7 of its value; 0 below -104, infinite above 89, NaN for NaN. */
INLINE vec exponential(vec x) {
    const float to_powers = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = larger(spread(-104.0f), smaller(spread(89.0f), x));
    vec power = (x * to_powers + round) - round;
    vec rest = (x - power * ln2_high) - power * ln2_low; /* from -ln(2) / 2 to ln(2) / 2 */
    vec sum = spread(0.00138367937f);
    sum = sum * rest + 0.00837485707f;
    sum = sum * rest + 0.0416682287f;
    sum = sum * rest + 0.166664197f;
    sum = sum * rest + 0.499999921f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return scale_by_power(sum, power);
}

INLINE float sum_of(vec x) {
    float parts[LANES];
    store(parts, x);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int lane = 0; lane < step; lane++) parts[lane] += parts[lane + step];
    return parts[0];
}

INLINE float largest_of(vec x) {
    float found = x[0];
    for (int lane = 1; lane < LANES; lane++) found = x[lane] > found ? x[lane] : found;
    return found;
}

/* Combine the lanes of LANES vectors: lane i of the result is rows[i] reduced with `op`. The rows
 * are merged in pairs, so that a row costs about three instructions. The rows are overwritten. */
#define ADD(a, b) ((a) + (b))
#define SHUFFLE __builtin_shufflevector
#if LANES == 4
#define MERGE_1(op, a, b) op(SHUFFLE(a, b, 0, 4, 2, 6), SHUFFLE(a, b, 1, 5, 3, 7))
#define MERGE_2(op, a, b) op(SHUFFLE(a, b, 0, 1, 4, 5), SHUFFLE(a, b, 2, 3, 6, 7))
#elif LANES == 8
#define MERGE_1(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14), SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define MERGE_2(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13), SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define MERGE_3(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11), SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#define MERGE_1(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),                   \
       SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#define MERGE_2(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),                    \
       SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define MERGE_3(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),                    \
       SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define MERGE_4(op, a, b)                                                                          \
    op(SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),                      \
       SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#endif

#define HALVE(merge, op, rows, count)                                                              \
    UNROLL for (int i = 0; i < (count) / 2; i++) rows[i] = merge(op, rows[2 * i], rows[2 * i + 1]);

#if LANES == 4
#define REDUCE_ROWS(op, rows) HALVE(MERGE_1, op, rows, 4) HALVE(MERGE_2, op, rows, 2)
#elif LANES == 8
#define REDUCE_ROWS(op, rows)                                                                      \
    HALVE(MERGE_1, op, rows, 8) HALVE(MERGE_2, op, rows, 4) HALVE(MERGE_3, op, rows, 2)
#else
#define REDUCE_ROWS(op, rows)                                                                      \
    HALVE(MERGE_1, op, rows, 16)                                                                   \
    HALVE(MERGE_2, op, rows, 8) HALVE(MERGE_3, op, rows, 4) HALVE(MERGE_4, op, rows, 2)
#endif

INLINE vec row_sums(vec rows[LANES]) {
    REDUCE_ROWS(ADD, rows)
    return rows[0];
}

INLINE vec row_maxima(vec rows[LANES]) {
    REDUCE_ROWS(larger, rows)
    return rows[0];
}

#endif
