/* Numbers of sets. */

#ifndef SETFOLD_INDEX_H
#define SETFOLD_INDEX_H

#include "vector.h"

/* Whether all indices are from 0 to sets - 1. */
HELPER int in_range(const int64_t *index, int64_t rows, int64_t sets) {
    int found = 1;
    for (int64_t i = 0; i < rows; i++) found &= (uint64_t)index[i] < (uint64_t)sets;
    return found;
}

#endif
