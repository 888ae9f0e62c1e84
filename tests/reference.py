"""The algorithms as plain loops over numbers, in float64: slow, obvious, and nobody's relative."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

import setfold


def _array(tensor):
    return None if tensor is None else tensor.detach().double().numpy()


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


def _weights(logits, attention):
    if attention == "softmax":
        top = max(logits)
        raw = [math.exp(logit - top) for logit in logits]
    else:
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
