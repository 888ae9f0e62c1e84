/* sum_i exp(l_ij - m_j) [x_i, 1] with m_j = max_i l_ij: a softmax over the elements of each set. */

#include "accumulate.h"

/* Multiply the sums of LANES slots, from `first` on, by exp(before - after), in double. */
static void rescale(Sums *sums, int64_t first, const float *before, const float *after) {
    float factors[LANES];
    double precise[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        int same = before[lane] == after[lane]; /* both may be -inf */
        precise[lane] = same ? 1 : exp((double)before[lane] - after[lane]);
        factors[lane] = (float)precise[lane];
    }
    vec factor = load(factors);
    dvec scale = *(unaligned_dvec *)precise;
    for (int64_t l = 0; l <= sums->dim; l++) {
        float *recent = sums->recent + l * sums->width + first;
        unaligned_dvec *total = (unaligned_dvec *)(sums->total + l * sums->width + first);
        store(recent, load(recent) * factor);
        *total = *total * scale;
    }
}

/* Raise the peaks to the largest logits of a block, and rescale the sums to them. */
static void raise_peaks(Scores *scores, Sums *sums, const float *logits, int64_t rows,
                        const uint8_t *shown) {
    int64_t width = scores->width;
    for (int64_t v = 0; v < width; v += LANES) {
        float before[LANES], after[LANES];
        vec highest = load(scores->peaks + v);
        store(before, highest);
        for (int64_t i = 0; i < rows; i++)
            if (!shown || shown[i]) highest = larger(load(logits + i * width + v), highest);
        store(after, highest);
        store(scores->peaks + v, highest);
        if (memcmp(before, after, sizeof before)) rescale(sums, v, before, after);
    }
}

/* Sum the elements of each set with exponential weights. The arguments are those of `setfold_sums`;
 * peaks (sets, slots) and sums (sets, slots, dim + 1) are written. The peak of a set without
 * elements is -inf. */
KERNEL(setfold_softmax)(const float *elements, int64_t step, const uint8_t *shown,
                        int64_t shown_step, int64_t sets, int64_t length, int64_t dim,
                        const float *matrix, int64_t slots, double *peaks, double *sums) {
    int64_t width = padded(slots), block = block_rows(dim, width);
    Scratch scratch;
    vec bad = spread(0);
    if (!allocate(&scratch, room_of_scores(dim, slots) + room_of(block * width * 4) +
                                room_of_sums(dim, width)))
        return NO_MEMORY;
    Scores scores = make_scores(&scratch, matrix, dim, slots, EXPONENTIAL);
    float *weights = take(&scratch, block * width * sizeof(float));
    Sums found = make_sums(&scratch, dim, width);
    for (int64_t set = 0; set < sets; set++) {
        clear(&found);
        for (int64_t j = 0; j < width; j++) scores.peaks[j] = -INFINITY;
        for (int64_t start = 0; start < length; start += block) {
            int64_t rows = least(block, length - start);
            const float *x = elements + set * step + start * dim;
            const uint8_t *some = shown ? shown + set * shown_step + start : NULL;
            bad += compute_logits(&scores, x, rows, weights);
            raise_peaks(&scores, &found, weights, rows, some);
            exponentiate(&scores, weights, rows, some);
            add_block(&found, x, weights, rows);
        }
        finish(&found);
        for (int64_t j = 0; j < slots; j++) peaks[set * slots + j] = scores.peaks[j];
        write_sums(&found, slots, sums + set * slots * (dim + 1));
    }
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}
