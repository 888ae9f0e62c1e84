/* sum_i W_ij [x_i, 1] over the elements of each set, and its gradients. */

#include "accumulate.h"

/* Sum the elements of each set, weighted over slots.
 *
 * elements (sets, length, dim), with `step` numbers from one set to the next; shown (sets, length),
 * likewise, or NULL if all are; matrix (dim + 1, slots) of the scores; sums (sets, slots, dim + 1)
 * is written. */
KERNEL(setfold_sums)(const float *elements, int64_t step, const uint8_t *shown, int64_t shown_step,
                     int64_t sets, int64_t length, int64_t dim, const float *matrix, int64_t slots,
                     int attention, double *sums) {
    int64_t width = padded(slots), block = block_rows(dim, width);
    Scratch scratch;
    vec bad = spread(0);
    if (!allocate(&scratch, room_of_scores(dim, slots) + room_of(block * width * 4) +
                                room_of_sums(dim, width)))
        return NO_MEMORY;
    Scores scores = make_scores(&scratch, matrix, dim, slots, attention);
    float *weights = take(&scratch, block * width * sizeof(float));
    Sums found = make_sums(&scratch, dim, width);
    for (int64_t set = 0; set < sets; set++) {
        clear(&found);
        for (int64_t start = 0; start < length; start += block) {
            int64_t rows = least(block, length - start);
            const float *x = elements + set * step + start * dim;
            bad += compute_logits(&scores, x, rows, weights);
            weigh(&scores, weights, rows, shown ? shown + set * shown_step + start : NULL);
            add_block(&found, x, weights, rows);
        }
        finish(&found);
        write_sums(&found, slots, sums + set * slots * (dim + 1));
    }
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}

/* The encoding (slots, out) of one small set: sum_i W_ij v_i / divisor, with values v_i = [x_i, 1]
 * values (dim + 1, out). The sums stay in float. */
KERNEL(setfold_encode)
(const float *elements, int64_t length, int64_t dim, const float *matrix, int64_t slots,
 int attention, const float *values, int64_t out, float divisor, float *encoding) {
    int64_t width = padded(slots), wide = padded(out), numbers = dim + 1;
    int few = length < slots; /* elements: then their values are cheaper than those of the sums */
    int64_t rows = few ? length : block_rows(dim, width);
    Scratch scratch;
    vec bad = spread(0);
    if (!allocate(&scratch, room_of_scores(dim, slots) + room_of(rows * width * 4) +
                                room_of((few ? length * wide : numbers * width) * 4) +
                                room_of(numbers * wide * 4) + room_of(slots * wide * 4)))
        return NO_MEMORY;
    Scores scores = make_scores(&scratch, matrix, dim, slots, attention);
    float *weights = take(&scratch, rows * width * sizeof(float));
    float *middle = take(&scratch, (few ? length * wide : numbers * width) * sizeof(float));
    float *copy = take(&scratch, numbers * wide * sizeof(float));
    float *found = take(&scratch, slots * wide * sizeof(float));
    if (out < wide) {
        pad(values, numbers, out, copy, 0);
        values = copy;
    }
    if (!few) memset(middle, 0, numbers * width * sizeof(float)); /* the sums */
    for (int64_t start = 0; start < length; start += rows) {
        int64_t some = least(rows, length - start);
        const float *x = elements + start * dim;
        bad += compute_logits(&scores, x, some, weights);
        weigh(&scores, weights, some, NULL);
        if (few) continue;
        multiply_add((Left){x, 1, dim}, weights, dim, some, width, middle);
        add_rows(weights, some, width, middle + dim * width);
    }
    if (few) {
        multiply((Left){elements, dim, 1}, values, length, dim, wide, middle, values + dim * wide);
        multiply((Left){weights, 1, width}, middle, slots, length, wide, found, NULL);
    } else {
        multiply((Left){middle, 1, width}, values, slots, numbers, wide, found, NULL);
    }
    for (int64_t j = 0; j < slots; j++)
        for (int64_t c = 0; c < out; c++) encoding[j * out + c] = found[j * wide + c] / divisor;
    bad += defect(found, slots * wide);
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}

