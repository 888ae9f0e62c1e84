/* Totals, maxima and minima of sets whose rows lie in any order. */

#include "export.h"
#include "index.h"
#include "matrix.h"

#define AHEAD 8 /* rows whose results are fetched before they are changed */

/* elements (rows, dim); index (rows) from 0 to sets - 1; totals (sets, dim) is written. */
KERNEL(setfold_ragged_totals)
(const float *elements, const int64_t *index, int64_t rows, int64_t dim, int64_t sets,
 double *totals) {
    int64_t whole = dim / LANES * LANES;
    if (!in_range(index, rows, sets)) return BAD_INDEX;
    memset(totals, 0, sets * dim * sizeof(double));
    for (int64_t i = 0; i < rows; i++) {
        if (i + AHEAD < rows) __builtin_prefetch(totals + index[i + AHEAD] * dim, 1);
        const float *row = elements + i * dim;
        double *total = totals + index[i] * dim;
        for (int64_t v = 0; v < whole; v += LANES)
            *(unaligned_dvec *)(total + v) += __builtin_convertvector(load(row + v), dvec);
        for (int64_t l = whole; l < dim; l++) total[l] += row[l];
    }
    return DONE;
}

/* The same with the maximum, or the minimum; sets without rows get -inf, or inf. NaN stays. */
KERNEL(setfold_ragged_extremes)
(const float *elements, const int64_t *index, int64_t rows, int64_t dim, int64_t sets, int largest,
 float *best) {
    int64_t whole = dim / LANES * LANES;
    float sign = largest ? 1 : -1;
    if (!in_range(index, rows, sets)) return BAD_INDEX;
    for (int64_t i = 0; i < sets * dim; i++) best[i] = -sign * INFINITY;
    for (int64_t i = 0; i < rows; i++) {
        if (i + AHEAD < rows) __builtin_prefetch(best + index[i + AHEAD] * dim, 1);
        const float *row = elements + i * dim;
        float *known = best + index[i] * dim;
        for (int64_t v = 0; v < whole; v += LANES) {
            vec x = load(row + v), b = load(known + v);
            ivec wins = (sign * x > sign * b) | (x != x);
            store(known + v, (vec)((wins & (ivec)x) | (~wins & (ivec)b)));
        }
        for (int64_t l = whole; l < dim; l++)
            if (sign * row[l] > sign * known[l] || row[l] != row[l]) known[l] = row[l];
    }
    return DONE;
}
