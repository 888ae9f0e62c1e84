/* The Slot Set Encoder on one set, from its parameters to the encoding and back.
 *
 * With normalized slots S, queries Q = S Wq^T + bq, keys X Wk^T + bk and values X Wv^T + bv, the
 * encoding is W^T values / divisor, with weights W from logits keys Q^T / sqrt(width of a key).
 * There are two orders of the same products. With few elements, keys Wq comes before the product
 * with S, so that no query is computed. With many, Q Wk comes before the product with X, and the
 * sums W^T X before the product with Wv, so that no key and no value is computed. */

#include "attention.h"
#include "product.h"

int JOIN(setfold_sums, ISA)(const float *, int64_t, const uint8_t *, int64_t, int64_t, int64_t,
                            int64_t, const float *, int64_t, int, double *);
int JOIN(setfold_gradients, ISA)(const float *, int64_t, const uint8_t *, int64_t, int64_t, int64_t,
                                 int64_t, const float *, int64_t, int, const float *, const float *,
                                 double *, float *, int64_t);

/* The elements are (length, dim), the keys of width `key`, the values of width `out`. */
typedef struct {
    int64_t length, dim, slots, slot_dim, key, out, attention, divisor, few;
} Sizes;

/* Elements and parameters, or their gradients. The slots (slots, slot_dim) are `base` or, with
 * noise (slots, slot_dim), base + deviation * noise. All biases may be NULL. A gradient that is
 * NULL is not computed. */
typedef struct {
    float *elements, *base, *deviation, *noise, *norm, *norm_bias;
    float *query, *query_bias, *key, *key_bias, *value, *value_bias;
} Tensors;

/* What the backward pass needs of the forward pass. */
typedef struct {
    float *normal;                         /* (slots, slot_dim): before scale and bias */
    float *inverse;                        /* (slots): 1 / deviation of each slot */
    float *slots;                          /* (slots, slot_dim), normalized */
    float *keys, *mixed, *values, *logits; /* few: mixed are [keys Wq, keys bq], scaled */
    float *queries, *sums, *matrix;        /* many */
    int64_t size;                          /* in numbers */
} Kept;

static Kept lay_out(const Sizes *s, float *room) {
    Kept kept = {0};
    float *next = room;
    int64_t numbers = s->dim + 1;
#define KEEP(name, count) kept.name = next, next += (count)
    KEEP(normal, s->slots * s->slot_dim);
    KEEP(inverse, s->slots);
    KEEP(slots, s->slots * s->slot_dim);
    if (s->few) {
        KEEP(keys, s->length * s->key);
        KEEP(mixed, s->length * (s->slot_dim + 1));
        KEEP(values, s->length * s->out);
        KEEP(logits, s->length * padded(s->slots));
    } else {
        KEEP(queries, s->slots * s->key);
        KEEP(sums, s->slots * numbers);
        KEEP(matrix, s->slots * numbers);
    }
    kept.size = next - room;
    return kept;
}

static int64_t spare_numbers(const Sizes *s) {
    return LANES * (s->length + s->dim + s->slots + s->slot_dim + s->key + s->out + 1);
}

static float *take_floats(Scratch *scratch, int64_t count) { return take(scratch, count * 4); }

/* ---- slots --------------------------------------------------------------------------------- */

static void normalize(const Sizes *s, const Tensors *given, float epsilon, Kept *kept) {
    int64_t dim = s->slot_dim;
    for (int64_t j = 0; j < s->slots; j++) {
        float *normal = kept->normal + j * dim, *slot = kept->slots + j * dim, square;
        memcpy(normal, given->base + (given->noise ? 0 : j * dim), dim * sizeof(float));
        for (int64_t l = 0; given->noise && l < dim; l++)
            normal[l] += given->deviation[l] * given->noise[j * dim + l];
        float mean = total_of(normal, dim) / dim;
        for (int64_t l = 0; l < dim; l++) normal[l] -= mean;
        product_turned(normal, dim, normal, dim, 1, dim, 1, NULL, &square, 1);
        float inverse = kept->inverse[j] = 1 / sqrtf(square / dim + epsilon);
        scale_by(inverse, normal, dim);
        for (int64_t l = 0; l < dim; l++) slot[l] = normal[l] * given->norm[l];
        for (int64_t l = 0; given->norm_bias && l < dim; l++) slot[l] += given->norm_bias[l];
    }
}

static void add_scaled(float *sum, const float *row, const float *factors, int64_t count) {
    for (int64_t l = 0; sum && l < count; l++) sum[l] += factors ? row[l] * factors[l] : row[l];
}

/* From the gradients (slots, slot_dim) of the normalized slots, which are overwritten, to those of
 * what they are made of. */
