/* sum_i W_ij [x_i, 1] of sets whose rows lie in any order, added to the sums of their sets. */

#include "accumulate.h"
#include "index.h"

#define AHEAD 24 /* rows that are fetched before they are copied */

/* The order in which the rows of each set follow one another, and where each set ends. */
static void sort_rows(const int64_t *index, int64_t rows, int64_t sets, int64_t *ends,
                      int64_t *order) {
    memset(ends, 0, (sets + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < rows; i++) ends[index[i] + 1]++;
    for (int64_t set = 0; set < sets; set++) ends[set + 1] += ends[set]; /* where each begins */
    for (int64_t i = 0; i < rows; i++) order[ends[index[i]]++] = i;
}

static int is_sorted(const int64_t *index, int64_t rows) {
    for (int64_t i = 1; i < rows; i++)
        if (index[i] < index[i - 1]) return 0;
    return 1;
}

/* Copy the first `rows` rows of `dim` numbers of an order of `all` rows. Whole vectors are copied,
 * unless the elements end at `end` before: the next row overwrites what was too much. */
static void gather(const float *elements, const float *end, const int64_t *order, int64_t rows,
                   int64_t all, int64_t dim, float *to) {
    for (int64_t i = 0; i < rows; i++) {
        if (i + AHEAD < all) {
            const float *later = elements + order[i + AHEAD] * dim;
            __builtin_prefetch(later);
            __builtin_prefetch(later + dim - 1);
        }
        const float *from = elements + order[i] * dim;
        if (end - from < padded(dim))
            memcpy(to + i * dim, from, dim * sizeof(float));
        else
            for (int64_t l = 0; l < dim; l += LANES) store(to + i * dim + l, load(from + l));
    }
}

/* Write weights^T [elements, 1] of some rows of one set to its sums (slots, dim + 1), or add it. */
static void write_segment(const float *elements, const float *weights, int64_t rows,
                          const Scores *scores, int add, float *room, double *sums) {
    int64_t dim = scores->dim, width = scores->width, slots = scores->slots, numbers = dim + 1;
    float *turned = room + numbers * width, *mass = room + dim * width;
    memset(mass, 0, width * sizeof(float));
    add_rows(weights, rows, width, mass);
    if (dim % LANES == 0) { /* the product in the order of the sums */
        panels(0, (Left){weights, 1, width}, elements, slots, rows, dim, room, NULL);
        for (int64_t j = 0; j < slots; j++) {
            memcpy(turned + j * numbers, room + j * dim, dim * sizeof(float));
            turned[j * numbers + dim] = mass[j];
        }
    } else {
        panels(0, (Left){elements, 1, dim}, weights, dim, rows, width, room, NULL);
        for (int64_t l = 0; l < numbers; l++)
            for (int64_t j = 0; j < width; j += LANES)
                UNROLL for (int k = 0; k < LANES; k++) turned[(j + k) * numbers + l] =
                    room[l * width + j + k];
    }
    if (add)
        for (int64_t i = 0; i < slots * numbers; i++) sums[i] += turned[i];
    else
        for (int64_t i = 0; i < slots * numbers; i++) sums[i] = turned[i];
}

/* elements (rows, dim); index (rows) from 0 to sets - 1; matrix (dim + 1, slots) of the scores;
 * sums (sets, slots, dim + 1) is written. */
KERNEL(setfold_ragged_sums)(const float *elements, const int64_t *index, int64_t rows, int64_t dim,
                            int64_t sets, const float *matrix, int64_t slots, int attention,
                            double *sums) {
    int64_t width = padded(slots), block = block_rows(dim, width), size = slots * (dim + 1);
    if (!in_range(index, rows, sets)) return BAD_INDEX;
    int sorted = is_sorted(index, rows);
    Scratch scratch;
    vec bad = spread(0);
    if (!allocate(&scratch, room_of_scores(dim, slots) + room_of(block * width * 4) +
                                room_of(2 * (dim + 1) * width * 4) +
                                room_of((block * dim + LANES) * 4) +
                                (sorted ? 0 : room_of((sets + 1) * 8) + room_of(rows * 8))))
        return NO_MEMORY;
    Scores scores = make_scores(&scratch, matrix, dim, slots, attention);
    float *weights = take(&scratch, block * width * sizeof(float));
    float *room = take(&scratch, 2 * (dim + 1) * width * sizeof(float));
    float *gathered = take(&scratch, (block * dim + LANES) * sizeof(float));
    int64_t *order = NULL, *ends = NULL, set = 0, written = 0; /* sets */
    if (!sorted) {
        ends = take(&scratch, (sets + 1) * sizeof(int64_t));
        order = take(&scratch, rows * sizeof(int64_t));
        sort_rows(index, rows, sets, ends, order);
    }
    for (int64_t start = 0; start < rows; start += block) {
        int64_t some = least(block, rows - start);
        const float *x = elements + start * dim;
        if (order) {
            gather(elements, elements + rows * dim, order + start, some, rows - start, dim,
                   gathered);
            x = gathered;
        }
        bad += compute_logits(&scores, x, some, weights);
        weigh(&scores, weights, some, NULL);
        for (int64_t i = 0, stop; i < some; i = stop) {
            if (order) {
                while (ends[set] <= start + i) set++;
                stop = least(some, ends[set] - start);
            } else {
                set = index[start + i];
                for (stop = i + 1; stop < some && index[start + stop] == set;) stop++;
            }
            if (written < set) memset(sums + written * size, 0, (set - written) * size * 8);
            write_segment(x + i * dim, weights + i * width, stop - i, &scores, set < written, room,
                          sums + set * size);
            written = set + 1;
        }
    }
    memset(sums + written * size, 0, (sets - written) * size * sizeof(double));
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}
