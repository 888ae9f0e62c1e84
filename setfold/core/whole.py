"""Set encoders that must see all elements of a set at once."""

from __future__ import annotations

import copy
from abc import abstractmethod

import torch
from torch import Tensor, nn

from setfold.core.chunk import Chunk
from setfold.core.encoder import SetEncoder
from setfold.core.statistic import spread
from setfold.core.weights import first_tensor
from setfold.kernels.ragged import group_by_length


class WholeSetEncoder(SetEncoder):
    """A set encoder that must see all elements of a set at once.

    Its one primitive is `encode`, on dense batches of sets that have elements. Masks, ragged
    batches, empty sets and checks of the input are derived here, once.

    Attributes:
        obstacle: why the encodings of chunks do not combine into that of the set, in a few words.
        head: a module on the encoding (B, ...), or None. An empty set is zeros before it.
    """

    obstacle: str = ""
    head: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    @abstractmethod
    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        """Encode a dense batch, before any head.

        Args:
            elements: (B, n, d), with B and n at least 1; rows that the mask hides are zero.
            mask: (B, n), True where present, at least once in each set; None if all are.
        """

    def forward(
        self,
        elements: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Encode whole sets; those without elements are zeros before any head.

        Args:
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row, in any order; needs batch_size.
            batch_size: the number of sets of a ragged batch.
        """
        like = first_tensor((self,))
        chunk = Chunk.of_whole_sets(elements, mask, index, batch_size, self.dim_in, like)
        chunk.refuse_non_finite()
        encoding = self._encode_chunk(chunk)
        return encoding if self.head is None else self.head(encoding)

    def _encode_chunk(self, chunk: Chunk) -> Tensor:
        if chunk.is_empty():
            return self._encode_nothing(chunk)
        if chunk.index is not None:
            groups = [
                (sets, self.encode(_without_padding(chunk.elements[rows], mask), mask))
                for sets, rows, mask in group_by_length(chunk.index, chunk.sets)
            ]
            return _put_together(groups, chunk.sets)
        if chunk.mask is None:
            return self.encode(chunk.elements, None)
        present = chunk.mask.any(1)
        if not torch.compiler.is_compiling():
            if bool(present.all()):
                return self.encode(chunk.elements, chunk.mask)
            found = self.encode(chunk.elements[present], chunk.mask[present])
            return _put_together([(present.nonzero().squeeze(1), found)], chunk.sets)
        # a compiled program has one shape: an element of zeros stands in where a set has none
        first = torch.arange(chunk.mask.shape[1], device=present.device) == 0
        found = self.encode(chunk.elements, chunk.mask | (first & ~present.unsqueeze(1)))
        return torch.where(spread(present, found), found, 0)

    def _encode_nothing(self, chunk: Chunk) -> Tensor:
        """Zeros of the shape that an encoding has, found out by a copy, which may do as it likes."""
        trailing = chunk.elements.shape[1 if chunk.index is not None else 2 :]
        with torch.no_grad():
            twin = copy.deepcopy(self).eval()
            some = twin.encode(chunk.elements.new_zeros(1, 1, *trailing), None)
        return some.new_zeros(chunk.sets, *some.shape[1:])


def _without_padding(elements: Tensor, mask: Tensor | None) -> Tensor:
    return elements if mask is None else elements.masked_fill(~spread(mask, elements), 0)


def _put_together(groups: list[tuple[Tensor, Tensor]], sets: int) -> Tensor:
    """Encodings of some sets each, (b, ...), as one (B, ...); zeros for sets in no group."""
    some = groups[0][1]
    encoding = some.new_zeros(sets, *some.shape[1:])
    for numbers, found in groups:
        encoding = encoding.index_put((numbers,), found)
    return encoding
