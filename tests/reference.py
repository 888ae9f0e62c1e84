"""The algorithms as plain loops over numbers, in float64: slow, obvious, and nobody's relative."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

import setfold


def _array(tensor):
    if tensor is None or isinstance(tensor, np.ndarray):
        return tensor
    return tensor.detach().double().numpy()


def _layer_norm(row, weight=None, bias=None, epsilon=1e-5):
    mean = sum(row) / len(row)
    variance = sum((value - mean) ** 2 for value in row) / len(row)
    normal = [(value - mean) / math.sqrt(variance + epsilon) for value in row]
    if weight is None:
        return np.array(normal)
    return np.array([n * w + b for n, w, b in zip(normal, weight, bias, strict=True)])


def _linear(row, layer: nn.Linear):
    weight, bias = _array(layer.weight), _array(layer.bias)
    out = np.zeros(len(weight))
    for o in range(len(weight)):
        for i in range(len(row)):
            out[o] += weight[o, i] * row[i]
        if bias is not None:
            out[o] += bias[o]
    return out


def _logits(encoder, element, slots):
    """One element's logit for each slot."""
    key = _linear(element, encoder.to_key)
    found = []
    for slot in slots:
        normal = _layer_norm(slot, _array(encoder.norm.weight), _array(encoder.norm.bias))
        query = _linear(normal, encoder.to_query)
        if encoder.similarity == "cosine":
            unit = query / math.sqrt(sum(q * q for q in query))
            cosine = sum(_layer_norm(key) * unit) / math.sqrt(len(unit))
            bias = _linear(normal, encoder.to_bias)[0]
            found.append(float(encoder.temperature.detach()) * cosine + bias)
        else:
            found.append(
                sum(k * q for k, q in zip(key, query, strict=True)) / math.sqrt(len(query))
            )
    return found


def _softmax(logits):
    top = max(logits)
    raw = [math.exp(logit - top) for logit in logits]
    return [r / sum(raw) for r in raw]


def _weights(logits, attention):
    if attention == "softmax":
        return _softmax(logits)
    raw = [1 / (1 + math.exp(-logit)) + 1e-8 for logit in logits]
    return [r / sum(raw) for r in raw]


def slot_set(encoder: setfold.SlotSetEncoder, elements, slots):
    """(n, d) elements and (K, h) slots to (K, dim_readout): the paper's algorithm and ours."""
    elements, slots = _array(elements), _array(slots)
    num_slots, dim = len(slots), encoder.dim_out
    names = [a.name for a in encoder.aggregates]
    if len(elements) == 0:
        return np.zeros((num_slots, encoder.dim_readout))
    contributions = np.zeros((len(elements), num_slots, dim))
    weights = np.zeros((len(elements), num_slots))
    for i, element in enumerate(elements):
        weights[i] = _weights(_logits(encoder, element, slots), encoder.attention)
        value = _linear(element, encoder.to_value)
        for j in range(num_slots):
            contributions[i, j] = weights[i, j] * value
    readings = {
        "sum": contributions.sum(0),
        "mean": contributions.sum(0) / len(elements),
        "weighted_mean": contributions.sum(0) / weights.sum(0)[:, None],
        "mass": weights.sum(0)[:, None] / len(elements),
        "max": contributions.max(0),
        "min": contributions.min(0),
    }
    return np.concatenate([readings[name] for name in names], axis=-1)


def pool(elements, aggregates):
    """(n, d) elements to (d * number of aggregates,)."""
    elements = _array(elements)
    if len(elements) == 0:
        return np.zeros(elements.shape[1] * len(aggregates))
    readings = {
        "sum": [sum(column) for column in elements.T],
        "mean": [sum(column) / len(column) for column in elements.T],
        "max": [max(column) for column in elements.T],
        "min": [min(column) for column in elements.T],
    }
    return np.concatenate([readings[name] for name in aggregates])


# ---- attention over elements ---------------------------------------------------------------


def _attended(query, keys, values, num_heads):
    """What one query (e,) sees of keys and values (n, e), the heads side by side."""
    width, found = len(query) // num_heads, []
    for first in range(0, len(query), width):
        places = range(first, first + width)
        logits = [sum(query[p] * key[p] for p in places) / math.sqrt(width) for key in keys]
        weights = _softmax(logits)
        found += [
            sum(w * value[p] for w, value in zip(weights, values, strict=True)) for p in places
        ]
    return np.array(found)


