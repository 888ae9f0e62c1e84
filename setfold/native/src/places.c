/* Attention by distance on a regular grid: an element meets only the slots in a window around it.
 *
 * w_ij = exp(-|offset|^2 / 2) if |offset| <= reach, else 0, with offset = (position - node) /
 * width. Offsets, squares and windows are rounded exactly as by setfold/kernels/places.py, so that
 * both agree on which slots an element touches. */

#include "attention.h"

/* What is weighted, as in places.py. */
enum { FEATURES = 0, OFFSETS = 1, SQUARES = 2 };

/* The grid, the window and the values, from the caller. Nodes are whole numbers from 0 on. */
typedef struct {
    int64_t axes, features, kinds;
    const int64_t *shape, *windows; /* (axes) */
    const int64_t *kind;            /* (kinds): what is weighted, in order */
    float radius, width, limit;     /* limit: the largest |offset|^2 that is within reach */
    int32_t normalized;             /* whether the weights of an element sum to 1 */
} Places;

/* Elements, from the caller: positions (sets, length, axes), features (sets, length, features), and
 * a byte for each element that is shown, or NULL; with steps from set to set and from row to row.
 */
typedef struct {
    const float *positions, *features;
    const uint8_t *shown;
    int64_t sets, length, step, features_step, row_step, shown_step;
} Elements;

/* LANES elements, one for each lane, and the slots that each meets, `pairs` of them. */
typedef struct {
    int64_t pairs, longest; /* longest: of the windows of all axes */
    float *places;          /* (axes, LANES): positions */
    float *offsets;         /* (axes, longest, LANES) */
    float *squares;         /* (axes, longest, LANES) */
    float *part, *weights;  /* (pairs, LANES) */
    int64_t *slots;         /* (pairs): relative to the first one of an element */
    int32_t *coordinates;   /* (pairs, axes): rows of `offsets` */
    int64_t first[LANES];   /* the first slot of each element */
} Window;

HELPER int64_t pairs_of(const Places *places) {
    int64_t pairs = 1;
    for (int64_t a = 0; a < places->axes; a++) pairs *= places->windows[a];
    return pairs;
}

HELPER int64_t longest_of(const Places *places) {
    int64_t longest = 0;
    for (int64_t a = 0; a < places->axes; a++)
        if (places->windows[a] > longest) longest = places->windows[a];
    return longest;
}

HELPER int64_t room_of_window(const Places *places) {
    int64_t pairs = pairs_of(places), axes = places->axes;
    return room_of((2 * longest_of(places) + 1) * axes * LANES * 4) +
           room_of(2 * pairs * LANES * 4) + room_of(pairs * 8) + room_of(pairs * axes * 4);
}

static Window make_window(Scratch *scratch, const Places *places) {
    int64_t axes = places->axes, pairs = pairs_of(places), longest = longest_of(places);
    Window window = {.pairs = pairs, .longest = longest};
    window.places = take(scratch, (2 * longest + 1) * axes * LANES * sizeof(float));
    memset(window.places, 0, axes * LANES * sizeof(float));
    window.offsets = window.places + axes * LANES;
    window.squares = window.offsets + axes * longest * LANES;
    window.part = take(scratch, 2 * pairs * LANES * sizeof(float));
    window.weights = window.part + pairs * LANES;
    window.slots = take(scratch, pairs * sizeof(int64_t));
    window.coordinates = take(scratch, pairs * axes * sizeof(int32_t));
    for (int64_t m = 0; m < pairs; m++) {
        int64_t rest = m, slot = 0, step = 1;
        for (int64_t a = axes - 1; a >= 0; a--) {
            int64_t i = rest % places->windows[a];
            rest /= places->windows[a];
            slot += i * step;
            step *= places->shape[a];
            window.coordinates[m * axes + a] = (int32_t)(a * longest + i);
        }
        window.slots[m] = slot;
    }
    return window;
}

/* Offsets and their squares on all axes, and the first slots. It is a function of its own, so that
 * no compiler merges a square with the sum of squares, which would round differently. */
static __attribute__((noinline)) void measure(const Places *places, Window *window) {
    memset(window->first, 0, sizeof(window->first));
    for (int64_t a = 0; a < places->axes; a++) {
        float *x = window->places + a * LANES, first[LANES];
        float last = (float)(places->shape[a] - places->windows[a]);
        for (int lane = 0; lane < LANES; lane++) {
            float from = x[lane] - places->radius;
            from = from < 0 ? 0 : from > last ? last : from;
            int64_t node = (int64_t)from;
            node += (float)node < from; /* rounded up */
            first[lane] = (float)node;
            window->first[lane] = window->first[lane] * places->shape[a] + node;
        }
        for (int64_t i = 0; i < places->windows[a]; i++) {
            int64_t at = (a * window->longest + i) * LANES;
            vec offset = (load(x) - (load(first) + (float)i)) / places->width;
            store(window->offsets + at, offset);
            store(window->squares + at, offset * offset);
        }
    }
}

