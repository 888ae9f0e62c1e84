/* Columns of a table become rows of floats. */

#include <string.h>

#include "export.h"
#include "vector.h"

#define BLOCK 256 /* rows at a time: what is read and written stays in the first-level cache */

typedef float quad __attribute__((vector_size(16)));
typedef float unaligned_quad __attribute__((vector_size(16), aligned(4), may_alias));

enum { FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 };

#define CONVERT(kind, type)                                                                        \
    case kind:                                                                                     \
        for (int64_t i = 0; i < rows; i++) to[i] = ((const type *)from)[i];                        \
        break;
#define SKIP(kind, type)                                                                           \
    case kind:                                                                                     \
        return (const type *)from + start;

/* Numbers of a column from a row on. */
static const void *part_of(const void *from, int8_t kind, int64_t start) {
    switch (kind) {
        SKIP(FLOAT64, double)
        SKIP(INT8, int8_t)
        SKIP(INT16, int16_t)
        SKIP(INT32, int32_t)
        SKIP(INT64, int64_t)
        SKIP(UINT8, uint8_t)
        SKIP(UINT16, uint16_t)
        SKIP(UINT32, uint32_t)
        SKIP(UINT64, uint64_t)
    default:
        return (const float *)from + start;
    }
}

/* Numbers of a column as floats: where they are, or converted to `to`. */
static const float *as_floats(const void *from, int8_t kind, int64_t rows, float *to) {
    switch (kind) {
        CONVERT(FLOAT64, double)
        CONVERT(INT8, int8_t)
        CONVERT(INT16, int16_t)
        CONVERT(INT32, int32_t)
        CONVERT(INT64, int64_t)
        CONVERT(UINT8, uint8_t)
        CONVERT(UINT16, uint16_t)
        CONVERT(UINT32, uint32_t)
        CONVERT(UINT64, uint64_t)
    default:
        return from;
    }
    return to;
}

/* Where the row with a number is written: places may be NULL. */
INLINE float *row_of(float *out, const int64_t *places, int64_t number, int64_t step) {
    return out + (places ? places[number] : number) * step;
}

/* Write four columns of some rows, which are `step` numbers apart. */
INLINE void turn_four(const float *const *columns, const int64_t *places, int64_t rows,
                      int64_t step, float *out) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        if (i % 16 == 0) /* a cache line of the next block */
            UNROLL for (int l = 0; l < 4; l++) __builtin_prefetch(columns[l] + i + BLOCK);
        quad a = *(const unaligned_quad *)(columns[0] + i);
        quad b = *(const unaligned_quad *)(columns[1] + i);
        quad c = *(const unaligned_quad *)(columns[2] + i);
        quad d = *(const unaligned_quad *)(columns[3] + i);
        quad ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
        quad cd_low = SHUFFLE(c, d, 0, 4, 1, 5), cd_high = SHUFFLE(c, d, 2, 6, 3, 7);
        quad turned[4] = {SHUFFLE(ab_low, cd_low, 0, 1, 4, 5), SHUFFLE(ab_low, cd_low, 2, 3, 6, 7),
                          SHUFFLE(ab_high, cd_high, 0, 1, 4, 5),
                          SHUFFLE(ab_high, cd_high, 2, 3, 6, 7)};
        UNROLL for (int k = 0; k < 4; k++)
            *(unaligned_quad *)row_of(out, places, i + k, step) = turned[k];
    }
    for (; i < rows; i++)
        for (int l = 0; l < 4; l++) row_of(out, places, i, step)[l] = columns[l][i];
}

/* columns (dim) are pointers to `rows` numbers each, of the given kinds; places (rows) are all
 * numbers from 0 to rows - 1, or NULL if they are in order; row i of the columns is written to row
 * places[i] of out (rows, dim). */
KERNEL(setfold_stack_columns)(const void *const *columns, const int8_t *kinds,
                              const int64_t *places, int64_t rows, int64_t dim, float *out) {
    float room[4][BLOCK];
    const float *some[4];
    for (int64_t start = 0; start < rows; start += BLOCK) {
        int64_t count = rows - start < BLOCK ? rows - start : BLOCK;
        const int64_t *at = places ? places + start : NULL;
        for (int64_t first = 0; first < dim; first += 4) {
            int four = dim - first >= 4, last = four ? 4 : (int)(dim - first);
            float *to = out + (places ? 0 : start * dim) + first;
            for (int l = 0; l < last; l++) {
                int8_t kind = kinds[first + l];
                const void *from = part_of(columns[first + l], kind, start);
                some[l] = as_floats(from, kind, count, room[l]);
            }
            if (four && at)
                turn_four(some, at, count, dim, to);
            else if (four)
                turn_four(some, NULL, count, dim, to);
            else
                for (int64_t i = 0; i < count; i++)
                    for (int l = 0; l < last; l++) row_of(to, at, i, dim)[l] = some[l][i];
        }
    }
    return 0;
}

/* total (any, width) += rows of `part` (rows, width), each at its place. */
KERNEL(setfold_add_at)(const double *part, const int64_t *places, int64_t rows, int64_t width,
                       double *total) {
    for (int64_t i = 0; i < rows; i++) {
        double *to = total + places[i] * width;
        const double *from = part + i * width;
        for (int64_t l = 0; l < width; l++) to[l] += from[l];
    }
    return 0;
}