static void normalize_back(const Sizes *s, const Tensors *given, const Kept *kept, float *grads,
                           const Tensors *wanted) {
    int64_t dim = s->slot_dim;
    float *sums[] = {wanted->norm, wanted->norm_bias, wanted->base, wanted->deviation};
    for (int k = 0; k < 4; k++)
        if (sums[k]) memset(sums[k], 0, dim * sizeof(float));
    for (int64_t j = 0; j < s->slots; j++) {
        const float *normal = kept->normal + j * dim;
        float *grad = grads + j * dim, slope;
        add_scaled(wanted->norm, grad, normal, dim);
        add_scaled(wanted->norm_bias, grad, NULL, dim);
        for (int64_t l = 0; l < dim; l++) grad[l] *= given->norm[l];
        float mean = total_of(grad, dim) / dim;
        product_turned(grad, dim, normal, dim, 1, dim, 1, NULL, &slope, 1);
        for (int64_t l = 0; l < dim; l++)
            grad[l] = (grad[l] - mean - normal[l] * (slope / dim)) * kept->inverse[j];
        if (!given->noise) {
            if (wanted->base) memcpy(wanted->base + j * dim, grad, dim * sizeof(float));
            continue;
        }
        add_scaled(wanted->base, grad, NULL, dim);
        add_scaled(wanted->deviation, grad, given->noise + j * dim, dim);
    }
}

/* ---- few elements -------------------------------------------------------------------------- */

static int encode_few(const Sizes *s, const Tensors *given, Kept *kept, float *encoding) {
    int64_t n = s->length, dim = s->dim, slots = s->slots, inner = s->slot_dim, out = s->out;
    int64_t key = s->key;
    int64_t width = padded(slots), mixes = inner + 1;
    float scale = 1 / sqrtf(key);
    Scratch scratch;
    if (!allocate(&scratch, room_of_scores(0, slots) + room_of(n * width * 4) +
                                room_of(slots * 4) + room_of(spare_numbers(s) * 4)))
        return NO_MEMORY;
    float *weights = take_floats(&scratch, n * width), *zeros = take_floats(&scratch, slots);
    float *spare = take_floats(&scratch, spare_numbers(s));
    memset(zeros, 0, slots * sizeof(float));
    Scores scores = make_scores(&scratch, zeros, 0, slots, (int)s->attention);
    product_turned(given->elements, dim, given->key, dim, n, dim, key, given->key_bias, kept->keys,
                   key);
    product_turned(given->elements, dim, given->value, dim, n, dim, out, given->value_bias,
                   kept->values, out);
    product((Left){kept->keys, key, 1}, given->query, inner, n, key, inner, kept->mixed, mixes,
            spare);
    for (int64_t i = 0; i < n; i++) kept->mixed[i * mixes + inner] = 0;
    if (given->query_bias)
        product_turned(kept->keys, key, given->query_bias, key, n, key, 1, NULL,
                       kept->mixed + inner, mixes);
    scale_by(scale, kept->mixed, n * mixes);
    product_turned(kept->mixed, mixes, kept->slots, inner, n, inner, slots, NULL, kept->logits,
                   width);
    for (int64_t i = 0; i < n; i++) {
        float *row = kept->logits + i * width;
        for (int64_t j = 0; j < slots; j++) row[j] += kept->mixed[i * mixes + inner];
        for (int64_t j = slots; j < width; j++) row[j] = -FLT_MAX;
    }
    vec bad = defect(kept->logits, n * width);
    memcpy(weights, kept->logits, n * width * sizeof(float));
    weigh(&scores, weights, n, NULL);
    product((Left){weights, 1, width}, kept->values, out, slots, n, out, encoding, out, spare);
    free(scratch.block);
    return sum_of(bad) == 0 ? DONE : NOT_FINITE;
}

