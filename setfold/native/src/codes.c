/* Ids of sets become numbers 0, 1, 2, ..., in the order in which they appear first. */

#include <stdint.h>
#include <stdlib.h>

#include "attention.h"
#include "export.h"

#define FIRST_BITS 12

/* A hash table of ids, at most half full: places hold a code, or -1. */
typedef struct {
    int bits;
    int64_t *places;
} Index;

INLINE uint64_t place_of(int64_t id, int bits) {
    return (uint64_t)id * 0x9E3779B97F4A7C15u >> (64 - bits);
}

/* Make the table larger, and enter the ids that are known. */
static int grow(Index *index, int bits, const int64_t *ids, int64_t known) {
    int64_t size = (int64_t)1 << bits, *places = malloc(size * sizeof(int64_t));
    if (!places) return 0;
    for (int64_t i = 0; i < size; i++) places[i] = -1;
    for (int64_t code = 0; code < known; code++) {
        uint64_t place = place_of(ids[code], bits);
        while (places[place] >= 0) place = (place + 1) & (size - 1);
        places[place] = code;
    }
    free(index->places);
    *index = (Index){bits, places};
    return 1;
}

/* ids (rows); distinct (rows) receives the distinct ids, `known` their number, codes (rows) the
 * place of each id among them. */
KERNEL(setfold_encode_ids)(const int64_t *ids, int64_t rows, int64_t *distinct, int64_t *known,
                           int64_t *codes) {
    Index index = {0, NULL};
    int64_t found = 0, limit = 0;
    for (int64_t i = 0; i < rows; i++) {
        if (found == limit) {
            int bits = index.bits ? index.bits + 2 : FIRST_BITS;
            if (!grow(&index, bits, distinct, found)) {
                free(index.places);
                return NO_MEMORY;
            }
            limit = (int64_t)1 << (bits - 1);
        }
        uint64_t place = place_of(ids[i], index.bits), last = ((uint64_t)1 << index.bits) - 1;
        int64_t code;
        while ((code = index.places[place]) >= 0 && distinct[code] != ids[i])
            place = (place + 1) & last;
        if (code < 0) {
            code = index.places[place] = found;
            distinct[found++] = ids[i];
        }
        codes[i] = code;
    }
    free(index.places);
    *known = found;
    return DONE;
}

/* The order in which the rows of each set follow one another: codes (rows), from 0 to sets - 1, are
 * sorted; places (rows) receives where each row is then. */
KERNEL(setfold_group)(int64_t *codes, int64_t rows, int64_t sets, int64_t *places) {
    int64_t *ends = calloc(sets + 1, sizeof(int64_t));
    if (!ends) return NO_MEMORY;
    for (int64_t i = 0; i < rows; i++) ends[codes[i] + 1]++;
    for (int64_t set = 0; set < sets; set++) ends[set + 1] += ends[set]; /* where each begins */
    for (int64_t i = 0; i < rows; i++) places[i] = ends[codes[i]]++;
    for (int64_t set = 0, i = 0; set < sets; set++)
        while (i < ends[set]) codes[i++] = set;
    free(ends);
    return DONE;
}
