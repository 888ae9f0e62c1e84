"""The wrong ways, named so: what people do to large sets, here to measure how wrong it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from setfold.core.encoder import SetEncoder
from setfold.core.inputs import check_choice, check_sizes
from setfold.core.statistic import spread
from setfold.core.whole import WholeSetEncoder
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.errors import InputError
from setfold.kernels.scores import weigh

PUBLISHED_AGGREGATES = ("sum", "mean", "max", "min")


class ChunkAverage(WholeSetEncoder):
    """THE WRONG WAY: encode chunks as if they were sets, and average what comes out.

    Args:
        encoder: any set encoder.
        chunk_size: elements in a chunk; the last one may have fewer, and counts for as many.

    >>> import setfold
    >>> whole = setfold.FullSetTransformer(dim_in=3, dim=16)
    >>> wrong, elements = ChunkAverage(whole, chunk_size=10), torch.randn(1, 100, 3)
    >>> torch.allclose(wrong(elements), whole(elements), atol=1e-3)
    False
    """

    obstacle = "chunk and average: the chunks know nothing of each other"

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
    """THE WRONG WAY: the Slot Set Encoder with its chunks aggregated as the published code does.

    Each chunk's contributions are summed, and the aggregate is taken over the chunks' sums:

        encoding_j = g_chunks( sum_(i in chunk) W_ij v_i )      instead of      g_i( W_ij v_i )

    which depends on how the set was cut up, unless g is the sum.

    Args:
        encoder: the Slot Set Encoder whose slots and projections are used; its own aggregate is not.
        aggregate: g, "sum", "mean", "max" or "min".
        chunk_size: elements in a chunk.
        redraw: whether every chunk meets slots of its own, which even a sum does not survive.

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
            raise InputError(f"encoder must be a Slot Set Encoder; got {type(encoder).__name__}.")
        if redraw and encoder.slots == "learned":
            raise InputError('learned slots are not drawn: use an encoder with slots="random".')
        self.encoder = encoder
        self.aggregate = aggregate
        self.chunk_size = chunk_size
        self.redraw = redraw
        self.dim_in = encoder.dim_in
        self.obstacle = self._obstacle()

    def _obstacle(self) -> str:
        if self.redraw:
            return "redraws the slots: every chunk is asked another question"
        if self.aggregate == "sum":
            return ""  # a sum of sums is the sum
        return "aggregates chunks, not elements: the answer depends on the cut"

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        sums, present = [], []
        for number, (chunk, shown) in enumerate(_chunks(elements, mask, self.chunk_size)):
            if number == 0 or self.redraw:
                other = torch.Generator().manual_seed(number) if self.redraw else None
                scores = self.encoder.prepare(self.encoder.draw_frame(None, other)).scores
            weights = weigh(scores.logits(chunk), self.encoder.attention) * shown.unsqueeze(-1)
            sums.append(weights.transpose(1, 2) @ self.encoder.to_value(chunk))
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
    """Chunks of what the mask shows, in its order, and the masks that go with them."""
    if mask is None:
        mask = elements.new_ones(elements.shape[:2], dtype=torch.bool)
    else:  # what is hidden takes no place in a chunk
        mask, order = mask.sort(dim=1, descending=True, stable=True)
        elements = elements.take_along_dim(order.unsqueeze(-1), 1)
    for chunk, shown in zip(elements.split(size, 1), mask.split(size, 1), strict=True):
        if bool(shown.any()):
            yield chunk, shown
