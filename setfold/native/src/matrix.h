/* Products of small matrices that stay in cache, with one tile of the result in registers. */

#ifndef SETFOLD_MATRIX_H
#define SETFOLD_MATRIX_H

#include <stdlib.h>
#include <string.h>

#include "vector.h"

/* Rows of a tile that is two vectors or one vector wide. */
#if LANES == 16
#define TALL 12
#define TALLER 16
#elif LANES == 8
#define TALL 6
#define TALLER 12
#else
#define TALL 6
#define TALLER 12
#endif

/* The left factor of a product: number (i, q) is at start[i * row_step + q * step]. A transposed
 * matrix differs in its steps only. */
typedef struct {
    const float *start;
    int64_t row_step, step;
} Left;

/* c[i][v] = c0 + sum_q left(i, q) right[q][v] for a few rows and vectors; c0 is what `c` holds if
 * `add`, else `offset`, or zeros without an offset. */
INLINE void tile(const int rows, const int vectors, const int add, Left left, const float *right,
                 int64_t right_step, int64_t depth, float *c, int64_t c_step, const float *offset) {
    vec sum[TALLER][2]; /* in registers, once the loops are unrolled */
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] =
        add      ? load(c + i * c_step + v * LANES)
        : offset ? load(offset + v * LANES)
                 : spread(0);
    for (int64_t q = 0; q < depth; q++) {
        vec b[2];
        UNROLL for (int v = 0; v < vectors; v++) b[v] = load(right + q * right_step + v * LANES);
        const float *a = left.start + q * left.step;
        UNROLL for (int i = 0; i < rows; i++) {
            float factor = a[i * left.row_step];
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] += factor * b[v];
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++)
        store(c + i * c_step + v * LANES, sum[i][v]);
}

#define TILE(rows, vectors)                                                                        \
    tile(rows, vectors, add, left, right, right_step, depth, c, c_step, offset)
#define LAST_TILE(rows, vectors)                                                                   \
    case rows:                                                                                     \
        TILE(rows, vectors);                                                                       \
        break;

INLINE void two_vectors(const int add, Left left, const float *right, int64_t right_step,
                        int64_t rows, int64_t depth, float *c, int64_t c_step,
                        const float *offset) {
    for (; rows >= TALL; rows -= TALL) {
        TILE(TALL, 2);
        left.start += TALL * left.row_step;
        c += TALL * c_step;
    }
    switch (rows) {
        LAST_TILE(1, 2)
        LAST_TILE(2, 2)
        LAST_TILE(3, 2)
        LAST_TILE(4, 2)
        LAST_TILE(5, 2)
#if TALL > 6
        LAST_TILE(6, 2)
        LAST_TILE(7, 2)
        LAST_TILE(8, 2)
        LAST_TILE(9, 2)
        LAST_TILE(10, 2)
        LAST_TILE(11, 2)
#endif
    }
}

INLINE void one_vector(const int add, Left left, const float *right, int64_t right_step,
                       int64_t rows, int64_t depth, float *c, int64_t c_step, const float *offset) {
    for (; rows >= TALLER; rows -= TALLER) {
        TILE(TALLER, 1);
        left.start += TALLER * left.row_step;
        c += TALLER * c_step;
    }
    switch (rows) {
        LAST_TILE(1, 1)
        LAST_TILE(2, 1)
        LAST_TILE(3, 1)
        LAST_TILE(4, 1)
        LAST_TILE(5, 1)
        LAST_TILE(6, 1)
        LAST_TILE(7, 1)
        LAST_TILE(8, 1)
        LAST_TILE(9, 1)
        LAST_TILE(10, 1)
        LAST_TILE(11, 1)
#if TALLER > 12
        LAST_TILE(12, 1)
        LAST_TILE(13, 1)
        LAST_TILE(14, 1)
        LAST_TILE(15, 1)
#endif
    }
}

/* c (rows, width) = left (rows, depth) right (depth, width) + offset (width), or `c` itself plus
 * the product if `add`. The width is padded; `right` and `c` are stored row by row. */
INLINE void panels(const int add, Left left, const float *right, int64_t rows, int64_t depth,
                   int64_t width, float *c, const float *offset) {
    int64_t v = 0;
    for (; v + 2 * LANES <= width; v += 2 * LANES)
        two_vectors(add, left, right + v, width, rows, depth, c + v, width,
                    offset ? offset + v : NULL);
    if (v < width)
        one_vector(add, left, right + v, width, rows, depth, c + v, width,
                   offset ? offset + v : NULL);
}

HELPER void multiply(Left left, const float *right, int64_t rows, int64_t depth, int64_t width,
                     float *c, const float *offset) {
    panels(0, left, right, rows, depth, width, c, offset);
}

HELPER void multiply_add(Left left, const float *right, int64_t rows, int64_t depth, int64_t width,
                         float *c) {
    panels(1, left, right, rows, depth, width, c, NULL);
}

/* sum (width) += the rows of `from` (rows, width), which is padded. */
HELPER void add_rows(const float *from, int64_t rows, int64_t width, float *sum) {
    for (int64_t v = 0; v < width; v += LANES) {
        vec parts[4] = {load(sum + v)};
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4)
            UNROLL for (int j = 0; j < 4; j++) parts[j] += load(from + (i + j) * width + v);
        for (; i < rows; i++) parts[0] += load(from + i * width + v);
        store(sum + v, (parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
}

/* total += sum, then sum = 0, for `count` numbers, a multiple of LANES: float sums of some hundred
 * rows are added up in double, because long sums in float lose digits. */
HELPER void flush(double *total, float *sum, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        unaligned_dvec *to = (unaligned_dvec *)(total + i);
        *to = *to + __builtin_convertvector(load(sum + i), dvec);
        store(sum + i, spread(0));
    }
}

/* Copy rows of `width` numbers to rows of padded(width), filled up with `filling`. */
HELPER void pad(const float *from, int64_t rows, int64_t width, float *to, float filling) {
    int64_t full = padded(width);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * full, from + i * width, width * sizeof(float));
        for (int64_t j = width; j < full; j++) to[i * full + j] = filling;
    }
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* 0 if all numbers are finite, else NaN; the count is a multiple of LANES. Four sums, because one
 * would wait for each addition. */
HELPER vec defect(const float *numbers, int64_t count) {
    vec found[4] = {0};
    int64_t v = 0;
    for (; v + 4 * LANES <= count; v += 4 * LANES)
        UNROLL for (int j = 0; j < 4; j++) found[j] += load(numbers + v + j * LANES) * 0.0f;
    for (; v < count; v += LANES) found[0] += load(numbers + v) * 0.0f;
    return (found[0] + found[1]) + (found[2] + found[3]);
}

/* Scratch memory of one call, aligned to vectors. Each part is taken from the rest. */
typedef struct {
    void *block;
    char *next;
} Scratch;

#define ALIGNMENT 64

HELPER int64_t room_of(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

HELPER int allocate(Scratch *scratch, int64_t bytes) {
    scratch->block = malloc(bytes + ALIGNMENT);
    if (!scratch->block) return 0;
    uintptr_t start = ((uintptr_t)scratch->block + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    scratch->next = (char *)start;
    return 1;
}

HELPER void *take(Scratch *scratch, int64_t bytes) {
    void *found = scratch->next;
    scratch->next += room_of(bytes);
    return found;
}

#endif