static int few_back(const Sizes *s, const Tensors *given, const Kept *kept, const float *upstream,
                    const Tensors *wanted, float *slots_grad) {
    int64_t n = s->length, dim = s->dim, slots = s->slots, inner = s->slot_dim, out = s->out;
    int64_t key = s->key;
    int64_t width = padded(slots), mixes = inner + 1;
    const float one = 1;
    Scratch scratch;
    if (!allocate(&scratch, room_of_scores(0, slots) + 2 * room_of(n * width * 4) +
                                room_of(n * out * 4) + room_of(n * key * 4) +
                                room_of(n * mixes * 4) + room_of(slots * 4) +
                                room_of(spare_numbers(s) * 4)))
        return NO_MEMORY;
    float *weights = take_floats(&scratch, n * width), *grads = take_floats(&scratch, n * width);
    float *values = take_floats(&scratch, n * out), *keys = take_floats(&scratch, n * key);
    float *mixed = take_floats(&scratch, n * mixes), *zeros = take_floats(&scratch, slots);
    float *spare = take_floats(&scratch, spare_numbers(s));
    memset(zeros, 0, slots * sizeof(float));
    memset(grads, 0, n * width * sizeof(float));
    Scores scores = make_scores(&scratch, zeros, 0, slots, (int)s->attention);
    product_turned(kept->values, out, upstream, out, n, out, slots, NULL, grads, width);
    memcpy(weights, kept->logits, n * width * sizeof(float));
    weigh_back(&scores, weights, grads, n, NULL); /* grads are now those of the logits */
    product((Left){weights, width, 1}, upstream, out, n, slots, out, values, out, spare);
    product((Left){grads, 1, width}, kept->mixed, mixes, slots, n, inner, slots_grad, inner, spare);
    product((Left){grads, width, 1}, kept->slots, inner, n, slots, inner, mixed, mixes, spare);
    product((Left){grads, width, 1}, scores.real, 1, n, slots, 1, mixed + inner, mixes, spare);
    scale_by(1 / sqrtf(key), mixed, n * mixes);
    product_turned(mixed, mixes, given->query, inner, n, inner, key, NULL, keys, key);
    if (given->query_bias)
        add_product((Left){mixed + inner, mixes, 0}, given->query_bias, key, n, 1, key, keys, key,
                    spare);
    if (wanted->query)
        product((Left){kept->keys, 1, key}, mixed, mixes, key, n, inner, wanted->query, inner,
                spare);
    if (wanted->query_bias)
        product((Left){mixed + inner, 0, mixes}, kept->keys, key, 1, n, key, wanted->query_bias,
                key, spare);
    if (wanted->key)
        product((Left){keys, 1, key}, given->elements, dim, key, n, dim, wanted->key, dim, spare);
    if (wanted->key_bias)
        product((Left){&one, 0, 0}, keys, key, 1, n, key, wanted->key_bias, key, spare);
    if (wanted->value)
        product((Left){values, 1, out}, given->elements, dim, out, n, dim, wanted->value, dim,
                spare);
    if (wanted->value_bias)
        product((Left){&one, 0, 0}, values, out, 1, n, out, wanted->value_bias, out, spare);
    if (wanted->elements) {
        product((Left){values, out, 1}, given->value, dim, n, out, dim, wanted->elements, dim,
                spare);
        add_product((Left){keys, key, 1}, given->key, dim, n, key, dim, wanted->elements, dim,
                    spare);
    }
    free(scratch.block);
    return DONE;
}

/* ---- many elements ------------------------------------------------------------------------- */

static int encode_many(const Sizes *s, const Tensors *given, Kept *kept, float *encoding) {
    int64_t dim = s->dim, slots = s->slots, inner = s->slot_dim, out = s->out, numbers = dim + 1;
    int64_t key = s->key;
    Scratch scratch;
    if (!allocate(&scratch, room_of(slots * numbers * 8) + room_of(slots * numbers * 4) +
                                room_of(spare_numbers(s) * 4)))
        return NO_MEMORY;
    double *sums = take(&scratch, slots * numbers * sizeof(double));
    float *folded = take_floats(&scratch, slots * numbers); /* queries [Wk, bk] */
    float *spare = take_floats(&scratch, spare_numbers(s));
    product_turned(kept->slots, inner, given->query, inner, slots, inner, key, given->query_bias,
                   kept->queries, key);
    scale_by(1 / sqrtf(key), kept->queries, slots * key);
    product((Left){kept->queries, key, 1}, given->key, dim, slots, key, dim, folded, numbers,
            spare);
    for (int64_t j = 0; j < slots; j++) folded[j * numbers + dim] = 0;
    if (given->key_bias)
        product_turned(kept->queries, key, given->key_bias, key, slots, key, 1, NULL, folded + dim,
                       numbers);
    transpose(folded, numbers, slots, numbers, kept->matrix);
    int result = JOIN(setfold_sums, ISA)(given->elements, 0, NULL, 0, 1, s->length, dim,
                                         kept->matrix, slots, (int)s->attention, sums);
    for (int64_t i = 0; i < slots * numbers; i++) kept->sums[i] = (float)sums[i];
    product_turned(kept->sums, numbers, given->value, dim, slots, dim, out, NULL, encoding, out);
    if (given->value_bias)
        add_product((Left){kept->sums + dim, numbers, 0}, given->value_bias, out, slots, 1, out,
                    encoding, out, spare);
    free(scratch.block);
    return result;
}

