"""Wrong on purpose: common mistakes with large sets, to measure their error."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from setfold.core.arguments import check_choice, check_sizes
from setfold.core.primitives import SetEncoder
from setfold.core.statistic import spread
from setfold.core.whole import WholeSetEncoder
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.errors import InputError
from setfold.kernels.modes import widened
from setfold.kernels.scores import weigh

PUBLISHED_AGGREGATES = ("sum", "mean", "max", "min")


class ChunkAverage(WholeSetEncoder):
    """Wrong on purpose: encodes chunks as if they were sets, and averages the encodings.

    Args:
        encoder: any set encoder.
        chunk_size: elements in a chunk. The last chunk may be smaller; the average is weighted by
            the number of elements.

    >>> import setfold
    >>> whole = setfold.FullSetTransformer(dim_in=3, dim=16)
    >>> wrong, elements = ChunkAverage(whole, chunk_size=10), torch.randn(1, 100, 3)
    >>> torch.allclose(wrong(elements), whole(elements), atol=1e-3)
    False
    """

    obstacle = "chunk and average: each chunk is encoded without the others"

    def __init__(self, encoder: SetEncoder, chunk_size: int) -> None:
        super().__init__()
        check_sizes(chunk_size=chunk_size)
        if not isinstance(encoder, SetEncoder):
            raise InputError(f"encoder must be a set encoder; got {type(encoder).__name__}.")
        self.encoder = encoder
        self.chunk_size = chunk_size
        self.dim_in = encoder.dim_in

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        chunks = list(_chunks(elements, mask, self.chunk_size))
        encodings = torch.stack([self.encoder(chunk, shown) for chunk, shown in chunks])
        counts = torch.stack([shown.sum(1, dtype=encodings.dtype) for _, shown in chunks])
        share = counts / counts.sum(0)  # (chunks, B)
        return (encodings * spread(share, encodings)).sum(0)


class PublishedSlotSetEncoder(WholeSetEncoder):
    """Wrong on purpose: the Slot Set Encoder that aggregates over chunks, like the published code.

    The contributions of each chunk are summed, and the aggregate is taken over these sums:

        encoding_j = g_chunks( sum_(i in chunk) W_ij v_i )      instead of      g_i( W_ij v_i )

    Unless g is the sum, the result depends on the partition of the set.

    Args:
        encoder: the Slot Set Encoder whose slots and projections are used, but not its aggregate.
        aggregate: g, "sum", "mean", "max" or "min".
        chunk_size: elements in a chunk.
        redraw: whether to draw new slots for every chunk. Then even the sum is wrong.

    >>> encoder = SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> PublishedSlotSetEncoder(encoder, "max", chunk_size=10)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 4, 8])
    """

    def __init__(
        self,
        encoder: SlotSetEncoder,
        aggregate: str = "mean",
        chunk_size: int = 100,
        redraw: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(chunk_size=chunk_size)
        check_choice(PUBLISHED_AGGREGATES, aggregate=aggregate)
        if not isinstance(encoder, SlotSetEncoder):
            raise InputError(f"encoder must be a SlotSetEncoder; got {type(encoder).__name__}.")
        if redraw and encoder.slots == "learned":
            raise InputError(
                'redraw=True needs an encoder with slots="random"; got slots="learned".'
            )
        self.encoder = encoder
        self.aggregate = aggregate
        self.chunk_size = chunk_size
        self.redraw = redraw
        self.dim_in = encoder.dim_in
        self.obstacle = self._obstacle()

    def _obstacle(self) -> str:
        if self.redraw:
            return "redraws the slots: every chunk has different slots"
        if self.aggregate == "sum":
            return ""  # a sum of sums is correct
        return "aggregates chunks, not elements: the result depends on the partition"

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        sums, present = [], []
        for number, (chunk, shown) in enumerate(_chunks(elements, mask, self.chunk_size)):
            if number == 0 or self.redraw:
                generator = torch.Generator().manual_seed(number) if self.redraw else None
                scores = self.encoder.prepare(self.encoder.draw_frame(None, generator)).scores
            weights = weigh(scores.logits(widened(chunk)), self.encoder.attention)
            shown_weights = (weights * shown.unsqueeze(-1)).to(chunk.dtype)
            sums.append(shown_weights.transpose(1, 2) @ self.encoder.to_value(chunk))
            present.append(shown.any(1))
        stacked = torch.stack(sums, 1)  # (B, chunks, K, d_out)
        seen = torch.stack(present, 1)[..., None, None]
        if self.aggregate == "sum":
            return stacked.sum(1)
        if self.aggregate == "mean":
            return stacked.sum(1) / seen.sum(1)
        sign = 1 if self.aggregate == "max" else -1
        return sign * (sign * stacked).masked_fill(~seen, -torch.inf).amax(1)


def _chunks(elements: Tensor, mask: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks (B, size, d) of the elements that are present, in order, and their masks."""
    if mask is None:
        mask = elements.new_ones(elements.shape[:2], dtype=torch.bool)
    else:  # move masked elements to the end
        mask, order = mask.sort(dim=1, descending=True, stable=True)
        elements = elements.take_along_dim(order.unsqueeze(-1), 1)
    for chunk, shown in zip(elements.split(size, 1), mask.split(size, 1), strict=True):
        if bool(shown.any()):
            yield chunk, shown
