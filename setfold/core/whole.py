"""Set encoders that need all elements of a set at once."""

from __future__ import annotations

import copy
from abc import abstractmethod

import torch
from torch import Tensor, nn

from setfold.core.absorb import check_encoding, check_finite
from setfold.core.inputs import Chunk, validate_whole_sets
from setfold.core.primitives import SetEncoder
from setfold.core.statistic import spread
from setfold.core.weights import first_tensor
from setfold.kernels.modes import needs_plain_formula
from setfold.kernels.ragged import gather_groups


class WholeSetEncoder(SetEncoder):
    """A set encoder that needs all elements of a set at once.

    Its one primitive is `encode`, on dense batches of non-empty sets. Masks, ragged batches, empty
    sets and validation are derived here.

    Attributes:
        obstacle: in a few words, why the encodings of chunks do not combine to that of the set.
        head: a module on the encoding (B, ...), or None. Before it, an empty set is zeros.
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
            mask: (B, n), True where present, at least once per set; None if all are present.
        """

    def forward(
        self,
        elements: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Encode whole sets; empty sets are zeros before any head.

        Args:
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row, in any order.
            batch_size: the number of sets; by default that of a dense batch, or the largest index
                plus 1.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: an element is NaN or infinite, or the encoding overflows.
        """
        like = first_tensor((self,))
        chunk, sets = validate_whole_sets(elements, mask, index, batch_size, self.dim_in, like)
        check_finite(chunk)
        encoding = self._encode_chunk(chunk, sets)
        check_encoding(encoding)
        return encoding if self.head is None else self.head(encoding)

    def _encode_chunk(self, chunk: Chunk, sets: int) -> Tensor:
        if chunk.is_empty():
            return self._encode_nothing(chunk, sets)
        if chunk.index is not None:
            groups = [
                (some, self.encode(rows, mask))
                for some, rows, mask in gather_groups(chunk.elements, chunk.index, sets)
            ]
            return _scatter(groups, sets)
        if chunk.mask is None:
            return self.encode(chunk.elements, None)
        present = chunk.mask.any(1)
        if not needs_plain_formula():
            if bool(present.all()):
                return self.encode(chunk.elements, chunk.mask)
            found = self.encode(chunk.elements[present], chunk.mask[present])
            return _scatter([(present.nonzero().squeeze(1), found)], sets)
        # shapes must not depend on values here: an empty set gets one element of zeros
        first = torch.arange(chunk.mask.shape[1], device=present.device) == 0
        found = self.encode(chunk.elements, chunk.mask | (first & ~present.unsqueeze(1)))
        return torch.where(spread(present, found), found, 0)

    def _encode_nothing(self, chunk: Chunk, sets: int) -> Tensor:
        """Zeros in the shape of an encoding. A copy computes it, so that no buffer changes."""
        trailing = chunk.elements.shape[1 if chunk.index is not None else 2 :]
        with torch.no_grad():
            clone = copy.deepcopy(self).eval()
            some = clone.encode(chunk.elements.new_zeros(1, 1, *trailing), None)
        return some.new_zeros(sets, *some.shape[1:])


def _scatter(groups: list[tuple[Tensor, Tensor]], sets: int) -> Tensor:
    """Combine encodings (b, ...) of some sets each into one (B, ...); zeros for all other sets."""
    numbers, found = (torch.cat(parts) for parts in zip(*groups, strict=True))
    return found.new_zeros(sets, *found.shape[1:]).index_put((numbers,), found)
