/* max_i W_ij v_ic over the elements of each set, and where it is attained. */

#include "attention.h"

#define BLOCK 64 /* rows */
#define SLOTS_AT_ONCE 4

/* What the products need: weights and values of a block of rows, and the maxima so far. */
typedef struct {
    Scores scores;
    int64_t wide;        /* channels, padded */
    const float *right;  /* (dim, wide): from elements to signed values */
    const float *offset; /* (wide) */
    float *elements;     /* (BLOCK, dim): rows that are shown */
    int64_t *numbers;    /* (BLOCK): their numbers in the set */
    float *weights;      /* (BLOCK, width) */
    float *values;       /* (BLOCK, wide) */
    float *best;         /* (slots, wide) */
    vec bad;             /* NaN if a logit, a weight or a value is not finite */
    int32_t *blocks;     /* (slots, wide): the block in which the best was found */
} Search;

/* Raise the maxima of some slots and vectors of channels to those of a block. */
INLINE void raise_tile(const int slots, const int vectors, const float *weights, int64_t width,
                       const float *values, int64_t wide, int64_t rows, float *best,
                       int32_t *blocks, int32_t number) {
    vec found[SLOTS_AT_ONCE][2];
    UNROLL for (int k = 0; k < slots; k++) UNROLL for (int v = 0; v < vectors; v++) found[k][v] =
        spread(-INFINITY);
    for (int64_t i = 0; i < rows; i++) {
        vec x[2];
        UNROLL for (int v = 0; v < vectors; v++) x[v] = load(values + i * wide + v * LANES);
        UNROLL for (int k = 0; k < slots; k++) {
            float weight = weights[i * width + k];
            UNROLL for (int v = 0; v < vectors; v++) found[k][v] =
                larger(weight * x[v], found[k][v]);
        }
    }
    UNROLL for (int k = 0; k < slots; k++) UNROLL for (int v = 0; v < vectors; v++) {
        float *to = best + k * wide + v * LANES;
        vec before = load(to);
        ivec wins = found[k][v] > before;
        unaligned_ivec *owner = (unaligned_ivec *)(blocks + k * wide + v * LANES);
        *owner = (*owner & ~wins) | (((ivec){0} + number) & wins);
        store(to, larger(found[k][v], before));
    }
}

/* Weights and signed values of the rows of a block that are shown; their number is returned. */
static int64_t evaluate(Search *search, const float *elements, const uint8_t *shown, int64_t length,
                        int64_t block) {
    int64_t dim = search->scores.dim, start = block * BLOCK, rows = 0;
    int64_t stop = least(start + BLOCK, length);
    const float *x = elements + start * dim;
    for (int64_t i = start; i < stop; i++) {
        if (shown && !shown[i]) continue;
        if (shown) memcpy(search->elements + rows * dim, elements + i * dim, dim * sizeof(float));
        search->numbers[rows++] = i;
    }
    Left left = {shown ? search->elements : x, dim, 1};
    const Scores *scores = &search->scores;
    search->bad += compute_logits(scores, left.start, rows, search->weights);
    weigh(scores, search->weights, rows, NULL);
    multiply(left, search->right, rows, dim, search->wide, search->values, search->offset);
    return rows;
}

static void raise_block(Search *search, int64_t rows, int32_t number) {
    int64_t width = search->scores.width, wide = search->wide, slots = search->scores.slots, k = 0;
#define RAISE(slots, vectors)                                                                      \
    raise_tile(slots, vectors, search->weights + k, width, search->values + v, wide, rows,         \
               search->best + k * wide + v, search->blocks + k * wide + v, number)
    for (; k < slots; k += slots - k < SLOTS_AT_ONCE ? 1 : SLOTS_AT_ONCE) {
        int one = slots - k < SLOTS_AT_ONCE;
        int64_t v = 0;
        for (; v + 2 * LANES <= wide; v += 2 * LANES) {
            if (one)
                RAISE(1, 2);
            else
                RAISE(SLOTS_AT_ONCE, 2);
        }
        if (v < wide) {
            if (one)
                RAISE(1, 1);
            else
                RAISE(SLOTS_AT_ONCE, 1);
        }
    }
#undef RAISE
}

