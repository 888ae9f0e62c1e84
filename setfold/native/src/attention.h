/* Weights of elements over slots: from logits to weights, and gradients back. */

#ifndef SETFOLD_ATTENTION_H
#define SETFOLD_ATTENTION_H

#include <float.h>

#include "export.h"
#include "matrix.h"

#define EPSILON 1e-8f /* the paper's, added to every sigmoid */

/* How logits become weights. EXPONENTIAL: exp(logit - peak of the slot), for a softmax over the
 * elements, whose denominator is one of the sums. */
enum { SIGMOID = 0, SOFTMAX = 1, EXPONENTIAL = 2 };

/* Scores: logits (rows, slots) = elements (rows, dim) matrix + offset, with slots padded. */
typedef struct {
    int64_t dim, slots, width; /* width: slots, padded */
    int attention;
    const float *matrix; /* (dim, width) */
    const float *offset; /* (width): the lowest number for the padding */
    const float *real;   /* (width): 1 for slots, 0 for the padding */
    float *peaks;        /* (width), for EXPONENTIAL */
} Scores;

HELPER int64_t room_of_scores(int64_t dim, int64_t slots) {
    return room_of((dim + 3) * padded(slots) * (int64_t)sizeof(float));
}

/* Lay out a matrix (dim + 1, slots) whose last row is the offset. */
HELPER Scores make_scores(Scratch *scratch, const float *matrix, int64_t dim, int64_t slots,
                          int attention) {
    int64_t width = padded(slots);
    float *room = take(scratch, (dim + 3) * width * sizeof(float));
    float *real = room, *peaks = room + width, *copy = room + 2 * width;
    for (int64_t j = 0; j < width; j++) real[j] = j < slots;
    for (int64_t j = 0; j < width; j++) peaks[j] = 0;
    if (slots < width) {
        pad(matrix, dim, slots, copy, 0);
        pad(matrix + dim * slots, 1, slots, copy + dim * width, -FLT_MAX);
        matrix = copy;
    }
    return (Scores){dim, slots, width, attention, matrix, matrix + dim * width, real, peaks};
}

/* The logits of a block of rows. Returns 0, or NaN if one of them is not finite: a product in one
 * step may hide that partial sums overflow with both signs, so torch must decide. */
HELPER vec compute_logits(const Scores *scores, const float *elements, int64_t rows,
                          float *logits) {
    multiply((Left){elements, scores->dim, 1}, scores->matrix, rows, scores->dim, scores->width,
             logits, scores->offset);
    return defect(logits, rows * scores->width);
}

/* sigmoid(x), at least 1e-38; NaN for NaN. */
INLINE vec sigmoid(vec x) { return reciprocal(1.0f + exponential(smaller(spread(87.0f), -x))); }

/* The numerators of one row of logits, in place, and their sums by lane. If `bare`, EPSILON is left
 * out of what is stored: the slope of a small sigmoid would be lost in the rounding of the sum. */
INLINE vec activate(const int attention, const int bare, const Scores *scores, float *row,
                    float peak) {
    vec sum = spread(0);
    for (int64_t v = 0; v < scores->width; v += LANES) {
        vec x = load(row + v), a, kept;
        if (attention == SIGMOID) {
            kept = sigmoid(x);
            a = (kept + EPSILON) * load(scores->real + v);
        } else {
            kept = a = exponential(x - peak);
        }
        store(row + v, bare ? kept : a);
        sum += a;
    }
    return sum;
}

INLINE vec row_peak(const Scores *scores, const float *row) {
    vec peak = load(row);
    for (int64_t v = LANES; v < scores->width; v += LANES) peak = larger(peak, load(row + v));
    return peak;
}

/* Activate `rows` rows, at most LANES; write the factors that make each sum to 1. Several rows are
 * reduced at once, which takes a fraction of the time of as many reductions. */
INLINE void activate_rows(const int attention, const int bare, const Scores *scores, float *logits,
                          int rows, float factors[LANES]) {
    int64_t width = scores->width;
    float peaks[LANES] = {0};
    vec found[LANES];
    if (rows < LANES)
        for (int j = rows; j < LANES; j++) found[j] = spread(0);
    if (attention == SOFTMAX) {
        for (int j = 0; j < rows; j++) found[j] = row_peak(scores, logits + j * width);
        store(peaks, row_maxima(found));
    }
    for (int j = 0; j < rows; j++)
        found[j] = activate(attention, bare, scores, logits + j * width, peaks[j]);
    store(factors, 1.0f / row_sums(found));
}

