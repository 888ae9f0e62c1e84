/* Products of small matrices of any width, stored row by row, without padding. */

#ifndef SETFOLD_PRODUCT_H
#define SETFOLD_PRODUCT_H

#include "matrix.h"

#define SMALL_RIGHT (1 << 13) /* numbers that stay in the first-level cache */

/* c (rows, width) = left (rows, depth) right (depth, width), or `c` itself plus the product if
 * `add`. `spare` has room for (rows + depth) vectors. */
INLINE void product_with(const int add, Left left, const float *right, int64_t right_step,
                         int64_t rows, int64_t depth, int64_t width, float *c, int64_t c_step,
                         float *spare) {
    int64_t v = 0, few = depth * width <= SMALL_RIGHT ? TALL : rows;
    for (int64_t i = 0; i < rows; i += few) { /* a small right factor stays in cache */
        int64_t some = least(few, rows - i);
        Left part = {left.start + i * left.row_step, left.row_step, left.step};
        for (v = 0; v + 2 * LANES <= width; v += 2 * LANES)
            two_vectors(add, part, right + v, right_step, some, depth, c + i * c_step + v, c_step,
                        NULL);
        for (; v + LANES <= width; v += LANES)
            one_vector(add, part, right + v, right_step, some, depth, c + i * c_step + v, c_step,
                       NULL);
    }
    if (v == width) return;
    float *last = spare, *found = spare + depth * LANES; /* the other columns, padded */
    for (int64_t q = 0; q < depth; q++)
        for (int64_t l = 0; l < LANES; l++)
            last[q * LANES + l] = v + l < width ? right[q * right_step + v + l] : 0;
    one_vector(0, left, last, LANES, rows, depth, found, LANES, NULL);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t l = 0; v + l < width; l++)
            c[i * c_step + v + l] = (add ? c[i * c_step + v + l] : 0) + found[i * LANES + l];
}

HELPER void product(Left left, const float *right, int64_t right_step, int64_t rows, int64_t depth,
                    int64_t width, float *c, int64_t c_step, float *spare) {
    product_with(0, left, right, right_step, rows, depth, width, c, c_step, spare);
}

HELPER void add_product(Left left, const float *right, int64_t right_step, int64_t rows,
                        int64_t depth, int64_t width, float *c, int64_t c_step, float *spare) {
    product_with(1, left, right, right_step, rows, depth, width, c, c_step, spare);
}

/* The sum of a row, and of its products with 0: NaN if one of its numbers is not finite. */
HELPER float total_of(const float *row, int64_t count) {
    vec sum = spread(0);
    for (int64_t l = 0; l < count; l += LANES) sum += load_some(row + l, count - l);
    return sum_of(sum);
}

HELPER float defect_of(const float *row, int64_t count) {
    vec sum = spread(0);
    for (int64_t l = 0; l < count; l += LANES) sum += load_some(row + l, count - l) * 0.0f;
    return sum_of(sum);
}

/* The scalar products of `high` rows with `wide` others, LANES in all, as lanes of a vector. The
 * last row stands for those that would be beyond it. */
INLINE vec dots(const int high, const int wide, const float *left, int64_t left_step,
                const float *right, int64_t right_step, int64_t last, int64_t depth) {
    vec sums[LANES];
    const float *others[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sums[i] = spread(0);
    for (int j = 0; j < wide; j++) others[j] = right + least(j, last) * right_step;
    int64_t q = 0;
    for (; q + LANES <= depth; q += LANES) {
        vec a[LANES];
        UNROLL for (int i = 0; i < high; i++) a[i] = load(left + i * left_step + q);
        UNROLL for (int j = 0; j < wide; j++) {
            vec b = load(others[j] + q);
            UNROLL for (int i = 0; i < high; i++) sums[i * wide + j] += a[i] * b;
        }
    }
    if (q < depth) {
        vec a[LANES];
        UNROLL for (int i = 0; i < high; i++) a[i] = load_some(left + i * left_step + q, depth - q);
        UNROLL for (int j = 0; j < wide; j++) {
            vec b = load_some(others[j] + q, depth - q);
            UNROLL for (int i = 0; i < high; i++) sums[i * wide + j] += a[i] * b;
        }
    }
    return row_sums(sums);
}

#define HIGH (LANES / 4) /* rows of a tile of scalar products */

/* c (rows, width) = left (rows, depth) right^T + offset, with right (width, depth). */
HELPER void product_turned(const float *left, int64_t left_step, const float *right,
                           int64_t right_step, int64_t rows, int64_t depth, int64_t width,
                           const float *offset, float *c, int64_t c_step) {
    float found[LANES];
    int64_t i = 0;
    for (; i + HIGH <= rows; i += HIGH)
        for (int64_t v = 0; v < width; v += 4) {
            int64_t some = least(4, width - v);
            store(found, dots(HIGH, 4, left + i * left_step, left_step, right + v * right_step,
                              right_step, some - 1, depth));
            for (int64_t k = 0; k < HIGH; k++)
                for (int64_t l = 0; l < some; l++)
                    c[(i + k) * c_step + v + l] = found[k * 4 + l] + (offset ? offset[v + l] : 0);
        }
    for (; i < rows; i++)
        for (int64_t v = 0; v < width; v += LANES) {
            int64_t some = least(LANES, width - v);
            store(found, dots(1, LANES, left + i * left_step, left_step, right + v * right_step,
                              right_step, some - 1, depth));
            for (int64_t l = 0; l < some; l++)
                c[i * c_step + v + l] = found[l] + (offset ? offset[v + l] : 0);
        }
}

HELPER void scale_by(float factor, float *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) numbers[i] *= factor;
}

/* Transpose (rows, width) with `step` numbers from row to row. */
HELPER void transpose(const float *from, int64_t step, int64_t rows, int64_t width, float *to) {
    for (int64_t l = 0; l < width; l++)
        for (int64_t i = 0; i < rows; i++) to[l * rows + i] = from[i * step + l];
}

#endif