def attention_pool(encoder: setfold.AttentionPool, elements):
    """(n, d) elements to (K, dim_out)."""
    keys, values = (
        [_linear(element, layer) for element in _array(elements)]
        for layer in (encoder.to_key, encoder.to_value)
    )
    queries = _array(encoder.queries)
    return np.array([_attended(query, keys, values, encoder.num_heads) for query in queries])


def gated_attention_pool(encoder: setfold.GatedAttentionPool, elements):
    """(n, d) elements to (K, d)."""
    elements, logits = _array(elements), []
    for element in elements:
        hidden = [math.tanh(value) for value in _linear(element, encoder.to_hidden)]
        if encoder.gated:
            gate = [1 / (1 + math.exp(-value)) for value in _linear(element, encoder.to_gate)]
            hidden = [h * g for h, g in zip(hidden, gate, strict=True)]
        logits.append(_linear(hidden, encoder.to_logit))
    found = np.zeros((encoder.num_branches, elements.shape[1]))
    for branch in range(encoder.num_branches):
        weights = _softmax([logit[branch] for logit in logits])
        for weight, element in zip(weights, elements, strict=True):
            found[branch] += weight * element
    return found


# ---- the Set Transformer -------------------------------------------------------------------


def _normed(row, layer):
    if isinstance(layer, nn.Identity):
        return row
    return _layer_norm(row, _array(layer.weight), _array(layer.bias), layer.eps)


def _relu(row):
    return np.array([max(value, 0.0) for value in row])


def mab(block: setfold.MAB, queries, elements):
    """(m, d) queries that look at (n, d) elements, arrays both, to (m, d)."""
    keys, values = (
        [_linear(element, layer) for element in elements]
        for layer in (block.to_key, block.to_value)
    )
    found = []
    for query in queries:
        seen = _attended(_linear(query, block.to_query), keys, values, block.num_heads)
        hidden = _normed(query + _linear(seen, block.to_out), block.norm)
        found.append(_normed(hidden + _relu(_linear(hidden, block.feed)), block.last_norm))
    return np.array(found)


def sab(layer: setfold.SAB, elements):
    """(n, d) elements to (n, d)."""
    return mab(layer.block, _array(elements), _array(elements))


def seed_attention(encoder: setfold.SeedAttention, elements):
    """(n, d) elements to (K, d)."""
    return mab(encoder.block, _array(encoder.seeds), _array(elements))


def isab(layer: setfold.ISAB, elements):
    """(n, d) elements to (n, d)."""
    return mab(layer.look, _array(elements), seed_attention(layer.pool, elements))


def pma(encoder: setfold.PMA, elements):
    """(n, d) elements to (K, d)."""
    made = [_relu(_linear(element, encoder.features[0])) for element in _array(elements)]
    return seed_attention(encoder.encoder, np.array(made))


def set_transformer(encoder: setfold.SetTransformer | setfold.FullSetTransformer, elements):
    """(n, d) elements to (K, dim)."""
    elements = np.array([_linear(element, encoder.features) for element in _array(elements)])
    for layer in encoder.layers:
        elements = (isab if isinstance(layer, setfold.ISAB) else sab)(layer, elements)
    if encoder.num_decoder_layers == 0:
        return pma(encoder.pool, elements)
    found = pma(encoder.pool.encoder, elements)
    for layer in encoder.pool.head:
        found = sab(layer, found)
    return found


def constant_memory(encoder: setfold.ConstantMemoryEncoder, elements):
    """(n, d) elements to (K, dim), block by block."""
    linear, norm = encoder.features
    elements = np.array([_normed(_linear(element, linear), norm) for element in _array(elements)])
    latents, pools = _array(encoder.head.latents), encoder.encoder.encoders.values()
    for pool, update in zip(pools, encoder.head.updates, strict=True):
        seen = sab(update.among_block, seed_attention(pool, elements))
        latents = sab(update.among_latents, mab(update.across, latents, seen))
    return latents


# ---- layers that subtract what the set is --------------------------------------------------