INLINE void weigh_with(const int attention, const Scores *scores, float *logits, int64_t rows,
                       const uint8_t *shown) {
    int64_t width = scores->width;
    for (int64_t i = 0; i < rows; i += LANES) {
        int some = rows - i < LANES ? (int)(rows - i) : LANES;
        float factors[LANES];
        activate_rows(attention, 0, scores, logits + i * width, some, factors);
        for (int j = 0; j < some; j++) {
            float *row = logits + (i + j) * width, factor = factors[j];
            if (shown && !shown[i + j]) factor = 0;
            for (int64_t v = 0; v < width; v += LANES) store(row + v, load(row + v) * factor);
        }
    }
}

/* Turn logits (rows, width) into weights, in place. `shown` has a byte for each row, or is NULL:
 * the weights of a row that is not shown are 0. */
HELPER void weigh(const Scores *scores, float *logits, int64_t rows, const uint8_t *shown) {
    if (scores->attention == SIGMOID)
        weigh_with(SIGMOID, scores, logits, rows, shown);
    else
        weigh_with(SOFTMAX, scores, logits, rows, shown);
}

INLINE void weigh_back_with(const int attention, const Scores *scores, float *logits, float *grads,
                            int64_t rows, const uint8_t *shown) {
    const float added = attention == SIGMOID ? EPSILON : 0; /* to numerators */
    int64_t width = scores->width;
    for (int64_t i = 0; i < rows; i += LANES) {
        int some = rows - i < LANES ? (int)(rows - i) : LANES;
        float factors[LANES], shared[LANES], *block = logits + i * width, *grad = grads + i * width;
        activate_rows(attention, 1, scores, block, some, factors);
        vec found[LANES];
        if (some < LANES)
            for (int j = some; j < LANES; j++) found[j] = spread(0);
        for (int j = 0; j < some; j++) {
            found[j] = spread(0);
            for (int64_t v = j * width; v < (j + 1) * width; v += LANES)
                found[j] += (load(block + v) + added) * load(grad + v);
        }
        store(shared, row_sums(found) * load(factors));
        for (int j = 0; j < some; j++) {
            float factor = factors[j], common = shared[j];
            if (shown && !shown[i + j]) factor = common = 0;
            for (int64_t v = j * width, k = 0; k < width; v += LANES, k += LANES) {
                vec a = load(block + v), weight = (a + added) * factor, slope = weight;
                if (attention == SIGMOID) slope = a * (1.0f - a) * factor * load(scores->real + k);
                store(block + v, weight);
                store(grad + v, (load(grad + v) - common) * slope);
            }
        }
    }
}

/* Turn logits into exp(logit - peak), in place; 0 for rows that are not shown. */
HELPER void exponentiate(const Scores *scores, float *logits, int64_t rows, const uint8_t *shown) {
    int64_t width = scores->width;
    for (int64_t i = 0; i < rows; i++) {
        float *row = logits + i * width;
        if (shown && !shown[i]) {
            memset(row, 0, width * sizeof(float));
            continue;
        }
        for (int64_t v = 0; v < width; v += LANES) {
            vec below = smaller(spread(0), load(row + v) - load(scores->peaks + v));
            store(row + v, exponential(below)); /* only rounding puts a logit above the peak */
        }
    }
}

/* Turn logits into weights, and gradients of the weights into gradients of the logits, in place.
 *
 * SIGMOID: with S = sigmoid(logit), r = sum(S + eps) and W = (S + eps) / r, dL/dlogit is
 * (dL/dW - sum_l W_l dL/dW_l) S (1 - S) / r. SOFTMAX: the last factor is W. EXPONENTIAL: dL/dW W.
 */
HELPER void weigh_back(const Scores *scores, float *logits, float *grads, int64_t rows,
                       const uint8_t *shown) {
    if (scores->attention == SIGMOID) {
        weigh_back_with(SIGMOID, scores, logits, grads, rows, shown);
    } else if (scores->attention == SOFTMAX) {
        weigh_back_with(SOFTMAX, scores, logits, grads, rows, shown);
    } else {
        exponentiate(scores, logits, rows, shown);
        for (int64_t v = 0; v < rows * scores->width; v += LANES)
            store(grads + v, load(grads + v) * load(logits + v));
    }
}

/* Rows that are handled together: their elements and weights stay in the first-level cache. */
HELPER int64_t block_rows(int64_t dim, int64_t width) {
    int64_t rows = 40 * 1024 / (4 * (dim + width)) / 16 * 16;
    return rows < 32 ? 32 : rows > 256 ? 256 : rows;
}

#endif