/* to[i, j] = a[i] + b[j], each a vector. */
HELPER void add_outer(const float *a, int64_t rows, const float *b, int64_t columns, float *to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            store(to + (i * columns + j) * LANES, load(a + i * LANES) + load(b + j * LANES));
}

/* The weights of the elements for the slots of their windows. */
static void meet(const Places *places, Window *window) {
    measure(places, window);
    int64_t axes = places->axes, pairs = window->pairs, rest = 1;
    float *part = window->part, *next = window->weights;
    store(part, spread(0));
    for (int64_t a = 1; a < axes; a++) { /* the sums of all axes but the first */
        const float *squares = window->squares + a * window->longest * LANES;
        add_outer(part, rest, squares, places->windows[a], next);
        rest *= places->windows[a];
        float *spare = part;
        part = next;
        next = spare;
    }
    add_outer(window->squares, places->windows[0], part, rest, next);
    vec total = spread(0);
    for (int64_t m = 0; m < pairs; m++) {
        vec squares = load(next + m * LANES);
        ivec near = squares <= places->limit;
        vec weights = (vec)((ivec)exponential(-0.5f * squares) & near);
        store(window->weights + m * LANES, weights);
        total += weights;
    }
    if (!places->normalized) return;
    vec factor = (vec)((ivec)(1.0f / total) & (total > 0)); /* there may be no slot within reach */
    for (int64_t m = 0; m < pairs; m++)
        store(window->weights + m * LANES, load(window->weights + m * LANES) * factor);
}

/* One call: what is added up, and where. */
typedef struct Task Task;
struct Task {
    void (*add)(Task *task, const float *features, int lane, int64_t set); /* an element */
    const Places *places;
    int64_t slots, width; /* width: channels of values */
    int squared, moving;  /* moving: whether values depend on the slot */
    float sign;
    double *sums;
    float *best;
    Window window;
    double *channels; /* values of one element, their squares if `squared`, and 1 */
};

HELPER int64_t numbers_of(const Task *task) { return task->width * (task->squared ? 2 : 1) + 1; }

HELPER void set_channel(Task *task, int64_t channel, double value) {
    task->channels[channel] = value;
    if (task->squared) task->channels[task->width + channel] = value * value;
}

/* Fill the channels that do not depend on the slot. */
static void fill_fixed(Task *task, const float *features) {
    int64_t at = 0;
    for (int64_t k = 0; k < task->places->kinds; k++) {
        int fixed = task->places->kind[k] == FEATURES;
        int64_t count = fixed ? task->places->features : task->places->axes;
        for (int64_t c = 0; fixed && c < count; c++) set_channel(task, at + c, features[c]);
        at += count;
    }
    task->channels[numbers_of(task) - 1] = 1;
}

/* Fill the other channels. */
static void fill_moving(Task *task, int64_t pair, int lane) {
    int64_t axes = task->places->axes, at = 0;
    const int32_t *coordinates = task->window.coordinates + pair * axes;
    for (int64_t k = 0; k < task->places->kinds; k++) {
        int64_t kind = task->places->kind[k];
        if (kind == FEATURES) {
            at += task->places->features;
            continue;
        }
        for (int64_t a = 0; a < axes; a++) {
            float offset = task->window.offsets[(int64_t)coordinates[a] * LANES + lane];
            set_channel(task, at++, kind == OFFSETS ? offset : offset * offset - 1.0f);
        }
    }
}

/* to[slot] += weight * channels for the slots of an element. */
INLINE void add_channels(const int64_t count, const Window *window, int lane,
                         const double *channels, double *to) {
    for (int64_t m = 0; m < window->pairs; m++) {
        double weight = window->weights[m * LANES + lane], *slot = to + window->slots[m] * count;
        for (int64_t c = 0; c < count; c++) slot[c] += weight * channels[c];
    }
}

