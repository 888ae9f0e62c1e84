"""Pure tensor functions for the hot paths: no modules, no states, no validation.

    scores.py    elements -> logits over slots -> weights over slots
    norms.py     layer normalization of numbers of any size
    modes.py     precision of totals, autocast, compilers, function transforms
    tiles.py     how a batch of sets is split into cache-sized tiles
    sums.py      sum_i W_ij x_i and sum_i W_ij, forward and backward in constant memory
    softmax.py   sum_i exp(l_ij - m_j) [x_i, 1]: numerator and denominator of a softmax
    extrema.py   max_i W_ij v_i, with gradients of the elements that attain the maximum
    attention.py softmax(Q K^T) V among whole sets, with logits of any size
    replay.py    any sum over tiles in constant memory; the backward pass recomputes each tile
    ragged.py    sets of different lengths as a few dense batches

Shapes: B sets, n elements, d features, K slots, r rows in a tile.
"""
