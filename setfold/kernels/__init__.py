"""Pure tensor functions for the hot paths: no modules, no states, no validation.

    scores.py    elements -> logits over slots -> weights over slots
    precision.py the precision of running totals, whatever autocast says
    tiles.py     how a batch of sets is cut into cache-sized pieces
    sums.py      sum_i W_ij x_i and sum_i W_ij, forward and backward in constant memory
    softmax.py   sum_i exp(l_ij - m_j) [x_i, 1]: a softmax over elements, before it is divided
    extrema.py   max_i W_ij v_i, with gradients through the winning elements only
    replay.py    the same memory bound for any tile function, by autograd tile by tile
    ragged.py    sets of different lengths as a few dense batches

Shapes: B sets, n elements, d features, K slots, r rows in a tile.
"""