static int many_back(const Sizes *s, const Tensors *given, const Kept *kept, const float *upstream,
                     const Tensors *wanted, float *slots_grad) {
    int64_t dim = s->dim, slots = s->slots, inner = s->slot_dim, out = s->out, numbers = dim + 1;
    int64_t key = s->key;
    const float one = 1;
    Scratch scratch;
    if (!allocate(&scratch, room_of(slots * numbers * 8) + 3 * room_of(slots * numbers * 4) +
                                room_of(slots * key * 4) + room_of(spare_numbers(s) * 4)))
        return NO_MEMORY;
    double *exact = take(&scratch, slots * numbers * sizeof(double));
    float *matrix = take_floats(&scratch, slots * numbers);
    float *sums = take_floats(&scratch, slots * numbers);
    float *folded = take_floats(&scratch, slots * numbers);
    float *queries = take_floats(&scratch, slots * key);
    float *spare = take_floats(&scratch, spare_numbers(s));
    product((Left){upstream, out, 1}, given->value, dim, slots, out, dim, sums, numbers, spare);
    for (int64_t j = 0; j < slots; j++) sums[j * numbers + dim] = 0;
    if (given->value_bias)
        product_turned(upstream, out, given->value_bias, out, slots, out, 1, NULL, sums + dim,
                       numbers);
    if (wanted->value)
        product((Left){upstream, 1, out}, kept->sums, numbers, out, slots, dim, wanted->value, dim,
                spare);
    if (wanted->value_bias)
        product((Left){kept->sums + dim, 0, numbers}, upstream, out, 1, slots, out,
                wanted->value_bias, out, spare);
    int result = JOIN(setfold_gradients, ISA)(given->elements, 0, NULL, 0, 1, s->length, dim,
                                              kept->matrix, slots, (int)s->attention, NULL, sums,
                                              exact, wanted->elements, s->length * dim);
    for (int64_t i = 0; i < slots * numbers; i++) matrix[i] = (float)exact[i];
    transpose(matrix, slots, numbers, slots, folded);
    if (wanted->key)
        product((Left){kept->queries, 1, key}, folded, numbers, key, slots, dim, wanted->key, dim,
                spare);
    if (wanted->key_bias)
        product((Left){folded + dim, 0, numbers}, kept->queries, key, 1, slots, key,
                wanted->key_bias, key, spare);
    product_turned(folded, numbers, given->key, dim, slots, dim, key, NULL, queries, key);
    if (given->key_bias)
        add_product((Left){folded + dim, numbers, 0}, given->key_bias, key, slots, 1, key, queries,
                    key, spare);
    scale_by(1 / sqrtf(key), queries, slots * key);
    if (wanted->query)
        product((Left){queries, 1, key}, kept->slots, inner, key, slots, inner, wanted->query,
                inner, spare);
    if (wanted->query_bias)
        product((Left){&one, 0, 0}, queries, key, 1, slots, key, wanted->query_bias, key, spare);
    product((Left){queries, key, 1}, given->query, inner, slots, key, inner, slots_grad, inner,
            spare);
    free(scratch.block);
    return result;
}

/* ---- kernels ------------------------------------------------------------------------------- */

/* Write the encoding (slots, out), and to `room` (size) what the backward pass needs. */
KERNEL(setfold_encode_slots)
(const Sizes *s, const Tensors *given, float epsilon, float *room, int64_t size, float *encoding) {
    Kept kept = lay_out(s, room);
    int64_t count = s->slots * s->out;
    if (kept.size > size) return NO_MEMORY;
    normalize(s, given, epsilon, &kept);
    int result = s->few ? encode_few(s, given, &kept, encoding)
                                      : encode_many(s, given, &kept, encoding);
    if (result != DONE) return result;
    for (int64_t i = 0; i < count; i++) encoding[i] /= s->divisor;
    return defect_of(encoding, count) == 0 ? DONE : NOT_FINITE;
}

/* The gradients of `setfold_encode_slots` from dL/dencoding (slots, out) and its `room`. */
KERNEL(setfold_encode_slots_back)
(const Sizes *s, const Tensors *given, float *room, const float *upstream, const Tensors *wanted) {
    Kept kept = lay_out(s, room);
    int64_t count = s->slots * s->out;
    Scratch scratch;
    if (!allocate(&scratch, room_of(count * 4) + room_of(s->slots * s->slot_dim * 4)))
        return NO_MEMORY;
    float *scaled = take_floats(&scratch, count);
    float *slots_grad = take_floats(&scratch, s->slots * s->slot_dim);
    for (int64_t i = 0; i < count; i++) scaled[i] = upstream[i] / s->divisor;
    int result = s->few ? few_back(s, given, &kept, scaled, wanted, slots_grad)
                                      : many_back(s, given, &kept, scaled, wanted, slots_grad);
    if (result == DONE) normalize_back(s, given, &kept, slots_grad, wanted);
    free(scratch.block);
    return result;
}
