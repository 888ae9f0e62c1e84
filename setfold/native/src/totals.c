/* The sum of the elements of each set, in double. */

#include "export.h"
#include "matrix.h"

#define BLOCK 64 /* rows that stay in the first-level cache while their columns are added up */

/* Add rows (rows, dim) to total (dim); rows that are not shown are left out. */
static void add_shown(const float *elements, const uint8_t *shown, int64_t rows, int64_t dim,
                      double *total) {
    int64_t whole = dim / LANES * LANES;
    for (int64_t v = 0; v < whole; v += LANES) {
        dvec parts[2] = {*(unaligned_dvec *)(total + v)};
        for (int64_t i = 0; i < rows; i++)
            if (!shown || shown[i])
                parts[i % 2] += __builtin_convertvector(load(elements + i * dim + v), dvec);
        *(unaligned_dvec *)(total + v) = parts[0] + parts[1];
    }
    if (whole == dim) return;
    for (int64_t i = 0; i < rows; i++)
        if (!shown || shown[i])
            for (int64_t l = whole; l < dim; l++) total[l] += elements[i * dim + l];
}

/* elements (sets, length, dim), with `step` numbers from one set to the next; shown (sets, length),
 * likewise, or NULL if all are; totals (sets, dim) is written. */
KERNEL(setfold_totals)
(const float *elements, int64_t step, const uint8_t *shown, int64_t shown_step, int64_t sets,
 int64_t length, int64_t dim, double *totals) {
    for (int64_t set = 0; set < sets; set++) {
        double *total = totals + set * dim;
        memset(total, 0, dim * sizeof(double));
        for (int64_t start = 0; start < length; start += BLOCK) {
            const uint8_t *some = shown ? shown + set * shown_step + start : NULL;
            add_shown(elements + set * step + start * dim, some, least(BLOCK, length - start), dim,
                      total);
        }
    }
    return DONE;
}