/* Find the elements that attain the maxima, by computing again the blocks in which they lie. */
static void find_winners(Search *search, const float *elements, const uint8_t *shown,
                         int64_t length, int64_t out, int32_t *first, int32_t *next,
                         int64_t *winners) {
    int64_t slots = search->scores.slots, blocks = (length + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < blocks; b++) first[b] = -1;
    for (int64_t k = 0; k < slots; k++)
        for (int64_t c = 0; c < out; c++) { /* a linked list for each block */
            int32_t block = search->blocks[k * search->wide + c];
            next[k * out + c] = first[block];
            first[block] = (int32_t)(k * out + c);
        }
    for (int64_t b = 0; b < blocks; b++) {
        if (first[b] < 0) continue;
        int64_t rows = evaluate(search, elements, shown, length, b);
        for (int32_t pair = first[b]; pair >= 0; pair = next[pair]) {
            int64_t k = pair / out, c = pair % out;
            float best = search->best[k * search->wide + c];
            winners[pair] = 0; /* of a set without elements */
            for (int64_t i = 0; i < rows; i++)
                if (search->weights[i * search->scores.width + k] *
                        search->values[i * search->wide + c] ==
                    best) {
                    winners[pair] = search->numbers[i];
                    break;
                }
        }
    }
}

/* The largest contributions (sign 1), or the smallest (sign -1).
 *
 * elements, shown and matrix as in `setfold_sums`; values (dim + 1, out) maps [x, 1] to values;
 * best (sets, slots, out) is written, and winners of the same shape unless it is NULL. Returns
 * NOT_FINITE if a weight or a value is not finite. The best of a set without elements is infinite.
 */
KERNEL(setfold_extrema)(const float *elements, int64_t step, const uint8_t *shown,
                        int64_t shown_step, int64_t sets, int64_t length, int64_t dim,
                        const float *matrix, int64_t slots, int attention, const float *values,
                        int64_t out, float sign, float *best, int64_t *winners) {
    int64_t width = padded(slots), wide = padded(out), blocks = (length + BLOCK - 1) / BLOCK;
    Scratch scratch;
    if (!allocate(&scratch, room_of_scores(dim, slots) + room_of((dim + 1) * wide * 4) +
                                room_of(BLOCK * dim * 4) + room_of(BLOCK * 8) +
                                room_of(BLOCK * width * 4) + room_of(BLOCK * wide * 4) +
                                2 * room_of(slots * wide * 4) + room_of((blocks + 1) * 4) +
                                room_of(slots * out * 4)))
        return NO_MEMORY;
    Search search = {.scores = make_scores(&scratch, matrix, dim, slots, attention), .wide = wide};
    float *right = take(&scratch, (dim + 1) * wide * sizeof(float));
    pad(values, dim + 1, out, right, 0);
    for (int64_t v = 0; v < (dim + 1) * wide; v += LANES) store(right + v, load(right + v) * sign);
    search.right = right;
    search.offset = right + dim * wide;
    search.elements = take(&scratch, BLOCK * dim * sizeof(float));
    search.numbers = take(&scratch, BLOCK * sizeof(int64_t));
    search.weights = take(&scratch, BLOCK * width * sizeof(float));
    search.values = take(&scratch, BLOCK * wide * sizeof(float));
    search.best = take(&scratch, slots * wide * sizeof(float));
    search.blocks = take(&scratch, slots * wide * sizeof(int32_t));
    int32_t *first = take(&scratch, (blocks + 1) * sizeof(int32_t));
    int32_t *next = take(&scratch, slots * out * sizeof(int32_t));
    search.bad = spread(0);
    for (int64_t set = 0; set < sets; set++) {
        const float *x = elements + set * step;
        const uint8_t *some = shown ? shown + set * shown_step : NULL;
        for (int64_t j = 0; j < slots * wide; j++) search.best[j] = -INFINITY;
        memset(search.blocks, 0, slots * wide * sizeof(int32_t));
        for (int64_t block = 0; block < blocks; block++) {
            int64_t rows = evaluate(&search, x, some, length, block);
            search.bad += defect(search.weights, rows * width) + defect(search.values, rows * wide);
            raise_block(&search, rows, (int32_t)block);
        }
        int64_t place = set * slots * out;
        for (int64_t k = 0; k < slots; k++)
            for (int64_t c = 0; c < out; c++)
                best[place + k * out + c] = sign * search.best[k * wide + c];
        if (winners && length)
            find_winners(&search, x, some, length, out, first, next, winners + place);
        else if (winners)
            memset(winners + place, 0, slots * out * sizeof(int64_t));
    }
    free(scratch.block);
    return sum_of(search.bad) == 0 ? DONE : NOT_FINITE;
}
