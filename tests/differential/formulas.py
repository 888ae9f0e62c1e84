"""The streaming encoders as loops over the elements of one set, from their docstrings.

Nothing here comes from the library's code but the names of weights and arguments. Every function
takes the encoder, the slots of one set, its elements as `Bounded`, and elements that were added and
removed again, which leave nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

import setfold
from setfold.encoders.layers import NormalizedReLU
from tests.differential.arithmetic import (
    UNKNOWN,
    Arithmetic,
    Bounded,
    exact,
    joined,
    stacked,
    zeros,
)
from tests.differential.placed import placed_slots

Slots = Sequence[np.ndarray]  # (K, h) of each level
Elements = Sequence[Bounded]  # each (d,)


def array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().double().numpy()


def names_of(encoder: nn.Module) -> list[str]:
    """The aggregates of an encoder, in order."""
    return [encoder.aggregate] if isinstance(encoder.aggregate, str) else list(encoder.aggregate)


class Formulas:
    """What the encoders should return, computed with bounds for a dtype."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.a = arithmetic

    def encode(
        self, encoder: nn.Module, slots: Slots, elements: Elements, gone: Elements = ()
    ) -> Bounded:
        """The encoding of one set."""
        for kind, formula in FORMULAS.items():
            if isinstance(encoder, kind):
                with np.errstate(all="ignore"):  # what overflows in float64 has no bound
                    return formula(self, encoder, slots, elements, gone if len(elements) else ())
        raise NotImplementedError(f"write the formula of {type(encoder).__name__}")

    def linear(self, number: Bounded, layer: nn.Linear) -> Bounded:
        return self.a.linear(number, array(layer.weight), array(layer.bias))

    def normalized(self, number: Bounded, layer: nn.Module) -> Bounded:
        if isinstance(layer, nn.Identity):
            return number
        return self.a.normalized(number, array(layer.weight), array(layer.bias), layer.eps)

    def apply(self, module: nn.Module | None, number: Bounded) -> Bounded:
        """Features or a head."""
        if module is None or isinstance(module, nn.Identity):
            return number
        if isinstance(module, nn.Sequential):
            for part in module:
                number = self.apply(part, number)
            return number
        if isinstance(module, nn.Linear):
            found = self.linear(number, module)
            self.a.notice_in_module(number)
            self.a.notice_in_module(found)
            return self.a.stored(found)
        if isinstance(module, nn.Flatten):
            return number.map(np.ravel)
        if isinstance(module, setfold.SlotPool):
            rows = [number.map(lambda part, j=j: part[j]) for j in range(len(number.value))]
            found = self.a.total(rows)
            return self.a.divided(found, len(rows)) if module.reduce == "mean" else found
        if isinstance(module, NormalizedReLU):
            return self.a.normalized(self.a.monotone(number, relu), epsilon=1e-8)
        return self.a.monotone(number, ACTIVATIONS[type(module)])

    # ---- slots -----------------------------------------------------------------------------------

    def queries(self, encoder: setfold.SlotSetEncoder, slots: np.ndarray) -> Bounded:
        """q = to_query(norm(S)), (K, d_out)."""
        normal = [self.normalized(exact(slot), encoder.norm) for slot in slots]
        return stacked([self.linear(number, encoder.to_query) for number in normal])

    def biases(self, encoder: setfold.SlotSetEncoder, slots: np.ndarray) -> Bounded:
        normal = [self.normalized(exact(slot), encoder.norm) for slot in slots]
        return joined([self.linear(number, encoder.to_bias) for number in normal])

    def over_slots(
        self, encoder: setfold.SlotSetEncoder, slots: np.ndarray, elements: Elements
    ) -> list[Bounded]:
        """Logarithms (K,) of the weights of each element."""
        found, scale = [], 1 / math.sqrt(encoder.dim_key or encoder.dim_out)
        queries = self.queries(encoder, slots)
        if encoder.similarity == "cosine":
            rows = [queries.map(lambda part, j=j: part[j]) for j in range(len(slots))]
            temperature = exact(array(encoder.temperature))
            queries = stacked([self.a.unit_vector(row) for row in rows])
            queries = self.a.scaled(queries, temperature)
            biases = self.biases(encoder, slots)
        for element in elements:
            key = self.linear(element, encoder.to_key)
            if encoder.similarity == "cosine":
                cosine = self.a.products(self.a.normalized(key), queries, scale)
                logits = self.a.plus(cosine, biases)
            else:
                beside = float(element.size.sum())
                logits = self.a.products(key, queries, scale, beside)
            found.append(self.a.over_slots(logits, encoder.attention))
        return found

    def slot_set(
        self,
        encoder: setfold.SlotSetEncoder,
        slots: Slots,
        elements: Elements,
        gone: Elements,
    ) -> Bounded:
        """c_ij = W_ij v_i, aggregated over the elements i, for each slot j."""
        count, (own,) = len(elements), slots
        if count == 0:
            widths = [1 if name == "mass" else encoder.dim_out for name in names_of(encoder)]
            return zeros(len(own), sum(widths))
        every = [*elements, *gone]
        logs = self.over_slots(encoder, own, every)
        values = [self.linear(element, encoder.to_value) for element in every]
        lost = 1 + np.abs(array(encoder.to_value.weight)).sum(1)
        ones = [exact(np.ones(1))] * len(every)
        total = self.a.weighted_total(logs, values, lost, len(gone))
        mass = self.a.weighted_total(logs, ones, 1.0, len(gone))
        found = []
        for name in names_of(encoder):
            if name == "sum":
                found.append(total)
            elif name == "mean":
                found.append(self.a.divided(total, count))
            elif name == "mass":
                found.append(self.a.divided(mass, count))
            elif name == "weighted_mean" and gone:
                found.append(self.quotient(total, mass))
            elif name == "weighted_mean":
                # sigmoid's weights are multiplied as they are, and what underflows is relative
                floor = mass.value[:, 0] if encoder.attention == "sigmoid" else np.ones(len(own))
                found.append(self.a.weighted_mean(logs, values, lost, floor))
            else:
                found.append(self.extremes(logs[:count], values[:count], lost, name))
        return self.a.stored(joined(found, axis=1))

    def quotient(self, total: Bounded, mass: Bounded) -> Bounded:
        """sum_i W_ij v_i / sum_i W_ij after a removal: the mass may be nothing but rounding."""
        value, left = total.value / mass.value, mass.value - mass.error
        error = np.full_like(value, UNKNOWN)
        np.divide(total.error + np.abs(value) * mass.error, left, out=error, where=left > 0)
        return self.a.rounded(value, error, total.size / mass.value, 0)

    def extremes(self, logs, values, lost, name: str) -> Bounded:
        """max_i W_ij v_i or min_i W_ij v_i."""
        sign = 1.0 if name == "max" else -1.0
        each = [
            self.a.weighted_total([log], [value], lost)
            for log, value in zip(logs, values, strict=True)
        ]
        value = np.max([sign * number.value for number in each], axis=0)
        high = np.max([sign * number.value + number.error for number in each], axis=0)
        low = np.max([sign * number.value - number.error for number in each], axis=0)
        return self.a.rounded(sign * value, np.maximum(high - value, value - low), np.abs(value), 0)

    def hierarchy(
        self,
        encoder: setfold.HierarchicalSlotSetEncoder,
        slots: Slots,
        elements: Elements,
        gone: Elements,
    ) -> Bounded:
        """SSE_T(... SSE_1(X)): each level encodes the slots of the one before."""
        first, *others = encoder.levels
        found = self.slot_set(first, slots[:1], elements, gone)
        for number, (level, own) in enumerate(zip(others, slots[1:], strict=True)):
            rows = [
                self.apply(encoder.activation, found.map(lambda part, j=j: part[j]))
                for j in range(len(found.value))
            ]
            upper = self.slot_set(level, [own], rows, ())
            if encoder.residual:
                factor = exact(array(encoder.factors[number]))
                found = self.a.plus(found, self.a.scaled(upper, factor))
            else:
                found = upper
        return found if len(elements) else zeros(*found.value.shape)

    # ---- pools -----------------------------------------------------------------------------------

    def pool(
        self, encoder: setfold.Pool, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        found, count = [], len(elements)
        for name in names_of(encoder):
            if count == 0:
                found.append(zeros(encoder.dim_in))
            elif name == "sum":
                found.append(self.a.total(elements, gone))
            elif name == "mean":
                found.append(self.a.divided(self.a.total(elements, gone), count))
            else:
                best = np.max if name == "max" else np.min
                ends = [
                    best([e.value + side * e.error for e in elements], axis=0)
                    for side in (0, 1, -1)
                ]
                error = np.maximum(ends[1] - ends[0], ends[0] - ends[2])
                found.append(self.a.rounded(ends[0], error, np.abs(ends[0]), 0))
        return self.a.stored(joined(found))

    def moments(
        self, encoder: setfold.Moments, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """mean = sum_i x_i / n, variance = sum_i (x_i - mean)^2 / n."""
        if not elements:
            return zeros(2, encoder.dim_in)
        count = len(elements)
        mean = self.a.divided(self.a.total(elements), count)
        moved = mean.error + np.max([element.error for element in elements], axis=0)
        squares, error = np.zeros((2, encoder.dim_in))
        for element in elements:
            distance = np.abs(element.value - mean.value)
            squares += distance**2 / count
            error += (2 * distance * moved + moved**2) / count
        variance = self.a.rounded(squares, error, squares + error, count)
        return self.a.stored(stacked([mean, variance]))

    def covariance(
        self, encoder: setfold.Covariance, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """mean = sum_i x_i / n, covariance = sum_i (x_i - mean) (x_i - mean)^T / n."""
        width, count = encoder.dim_in, len(elements)
        if not elements:
            return zeros(1 + width, width)
        mean = self.a.divided(self.a.total(elements), count)
        moved = mean.error + np.max([element.error for element in elements], axis=0)
        total, size, error = np.zeros((3, width, width))
        for element in elements:
            distance = element.value - mean.value
            far = np.abs(distance) + moved
            total += np.outer(distance, distance) / count
            size += np.outer(far, far) / count
            error += (np.outer(far, far) - np.outer(far - moved, far - moved)) / count
        product = self.a.rounded(total, error, size, count + 2)
        first = mean.map(lambda part: part[None])
        return self.a.stored(joined([first, product]))

    def statistics(
        self, encoder: setfold.SummaryStatistics, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """log(1 + n), and mean, standard deviation, minimum and maximum of each feature."""
        if not elements:
            return zeros(1 + 4 * encoder.dim_in)
        both = self.moments(setfold.Moments(encoder.dim_in), slots, elements, gone)
        mean, variance = (both.map(lambda part, place=place: part[place]) for place in (0, 1))
        deviation = np.sqrt(variance.value)
        low = np.sqrt(np.maximum(variance.value - variance.error, 0))
        high = np.sqrt(variance.value + variance.error)
        error = np.maximum(deviation - low, high - deviation)
        spread = self.a.rounded(deviation, error, deviation, 1)
        extrema = self.pool(setfold.Pool(encoder.dim_in, ["min", "max"]), slots, elements, gone)
        count = np.log1p([float(len(elements))])
        number = self.a.rounded(count, np.zeros(1), count, 1)
        return self.a.stored(joined([number, mean, spread, extrema]))

    # ---- softmax over elements -------------------------------------------------------------------

    def attended(
        self,
        queries: Bounded,
        elements: Elements,
        keys: nn.Linear,
        values: nn.Linear,
        heads: int,
    ) -> Bounded:
        """concat_h sum_i softmax_i(k_i . q_j / sqrt(d_head)) v_i, of queries (K, e)."""
        width = len(keys.weight) // heads
        made = [
            (self.linear(e, keys), self.linear(e, values), float(e.size.sum())) for e in elements
        ]
        lost, found = 1 + np.abs(array(values.weight)).sum(1), []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            own = queries.map(lambda numbers, part=part: numbers[:, part])
            logits, shown = [], []
            for key, value, beside in made:
                ours = key.map(lambda numbers, part=part: numbers[part])
                logits.append(self.a.products(ours, own, width**-0.5, beside))
                shown.append(value.map(lambda numbers, part=part: numbers[part]))
            found.append(self.a.weighted_mean(logits, shown, lost[part]))
        return joined(found, axis=1)

    def attention_pool(
        self, encoder: setfold.AttentionPool, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        if not elements:
            return zeros(encoder.num_queries, encoder.dim_out)
        queries = exact(array(encoder.queries))
        return self.a.stored(
            self.attended(queries, elements, encoder.to_key, encoder.to_value, encoder.num_heads)
        )

    def gated_attention_pool(
        self, encoder: setfold.GatedAttentionPool, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """sum_i softmax_i(w (tanh(V x_i) * sigmoid(U x_i))) x_i."""
        if not elements:
            return zeros(encoder.num_branches, encoder.dim_in)
        logits = []
        for element in elements:
            hidden = self.a.monotone(self.linear(element, encoder.to_hidden), np.tanh)
            if encoder.gated:
                gate = self.a.monotone(self.linear(element, encoder.to_gate), sigmoid)
                hidden = self.a.scaled(hidden, gate)
            logits.append(self.linear(hidden, encoder.to_logit))
        return self.a.stored(self.a.weighted_mean(logits, elements, 1.0))

    def seed_attention(
        self, encoder: setfold.SeedAttention, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """MAB(S, X), of the seeds S."""
        if not elements:
            return zeros(encoder.num_seeds, encoder.dim)
        seeds = [exact(seed) for seed in array(encoder.seeds)]
        return self.a.stored(stacked(self.mab(encoder.block, seeds, elements)))

    def mab(self, block: setfold.MAB, queries: Elements, elements: Elements) -> list[Bounded]:
        """norm(H + relu(feed(H))) with H = norm(Q + to_out(what the queries Q attend to))."""
        projected = stacked([self.linear(query, block.to_query) for query in queries])
        seen = self.attended(projected, elements, block.to_key, block.to_value, block.num_heads)
        rows = []
        for j, query in enumerate(queries):
            own = self.a.stored(seen.map(lambda part, j=j: part[j]))
            added = self.a.stored(self.a.plus(query, self.linear(own, block.to_out)))
            hidden = self.a.stored(self.normalized(added, block.norm))
            fed = self.a.monotone(self.linear(hidden, block.feed), relu)
            rows.append(self.normalized(self.a.stored(self.a.plus(hidden, fed)), block.last_norm))
        return rows

    def constant_memory(
        self,
        encoder: setfold.ConstantMemoryEncoder,
        slots: Slots,
        elements: Elements,
        gone: Elements,
    ) -> Bounded:
        """L <- SAB(MAB(L, SAB(MAB(S_b, X)))) for each block b."""
        if not elements:
            return zeros(encoder.num_latents, encoder.dim)
        linear, norm = encoder.features
        made = [self.normalized(self.apply(linear, element), norm) for element in elements]
        made = [self.a.stored(row) for row in made]
        latents = [exact(latent) for latent in array(encoder.head.latents)]
        pools = encoder.encoder.encoders.values()
        for pool, update in zip(pools, encoder.head.updates, strict=True):
            seen = self.seed_attention(pool, slots, made, gone)
            self.a.notice_in_module(seen)  # the head gets it in the dtype
            rows = [seen.map(lambda part, j=j: part[j]) for j in range(pool.num_seeds)]
            rows = self.mab(update.among_block.block, rows, rows)
            latents = self.mab(update.across, latents, rows)
            latents = self.mab(update.among_latents.block, latents, latents)
        return self.a.stored(stacked(latents))

    # ---- places ----------------------------------------------------------------------------------

    def placed(
        self, encoder: setfold.PlacedSlotEncoder, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """Attention by distance; in float32 for dtypes of 16 bits."""
        inner = max(self.a, Arithmetic(torch.float32), key=lambda a: -a.unit)
        found = placed_slots(inner, encoder, elements, gone)
        self.a.overflows |= inner.overflows
        return self.a.stored(found)

    # ---- combinations ----------------------------------------------------------------------------

    def composition(
        self, encoder: setfold.Composition, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        """The head of an encoding of features."""
        made, lost = (
            [self.apply(encoder.features, element) for element in some] for some in (elements, gone)
        )
        found = self.encode(encoder.encoder, slots, made, lost)
        return found if encoder.head is None else self.a.stored(self.apply(encoder.head, found))

    def concat(
        self, encoder: setfold.Concat, slots: Slots, elements: Elements, gone: Elements
    ) -> Bounded:
        found, start = [], 0
        for part in encoder.encoders.values():
            stop = start + len(part.slot_dims)
            found.append(self.encode(part, slots[start:stop], elements, gone).map(np.ravel))
            start = stop
        return joined(found)


def relu(numbers: np.ndarray) -> np.ndarray:
    return np.maximum(numbers, 0.0)


def sigmoid(numbers: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -numbers))


ACTIVATIONS = {nn.ReLU: relu, nn.Tanh: np.tanh, nn.Sigmoid: sigmoid}
FORMULAS: dict[type, Callable[..., Bounded]] = {
    setfold.SlotSetEncoder: Formulas.slot_set,
    setfold.HierarchicalSlotSetEncoder: Formulas.hierarchy,
    setfold.Pool: Formulas.pool,
    setfold.Moments: Formulas.moments,
    setfold.Covariance: Formulas.covariance,
    setfold.SummaryStatistics: Formulas.statistics,
    setfold.AttentionPool: Formulas.attention_pool,
    setfold.GatedAttentionPool: Formulas.gated_attention_pool,
    setfold.SeedAttention: Formulas.seed_attention,
    setfold.PlacedSlotEncoder: Formulas.placed,
    setfold.ConstantMemoryEncoder: Formulas.constant_memory,
    setfold.Composition: Formulas.composition,  # and what derives from it: DeepSets, PMA
    setfold.Concat: Formulas.concat,
}