static void add_to_sums(Task *task, const float *features, int lane, int64_t set) {
    const Window *window = &task->window;
    int64_t numbers = numbers_of(task);
    double *to = task->sums + (set * task->slots + window->first[lane]) * numbers;
    fill_fixed(task, features);
    if (task->moving) {
        for (int64_t m = 0; m < window->pairs; m++) {
            double weight = window->weights[m * LANES + lane];
            if (weight == 0) continue;
            fill_moving(task, m, lane);
            double *slot = to + window->slots[m] * numbers;
            for (int64_t c = 0; c < numbers; c++) slot[c] += weight * task->channels[c];
        }
        return;
    }
    switch (numbers) {
    case 2:
        add_channels(2, window, lane, task->channels, to);
        break;
    case 3:
        add_channels(3, window, lane, task->channels, to);
        break;
    case 4:
        add_channels(4, window, lane, task->channels, to);
        break;
    default:
        add_channels(numbers, window, lane, task->channels, to);
    }
}

static void raise_best(Task *task, const float *features, int lane, int64_t set) {
    const Window *window = &task->window;
    float sign = task->sign;
    float *to = task->best + (set * task->slots + window->first[lane]) * task->width;
    fill_fixed(task, features);
    for (int64_t m = 0; m < window->pairs; m++) {
        float weight = window->weights[m * LANES + lane],
              *slot = to + window->slots[m] * task->width;
        if (task->moving) fill_moving(task, m, lane);
        for (int64_t c = 0; c < task->width; c++) {
            float value = sign * (float)(weight * task->channels[c]), best = sign * slot[c];
            slot[c] = sign * ((weight > 0) & (value > best) ? value : best);
        }
    }
}

HELPER int is_finite(const float *numbers, int64_t count) {
    float defect = 0;
    for (int64_t i = 0; i < count; i++) defect += numbers[i] * 0.0f;
    return defect == 0;
}

/* Add the elements of one set that are shown; 0 is returned if a number of them is not finite. */
static int add_set(Task *task, const Elements *elements, int64_t set) {
    const Places *places = task->places;
    const float *position = elements->positions + set * elements->step;
    const float *features = elements->features + set * elements->features_step, *waiting[LANES];
    const uint8_t *shown = elements->shown ? elements->shown + set * elements->shown_step : NULL;
    int count = 0;
    for (int64_t i = 0; i < elements->length; i++) {
        const float *p = position + i * places->axes, *x = features + i * elements->row_step;
        if (!shown || shown[i]) {
            if (!is_finite(p, places->axes) || !is_finite(x, places->features)) return 0;
            for (int64_t a = 0; a < places->axes; a++)
                task->window.places[a * LANES + count] = p[a];
            waiting[count++] = x;
        }
        if (count == LANES || (count && i + 1 == elements->length)) {
            meet(places, &task->window);
            for (int lane = 0; lane < count; lane++) task->add(task, waiting[lane], lane, set);
            count = 0;
        }
    }
    return 1;
}

static int run(Task *task, const Elements *elements) {
    const Places *places = task->places;
    task->slots = 1;
    for (int64_t a = 0; a < places->axes; a++) task->slots *= places->shape[a];
    for (int64_t k = 0; k < places->kinds; k++) {
        task->width += places->kind[k] == FEATURES ? places->features : places->axes;
        task->moving |= places->kind[k] != FEATURES;
    }
    Scratch scratch;
    if (!allocate(&scratch, room_of_window(places) + room_of(numbers_of(task) * 8)))
        return NO_MEMORY;
    task->window = make_window(&scratch, places);
    task->channels = take(&scratch, numbers_of(task) * sizeof(double));
    int finite = 1;
    for (int64_t set = 0; set < elements->sets && finite; set++)
        finite = add_set(task, elements, set);
    free(scratch.block);
    return finite ? DONE : NOT_FINITE;
}

/* Sum weighted values, slot by slot: sums (sets, slots, channels) is added to. The channels are
 * those of all kinds of values, their squares if `squared`, and 1. Returns NOT_FINITE if a number
 * that is shown is not finite. */
KERNEL(setfold_placed_sums)
(const Elements *elements, const Places *places, int squared, double *sums) {
    Task task = {.add = add_to_sums, .places = places, .squared = squared, .sums = sums};
    return run(&task, elements);
}

/* Raise (sign 1) or lower (sign -1) best (sets, slots, channels) to the largest or smallest
 * weighted values of the elements within reach. Returns NOT_FINITE like `setfold_placed_sums`. */
KERNEL(setfold_placed_extrema)
(const Elements *elements, const Places *places, float sign, float *best) {
    Task task = {.add = raise_best, .places = places, .sign = sign, .best = best};
    return run(&task, elements);
}