/* The gradients of `setfold_sums`, or of `setfold_softmax` given its peaks (sets, slots).
 *
 * upstream (sets, slots, dim + 1) is dL/dsums; matrix_grad (dim + 1, slots) is written, and
 * elements_grad (sets, length, dim), with `grad_step` numbers from set to set, unless it is NULL.
 */
KERNEL(setfold_gradients)(const float *elements, int64_t step, const uint8_t *shown,
                          int64_t shown_step, int64_t sets, int64_t length, int64_t dim,
                          const float *matrix, int64_t slots, int attention, const float *peaks,
                          const float *upstream, double *matrix_grad, float *elements_grad,
                          int64_t grad_step) {
    int64_t width = padded(slots), wide = padded(dim), block = block_rows(dim, 2 * width);
    Scratch scratch;
    vec bad = spread(0);
    if (!allocate(&scratch, room_of_scores(dim, slots) + 2 * room_of(block * width * 4) +
                                room_of_sums(dim, width) + room_of((dim + 1) * width * 4) +
                                2 * room_of(slots * wide * 4) + room_of(block * wide * 4)))
        return NO_MEMORY;
    Scores scores = make_scores(&scratch, matrix, dim, slots, attention);
    float *weights = take(&scratch, block * width * sizeof(float));
    float *grads = take(&scratch, block * width * sizeof(float));
    Sums found = make_sums(&scratch, dim, width);
    float *turned = take(&scratch, (dim + 1) * width * sizeof(float)); /* upstream, transposed */
    float *direct = take(&scratch, slots * wide * sizeof(float));      /* upstream, padded */
    float *keys = take(&scratch, slots * wide * sizeof(float));        /* matrix, transposed */
    float *room = take(&scratch, block * wide * sizeof(float));
    for (int64_t j = 0; j < slots; j++)
        for (int64_t l = 0; l < wide; l++) keys[j * wide + l] = l < dim ? matrix[l * slots + j] : 0;
    clear(&found);
    for (int64_t set = 0; set < sets; set++) {
        const float *from = upstream + set * slots * (dim + 1);
        if (peaks) memcpy(scores.peaks, peaks + set * slots, slots * sizeof(float));
        for (int64_t l = 0; l <= dim; l++)
            for (int64_t j = 0; j < width; j++)
                turned[l * width + j] = j < slots ? from[j * (dim + 1) + l] : 0;
        for (int64_t j = 0; j < slots; j++)
            for (int64_t l = 0; l < wide; l++)
                direct[j * wide + l] = l < dim ? from[j * (dim + 1) + l] : 0;
        for (int64_t start = 0; start < length; start += block) {
            int64_t rows = least(block, length - start);
            const float *x = elements + set * step + start * dim;
            Left left = {x, dim, 1};
            bad += compute_logits(&scores, x, rows, weights);
            multiply(left, turned, rows, dim, width, grads, turned + dim * width);
            const uint8_t *some = shown ? shown + set * shown_step + start : NULL;
            weigh_back(&scores, weights, grads, rows, some);
            add_block(&found, x, grads, rows);
            if (!elements_grad) continue;
            multiply((Left){weights, width, 1}, direct, rows, slots, wide, room, NULL);
            multiply_add((Left){grads, width, 1}, keys, rows, slots, wide, room);
            float *to = elements_grad + set * grad_step + start * dim;
            for (int64_t i = 0; i < rows; i++)
                memcpy(to + i * dim, room + i * wide, dim * sizeof(float));
        }
    }
    finish(&found);
    for (int64_t l = 0; l <= dim; l++)
        for (int64_t j = 0; j < slots; j++) matrix_grad[l * slots + j] = found.total[l * width + j];
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}