def equivariant(layer: setfold.EquivariantLayer, elements):
    """(n, d) elements to (n, dim_out), with a Tanh."""
    elements, look = _array(elements), layer.look
    pooled = pool(elements, [layer.subtract])
    found = []
    for element in elements:
        if layer.shared:
            row = _linear(element - pooled, look.of_element)
        else:
            row = _linear(element, look.of_element) - _linear(pooled, look.of_set)
        found.append([math.tanh(value) for value in row])
    return np.array(found)


def equivariant_deep_sets(encoder: setfold.EquivariantDeepSets, elements):
    """(n, d) elements to (dims[-1] * number of aggregates,)."""
    for layer in encoder.layers:
        elements = equivariant(layer, elements)
    return pool(elements, [a.name for a in encoder.pool.aggregates])


def moments(elements):
    """(n, d) elements to (2, d): the mean and the variance of each feature."""
    elements = _array(elements)
    means = [math.fsum(column) / len(column) for column in elements.T]
    variances = [
        math.fsum((value - mean) ** 2 for value in column) / len(column)
        for column, mean in zip(elements.T, means, strict=True)
    ]
    return np.array([means, variances])


def covariance(elements):
    """(n, d) elements to (1 + d, d): the mean, and the covariance of each pair of features."""
    elements = _array(elements)
    mean = moments(elements)[0]
    centred = elements - mean
    pairs = [[math.fsum(one * other) / len(elements) for other in centred.T] for one in centred.T]
    return np.array([mean, *pairs])


def summary_statistics(elements):
    """(n, d) elements to (1 + 4 d,): log(1 + n), mean, standard deviation, minimum and maximum."""
    elements = _array(elements)
    mean, variance = moments(elements)
    ends = [[pick(column.tolist()) for column in elements.T] for pick in (min, max)]
    return np.array([math.log1p(len(elements)), *mean, *np.sqrt(variance), *ends[0], *ends[1]])


def set_norm(layer: setfold.SetNorm, elements):
    """(n, d) elements to (n, d)."""
    elements = _array(elements)
    if layer.over == "feature":
        means, variances = moments(elements)
    else:  # every number of the set is one observation
        (mean,), (variance,) = moments(elements.reshape(-1, 1))
        means, variances = [mean] * layer.dim, [variance] * layer.dim
    weight, bias = _array(layer.look.weight), _array(layer.look.bias)
    found = np.zeros_like(elements)
    for i, element in enumerate(elements):
        for c, value in enumerate(element):
            normal = (value - means[c]) / math.sqrt(variances[c] + layer.epsilon)
            found[i, c] = normal * weight[c] + bias[c]
    return found


# ---- Slot Attention ------------------------------------------------------------------------


def _gru(cell: nn.GRUCell, row, state):
    """One step of a gated recurrent unit, number by number."""
    size = len(state)
    seen, kept = (
        [
            bias[o] + sum(weight[o, i] * value for i, value in enumerate(values))
            for o in range(3 * size)
        ]
        for weight, bias, values in (
            (_array(cell.weight_ih), _array(cell.bias_ih), row),
            (_array(cell.weight_hh), _array(cell.bias_hh), state),
        )
    )
    found = np.zeros(size)
    for o in range(size):
        reset = 1 / (1 + math.exp(-seen[o] - kept[o]))
        keep = 1 / (1 + math.exp(-seen[size + o] - kept[size + o]))
        new = math.tanh(seen[2 * size + o] + reset * kept[2 * size + o])
        found[o] = (1 - keep) * new + keep * state[o]
    return found


def slot_attention(encoder: setfold.SlotAttention, elements, slots):
    """(n, d) elements and (K, h) slots to (K, h), with epsilon added to every weight."""
    slots, attention = _array(slots), encoder.attention
    elements = [_normed(element, encoder.norm_input) for element in _array(elements)]
    values = [_linear(element, attention.to_value) for element in elements]
    for _ in range(encoder.num_iterations):
        weights = [_softmax(_logits(attention, element, slots)) for element in elements]
        refined = []
        for j, slot in enumerate(slots):
            own = [row[j] + 1e-8 for row in weights]
            update = sum(w * value for w, value in zip(own, values, strict=True)) / sum(own)
            state = _gru(encoder.gru, update, slot)
            hidden = _relu(_linear(_normed(state, encoder.norm_hidden), encoder.mlp[0]))
            refined.append(state + _linear(hidden, encoder.mlp[2]))
        slots = np.array(refined)
    return slots


