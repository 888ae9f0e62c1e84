/* Weighted sums of the rows of a set: weights^T [elements, 1]. */

#ifndef SETFOLD_ACCUMULATE_H
#define SETFOLD_ACCUMULATE_H

#include "attention.h"

#define FLUSH_ROWS 512 /* rows whose sums are kept in float */

/* Sums as (dim + 1, width): in float over some hundred rows, in double over all. */
typedef struct {
    int64_t dim, width, rows;
    float *recent;
    double *total;
} Sums;

HELPER int64_t room_of_sums(int64_t dim, int64_t width) {
    return room_of((dim + 1) * width * 4) + room_of((dim + 1) * width * 8);
}

HELPER Sums make_sums(Scratch *scratch, int64_t dim, int64_t width) {
    int64_t size = (dim + 1) * width;
    float *recent = take(scratch, size * sizeof(float));
    return (Sums){dim, width, 0, recent, take(scratch, size * sizeof(double))};
}

HELPER void clear(Sums *sums) {
    int64_t size = (sums->dim + 1) * sums->width;
    memset(sums->recent, 0, size * sizeof(float));
    memset(sums->total, 0, size * sizeof(double));
    sums->rows = 0;
}

HELPER void finish(Sums *sums) {
    flush(sums->total, sums->recent, (sums->dim + 1) * sums->width);
    sums->rows = 0;
}

/* Add weights^T [elements, 1] of a block of rows. */
HELPER void add_block(Sums *sums, const float *elements, const float *weights, int64_t rows) {
    int64_t dim = sums->dim, width = sums->width;
    multiply_add((Left){elements, 1, dim}, weights, dim, rows, width, sums->recent);
    add_rows(weights, rows, width, sums->recent + dim * width);
    sums->rows += rows;
    if (sums->rows >= FLUSH_ROWS) finish(sums);
}

/* Write the sums as (slots, dim + 1). */
HELPER void write_sums(const Sums *sums, int64_t slots, double *to) {
    int64_t numbers = sums->dim + 1;
    for (int64_t j = 0; j < slots; j++)
        for (int64_t l = 0; l < numbers; l++)
            to[j * numbers + l] = sums->total[l * sums->width + j];
}

#endif
