"""The Slot Set Encoder (Bruno, Willette, Lee and Hwang, NeurIPS 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from setfold.core.absorb import Arrivals
from setfold.core.arguments import check_choice, check_flags, check_sizes
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import FIELDS, Count, fields_of, parse_aggregates, read
from setfold.core.state import SetState
from setfold.core.statistic import Field, Fields, Softmax, Statistics
from setfold.core.weights import caller_for
from setfold.encoders.one_set import encode_tracked
from setfold.errors import CancelledAttentionWarning, InputError
from setfold.kernels.extrema import slot_extrema
from setfold.kernels.modes import autocasts, widened, without_autocast
from setfold.kernels.scores import (
    ATTENTIONS,
    CosineScores,
    FoldedScores,
    KeyScores,
    Projection,
    Scores,
    weigh,
)
from setfold.kernels.softmax import one_tile_log_weights, softmax_sums
from setfold.kernels.sums import one_set_sums, one_set_values, ragged_sums, slot_sums

SLOTS = ("random", "learned")
SIMILARITIES = ("dot", "cosine")
INITIAL_TEMPERATURE = 3.0  # of the cosine similarity: sharp enough for slots to specialize
SEEDS = 2**31


class Prepared(NamedTuple):
    """What absorbing and reading out need of the slots and the weights, in float32 or wider."""

    scores: Scores
    projection: Projection  # of the values
    values: Tensor | None  # weight and bias as one matrix (d + 1, d_out), if sums are of [x, 1]


class SlotSetEncoder(StreamingSetEncoder):
    """Pools a set into K slots. Each element distributes its weight over the slots by attention.

    With slots S (K, h), q = to_query(norm(S)), k_i = to_key(x_i), v_i = to_value(x_i):

        a_ij = sigmoid(k_i . q_j / sqrt(d_key)) + 1e-8     W_ij = a_ij / sum_l a_il     c_ij = W_ij v_i

    and slot j holds the aggregate of c_ij over the elements i. The weights of an element depend
    on that element and the slots only, so the encoder is a fold. They sum to 1 over the slots, so
    keep the slots separate afterwards: if they are summed or averaged, attention cancels.

    Args:
        dim_in: width d of the elements.
        num_slots: number K of slots.
        dim_slot: size h of a slot.
        dim_out: width d_out of the values, and of keys and queries unless `dim_key` is given.
        aggregate: "sum", "mean", "max" or "min" of the contributions; "weighted_mean" for
            sum_i W_ij v_i / sum_i W_ij; "mass" for the mean weight of each slot; or a list of
            them, concatenated. Elements can be removed from sums and means, except from a
            "weighted_mean" with softmax attention: its state is relative to the largest weight
            of each slot, because the weights of a slot may all be too small for the dtype.
        slots: "random", drawn from a learned mean and deviation that all slots share, so that K
            may change at test time; or "learned".
        bias: whether the three projections have a bias.
        attention: "sigmoid" as in the paper, or "softmax" over slots.
        similarity: "dot" as in the paper, or "cosine" of layer-normalised keys and unit queries
            with a learned temperature and a bias for each slot. Keys of width 1 raise InputError,
            because layer normalization makes them 0.
        dim_key: width d_key of keys and queries; None for dim_out, as in the paper. Many slots of
            few dimensions need wider keys to tell elements apart.

    >>> encoder = SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=16).eval()
    >>> state = encoder.initial_state(batch_size=2)
    >>> for chunk in torch.randn(2, 100, 3).split(10, dim=1):
    ...     state = encoder.update(state, chunk)
    >>> encoder.readout(state).shape
    torch.Size([2, 4, 16])
    """

    dim_in: int
    slot_axis = 1
    slot_noise: Tensor
    slot_seed: Tensor

    def __init__(
        self,
        dim_in: int,
        num_slots: int,
        dim_slot: int,
        dim_out: int,
        aggregate: str | Sequence[str] = "mean",
        slots: str = "random",
        bias: bool = True,
        attention: str = "sigmoid",
        similarity: str = "dot",
        dim_key: int | None = None,
    ) -> None:
        super().__init__()
        width = dim_out if dim_key is None else dim_key
        check_sizes(dim_in=dim_in, num_slots=num_slots, dim_slot=dim_slot, dim_out=dim_out)
        check_sizes(dim_key=width)
        check_choice(SLOTS, slots=slots)
        check_choice(ATTENTIONS, attention=attention)
        check_choice(SIMILARITIES, similarity=similarity)
        check_flags(bias=bias)
        if similarity == "cosine" and width == 1:
            raise InputError(
                'similarity="cosine" needs keys of at least 2 dimensions: layer normalization turns '
                "a key of width 1 into 0, so that attention is constant. Pass a dim_key, such as 16."
            )
        self.aggregates = parse_aggregates(aggregate, weighted=True)
        self.dim_in = dim_in
        self.num_slots = num_slots
        self.dim_slot = dim_slot
        self.dim_out = dim_out
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)
        self.slots = slots
        self.bias = bias
        self.attention = attention
        self.similarity = similarity
        self.dim_key = dim_key
        self.slot_dims = (dim_slot,)
        self.slots_cancel = all(a.cancels for a in self.aggregates)
        self.reads_mass = any(a.needs_mass for a in self.aggregates)
        # Softmax weights underflow, and a quotient of what is left of them is wrong. Sigmoid weights
        # do not: they are at least 1e-8 / K.
        self.relative = attention == "softmax" and any(a.is_quotient for a in self.aggregates)
        self.sums_field = "softmax" if self.relative else "sum"
        self.field_names = tuple(
            self.sums_field if name == "sum" else name for name in fields_of(self.aggregates)
        )
        self.batched_slots = self.field_names == (self.sums_field,) and similarity == "dot"
        # Whether summing elements and projecting the sums is cheaper than summing projected values.
        self.folded = 2 * dim_in * num_slots <= (width + dim_out) * (dim_in + num_slots)
        self._make_parameters()
        if num_slots == 1:
            warnings.warn(
                "attention cancels with one slot: every element has weight 1, so slots, queries "
                "and keys have no effect and get no gradient. Use num_slots > 1 and keep the slots "
                "separate, or use DeepSets.",
                CancelledAttentionWarning,
                stacklevel=2,
            )

    def _make_parameters(self) -> None:
        self.norm = nn.LayerNorm(self.dim_slot)
        width = self.dim_out if self.dim_key is None else self.dim_key
        self.to_query = nn.Linear(self.dim_slot, width, bias=self.bias)
        self.to_key = nn.Linear(self.dim_in, width, bias=self.bias)
        self.to_value = nn.Linear(self.dim_in, self.dim_out, bias=self.bias)
        if self.slots == "learned":
            self.slot_values = nn.Parameter(torch.randn(self.num_slots, self.dim_slot))
        else:
            self.slot_mean = nn.Parameter(torch.zeros(self.dim_slot))
            self.slot_deviation = nn.Parameter(torch.ones(self.dim_slot))
            self.register_buffer("slot_seed", torch.randint(SEEDS, (), device="cpu"))
            self.register_buffer("slot_noise", self._seeded_bits(), persistent=False)
        if self.similarity == "cosine":
            self.temperature = nn.Parameter(torch.tensor(INITIAL_TEMPERATURE))
            self.to_bias = nn.Linear(self.dim_slot, 1)  # of the slot, so that K may still change
            nn.init.zeros_(self.to_bias.weight)
            nn.init.zeros_(self.to_bias.bias)

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, K, dim_readout): all aggregates, concatenated."""
        return sum(a.width or self.dim_out for a in self.aggregates)

    def extra_repr(self) -> str:
        return (
            f"dim_in={self.dim_in}, num_slots={self.num_slots}, dim_slot={self.dim_slot}, "
            f"dim_out={self.dim_out}, aggregate={self.aggregate!r}, slots={self.slots!r}, "
            f"attention={self.attention!r}, similarity={self.similarity!r}"
            + ("" if self.dim_key is None else f", dim_key={self.dim_key}")
        )

    # ---- slots -------------------------------------------------------------------------------

    @property
    def draws_slots(self) -> bool:
        return self.slots == "random"

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """The slots (1, K, h): the learned ones, or mean + deviation * noise."""
        if self.slots == "learned":
            if num_slots not in (None, self.num_slots) or generator is not None:
                raise InputError(
                    f"the {self.num_slots} learned slots are not drawn: leave num_slots and "
                    'generator out, or use slots="random".'
                )
            return (self.slot_values.unsqueeze(0),)
        num_slots = self.num_slots if num_slots is None else num_slots
        noise = self._noise(num_slots, generator)
        return ((self.slot_mean + self.slot_deviation * noise).unsqueeze(0),)

    def _noise(self, num_slots: int, generator: torch.Generator | None) -> Tensor:
        like, shape = self.slot_mean, (num_slots, self.dim_slot)
        if generator is not None:
            drawn = torch.randn(
                shape, generator=generator, device=generator.device, dtype=torch.float32
            )
            return drawn.to(like)
        if self.training:
            return torch.randn(shape, dtype=like.dtype, device=like.device)
        if num_slots == self.num_slots:
            return self.slot_noise.view(torch.float32).to(like)
        return _evaluation_noise(int(self.slot_seed), *shape).to(like)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load weights, then draw the evaluation noise again, as it follows from the seed."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.slots != "random":
            return
        seed, errors = int(self.slot_seed), args[-1]
        if 0 <= seed < SEEDS:
            self.slot_noise = self._seeded_bits().to(self.slot_noise.device)
        else:
            errors.append(f"{prefix}slot_seed must be from 0 to {SEEDS - 1}; got {seed}.")

    def resize(self, num_slots: int) -> None:
        """Change the number of random slots that are drawn from now on."""
        check_sizes(num_slots=num_slots)
        self.num_slots = num_slots
        self.slot_noise = self._seeded_bits().to(self.slot_noise.device)

    def _seeded_bits(self) -> Tensor:
        """The evaluation noise as the bits of its floats, which a cast of the model leaves alone."""
        if self.slot_mean.is_meta:  # only the shapes are wanted
            return torch.empty(self.num_slots, self.dim_slot, dtype=torch.int32, device="meta")
        noise = _evaluation_noise(int(self.slot_seed), self.num_slots, self.dim_slot)
        return noise.view(torch.int32)

    # ---- the fold ----------------------------------------------------------------------------

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        num_slots = frame[0].shape[1]
        summed = self.dim_in if self.folded else self.dim_out
        declared = {
            "sum": Field(FIELDS["sum"], (num_slots, summed + 1)),  # last, the sum of the weights
            "softmax": Field(Softmax(), (num_slots, summed + 1)),  # of logarithms of the weights
            "max": Field(FIELDS["max"], (num_slots, self.dim_out)),
            "min": Field(FIELDS["min"], (num_slots, self.dim_out)),
        }
        return {name: declared[name] for name in self.field_names}

    @property
    def first_weight(self) -> Tensor:
        return self.to_key.weight

    def prepare(self, frame: tuple[Tensor, ...]) -> Prepared:
        projection = _widened(self.to_value)
        call = caller_for(self.to_value.weight.dtype)
        with without_autocast(projection[0].device):
            slots = call(self.norm, frame[0][0] if frame[0].shape[0] == 1 else frame[0])  # (K, h)
            values = _augmented(*projection).t().contiguous() if self.folded else None
            return Prepared(self._scores(slots), projection, values)

    def _scores(self, slots: Tensor) -> Scores:
        call = caller_for(self.to_key.weight.dtype)
        query, key = call(self.to_query, slots), _widened(self.to_key)  # (K, d_key)
        scale = query.shape[-1] ** -0.5
        if self.similarity == "cosine":
            size = query.detach().abs().amax(-1, keepdim=True)  # its squares may overflow
            unit = normalize(query / size.clamp_min(1), dim=-1) * (self.temperature * scale)
            return CosineScores(*key, unit, call(self.to_bias, slots).squeeze(-1))
        query = query * scale
        if not self.folded and slots.dim() == 2:
            return KeyScores(*key, query)
        return FoldedScores((query @ _augmented(*key)).mT.contiguous())

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Prepared) -> Statistics:
        return self._absorb(elements, mask, prepared, gradients_only=False)

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: Prepared
    ) -> Statistics:
        return self._absorb(elements, mask, prepared, gradients_only=True)

    def _absorb(
        self, elements: Tensor, mask: Tensor | None, prepared: Prepared, gradients_only: bool
    ) -> Statistics:
        scores, projection, _ = prepared
        if elements.dtype != projection[0].dtype:  # features may have run under autocast
            elements = elements.to(projection[0].dtype)
        found: Statistics = {}
        values = None if self.folded else projection
        with without_autocast(elements.device):
            for name in self.field_names:
                if name == "sum":
                    sums = slot_sums(elements, mask, scores, self.attention, values, gradients_only)
                    found[name] = (sums,)
                elif name == "softmax":
                    found[name] = softmax_sums(elements, mask, scores, values, over_slots=True)
                else:
                    largest = name == "max"
                    extrema = slot_extrema(
                        elements, mask, scores, self.attention, projection, largest
                    )
                    found[name] = (extrema,)
        return found

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Prepared
    ) -> Arrivals | None:
        if self.field_names != ("sum",) or prepared.scores.num_slots == 1:
            return None
        elements = elements.to(prepared.projection[0].dtype)
        return self._absorb_sums(elements, index, batch_size, prepared)

    def _absorb_sums(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Prepared
    ) -> Arrivals:
        values = None if self.folded else prepared.projection
        with without_autocast(elements.device):
            summed = ragged_sums(
                elements, index, batch_size, prepared.scores, self.attention, values
            )
            for sets, sums in summed:
                yield sets, {"sum": (sums,)}

    def absorb_small(self, elements: Tensor, prepared: Prepared) -> Statistics | None:
        scores = prepared.scores
        if self.field_names != (self.sums_field,) or not isinstance(scores, FoldedScores):
            return None
        if autocasts(elements.device) or elements.dtype != scores.matrix.dtype:
            return None
        if self.relative:
            peak, sums = one_tile_log_weights(elements[0], scores.matrix)
            return {"softmax": (peak.unsqueeze_(0), sums.unsqueeze_(0))}
        return {"sum": (one_set_sums(elements, self.attention, scores.matrix),)}

    def encode_small(self, elements: Tensor, prepared: Prepared | None) -> Tensor | None:
        if self.similarity != "dot" or not self.folded or autocasts(elements.device):
            return None
        if self.relative and self.aggregate == "weighted_mean" and prepared is not None:
            _, sums = one_tile_log_weights(elements[0], prepared.scores[0])
            found = torch.mm(sums, cast("Tensor", prepared.values)) / sums[:, -1:]
            return found.unsqueeze_(0) if math.isfinite(found.sum().item()) else None
        if self.aggregate not in ("sum", "mean") or self.num_slots == 1:
            return None
        divisor = elements.shape[1] if self.aggregate == "mean" else 1
        if prepared is not None:
            values = cast("Tensor", prepared.values)
            return one_set_values(elements, self.attention, prepared.scores[0], values, divisor)
        return encode_tracked(self, elements, divisor)

    def finish(self, statistics: Statistics, count: Count, prepared: Prepared) -> Tensor:
        return self.read(statistics, count, prepared).to(self.to_key.weight.dtype)

    def read(self, statistics: Statistics, count: Count, prepared: Prepared) -> Tensor:
        """The encoding (B, K, dim_readout) in float32 or wider."""
        values, mass, scale = {}, None, None
        for name, parts in statistics.items():
            values[name] = parts[0]
            if name == self.sums_field:
                sums = parts[-1]
                mass = sums[..., -1] if self.reads_mass else None
                values["sum"] = self._values_of(sums, prepared)
                scale = parts[0].exp() if self.relative else None  # of the largest weights
        found = read(self.aggregates, values, count, mass, scale)
        return found.to(prepared.projection[0].dtype)

    def _values_of(self, sums: Tensor, prepared: Prepared) -> Tensor:
        """sum_i W_ij v_i (B, K, d_out) from what a state keeps."""
        if prepared.values is None:
            return sums[..., :-1]
        with without_autocast(sums.device):
            return sums @ prepared.values.to(sums.dtype)

    def encode(self, elements: Tensor, slots: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole sets without a state, in float32 or wider.

        Args:
            elements: (B, n, d); rows that the mask hides must be finite.
            slots: (1, K, h), or (B, K, h) if each set has slots of its own.
            mask: (B, n), True where present.
        """
        if slots.shape[0] > 1 and not self.batched_slots:
            masks = [None] * len(elements) if mask is None else mask.split(1)
            sets = zip(elements.split(1), slots.split(1), masks, strict=True)
            return torch.cat([self.encode(*one) for one in sets])
        prepared = self.prepare((slots,))
        statistics = self.absorb(elements, mask, prepared)
        count = elements.shape[1] if mask is None else mask.sum(1)
        return self.read(statistics, count, prepared)

    def weigh(self, elements: Tensor, state: SetState, prepared: Prepared) -> Tensor:
        dtype, elements = elements.dtype, widened(elements)
        with without_autocast(elements.device):  # logits of float16 overflow
            if not state.has_own_slots:
                return weigh(prepared.scores.logits(elements), self.attention).to(dtype)
            prepares = (self.prepare(state[i].frame) for i in range(len(state)))
            sets = zip(prepares, elements.split(1), strict=True)
            logits = [own.scores.logits(some) for own, some in sets]
            return weigh(torch.cat(logits), self.attention).to(dtype)


def _evaluation_noise(seed: int, num_slots: int, dim_slot: int) -> Tensor:
    """Standard normal (K, h) in float32 that is the same on every machine for one seed and K.

    numpy guarantees the stream of RandomState; torch's generators may change between versions.
    """
    drawn = np.random.RandomState([seed, num_slots]).standard_normal((num_slots, dim_slot))
    return torch.from_numpy(drawn.astype(np.float32))


def _widened(layer: nn.Linear) -> Projection:
    """Weight and bias of a layer in float32 or wider."""
    return widened(layer.weight), None if layer.bias is None else widened(layer.bias)


def _augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[weight | bias] (out, in + 1), to be multiplied with [x, 1]."""
    return pad(weight, (0, 1)) if bias is None else torch.cat([weight, bias.unsqueeze(-1)], 1)