# ---- the wrong ways ------------------------------------------------------------------------


def chunk_average(encode, elements, chunk_size):
    """(n, d) elements to whatever `encode` makes of chunks of them, averaged element by element."""
    elements, found = _array(elements), 0
    for first in range(0, len(elements), chunk_size):
        chunk = elements[first : first + chunk_size]
        found = found + len(chunk) * np.asarray(encode(chunk))
    return found / len(elements)


def published_slot_set(encoder: setfold.SlotSetEncoder, aggregate, elements, chunks_slots, size):
    """(n, d) elements to (K, dim_out): the sums of chunks, each with its slots, aggregated."""
    elements, sums = _array(elements), []
    for first, slots in zip(range(0, len(elements), size), chunks_slots, strict=False):
        slots = _array(slots)
        total = np.zeros((len(slots), encoder.dim_out))
        for element in elements[first : first + size]:
            weights = _weights(_logits(encoder, element, slots), encoder.attention)
            value = _linear(element, encoder.to_value)
            for j, weight in enumerate(weights):
                total[j] += weight * value
        sums.append(total)
    return pool(np.array(sums).reshape(len(sums), -1), [aggregate]).reshape(sums[0].shape)


def placed_slots(encoder: setfold.PlacedSlotEncoder, elements):
    """(n, d) elements to (K, dim_readout): slots that have places, pair by pair."""
    elements, places = _array(elements), encoder.places
    if isinstance(places, setfold.Grid):
        cells = [(b - a) / n for a, b, n in zip(places.low, places.high, places.shape, strict=True)]
        points, low, high = [], places.low, places.high
        for index in np.ndindex(*places.shape):
            points.append([a + (i + 0.5) * c for i, a, c in zip(index, low, cells, strict=True)])
        if places.shift is not None:
            for point, shift in zip(points, _array(places.shift), strict=True):
                for axis, cell in enumerate(cells):
                    point[axis] += shift[axis] * cell
    else:
        points = places.points if places.coordinates is None else _array(places.coordinates)
        cells = [1.0] * places.dim
        low, high = np.min(places.points, 0), np.max(places.points, 0)
    widths = encoder.width if encoder.log_width is None else np.exp(_array(encoder.log_width))
    widths = widths * np.ones(len(points))
    kept, size = [], encoder.dim_value
    for element in elements:
        position = [element[column] for column in encoder.position]
        inside = all(a <= x <= b for x, a, b in zip(position, low, high, strict=True))
        if not inside and encoder.outside == "drop":
            continue
        position = [min(max(x, a), b) for x, a, b in zip(position, low, high, strict=True)]
        raw, values = np.zeros(len(points)), np.zeros((len(points), size))
        for j, (point, width) in enumerate(zip(points, widths, strict=True)):
            offset = [
                (x - mu) / (c * width) for x, mu, c in zip(position, point, cells, strict=True)
            ]
            squared = sum(o * o for o in offset)
            raw[j] = math.exp(-squared / 2) if squared <= encoder.reach**2 else 0.0
            parts = {
                "features": [
                    x for column, x in enumerate(element) if column not in encoder.position
                ],
                "offsets": offset,
                "squares": [o * o - 1 for o in offset],
            }
            values[j] = [v for name in encoder.values for v in parts[name]]
        if encoder.attention == "softmax" and raw.sum() > 0:
            raw /= raw.sum()
        kept.append((raw, values))
    out = np.zeros((len(points), encoder.dim_readout))
    if len(elements) == 0:
        return out
    for j in range(len(points)):
        near = [(raw[j], values[j]) for raw, values in kept if raw[j] > 0]
        mass = sum(w for w, _ in near)
        total = sum((w * v for w, v in near), np.zeros(size))
        mean = total / mass if near else np.zeros(size)
        squares = sum((w * (v - mean) ** 2 for w, v in near), np.zeros(size))
        found = {
            "sum": total,
            "mean": total / len(elements),
            "weighted_mean": mean,
            "variance": squares / mass if near else np.zeros(size),
            "density": [mass],
            "mass": [mass / len(elements)],
            "max": np.max([w * v for w, v in near], 0) if near else np.zeros(size),
            "min": np.min([w * v for w, v in near], 0) if near else np.zeros(size),
        }
        out[j] = np.concatenate([found[name] for name in encoder.aggregates])
    return out
