"""Janossy pooling (Murphy, Srinivasan, Rao and Ribeiro, ICLR 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from setfold.core.arguments import check_sizes
from setfold.core.whole import WholeSetEncoder
from setfold.errors import InputError
from setfold.kernels.modes import accumulator_dtype, vectorizes
from setfold.kernels.tiles import tiles

MAX_TUPLES = 10**8  # in a batch
BLOCK_NUMBERS = 1 << 18  # numbers in the tuples that are evaluated at once


class JanossyPool(WholeSetEncoder):
    """The mean of a function of the first k elements, over all permutations of the set: (B, p).

        y = 1/n! sum_pi f(x_pi(1), ..., x_pi(k))

    f does not have to be invariant; the mean is. It is taken over all n! / (n - k)! ordered tuples
    of distinct elements, or over a random sample of them (pi-SGD). Each call draws a new sample for
    each set, in training and in evaluation mode, so the mean is invariant only in expectation; use
    `torch.manual_seed` to reproduce it. Tuples of a set of fewer than k elements contain all of
    them, padded with zeros at the end.

    Args:
        function: a module applied to each tuple on its own, (N, k, d) -> (N, p). If arity is None,
            a module on sequences of any length n, (N, n, d) -> (N, p).
        dim_in: width d of the elements.
        arity: number k of elements in a tuple; None for whole permutations, which must be sampled.
        num_samples: number of permutations to draw for each set; None for all tuples.

    >>> pairs = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3, 16), nn.ReLU())
    >>> JanossyPool(pairs, dim_in=3)(torch.randn(4, 10, 3)).shape
    torch.Size([4, 16])

    A recurrent network on whole permutations. It must return only its last state:

    >>> class LastState(nn.Module):
    ...     def __init__(self, dim_in, dim_out):
    ...         super().__init__()
    ...         self.dim_in, self.dim_out = dim_in, dim_out
    ...         self.network = nn.GRU(dim_in, dim_out, batch_first=True)
    ...
    ...     def forward(self, sequences):
    ...         return self.network(sequences)[1][-1]
    >>> encoder = JanossyPool(LastState(3, 8), dim_in=3, arity=None, num_samples=5)
    >>> encoder(torch.randn(4, 10, 3)).shape
    torch.Size([4, 8])
    """

    dim_in: int
    like: Tensor
    obstacle = "permutations: tuples of elements from different chunks are missing"

    def __init__(
        self,
        function: nn.Module,
        dim_in: int,
        arity: int | None = 2,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(function, nn.Module):
            raise InputError(
                f"function must be a torch.nn.Module; got {function!r}. Wrap it in a module."
            )
        check_sizes(dim_in=dim_in)
        if arity is not None:
            check_sizes(arity=arity)
        if num_samples is not None:
            check_sizes(num_samples=num_samples)
        if arity is None and num_samples is None:
            raise InputError(
                "there are too many whole permutations (arity=None) to evaluate all of them: set "
                "num_samples, the number to draw for each set, or an arity such as 2."
            )
        self.function = function
        self.dim_in = dim_in
        self.arity = arity
        self.num_samples = num_samples
        # The function may have no parameters, so an empty buffer keeps the device and dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, arity={self.arity}, num_samples={self.num_samples}"

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            self._check_number_of_tuples([elements.shape[1]] * elements.shape[0])
            return self._mean(elements)
        if vectorizes():
            raise InputError(
                "torch.vmap cannot enumerate the tuples of sets whose sizes are values: leave the "
                "mask out, or encode the sets one after the other."
            )
        counts = mask.sum(1)
        self._check_number_of_tuples(counts.tolist())
        members, found = [], []
        for size in counts.unique().tolist():
            sets = (counts == size).nonzero().squeeze(1)
            present = elements[sets][mask[sets]].unflatten(0, (len(sets), size))
            members.append(sets)
            found.append(self._mean(present))
        return torch.cat(found)[torch.cat(members).argsort()]

    def _check_number_of_tuples(self, sizes: list[int]) -> None:
        """Raise InputError if sets of these sizes have more than MAX_TUPLES tuples."""
        if self.num_samples is None and sum(map(self._number_of_tuples, sizes)) > MAX_TUPLES:
            raise InputError(
                f"expected at most {MAX_TUPLES:,} ordered tuples of {self.arity} elements in a "
                f"batch; {len(sizes)} sets of up to {max(sizes)} elements have more. Set "
                "num_samples, the number to draw for each set, or a smaller arity."
            )

    def _number_of_tuples(self, size: int) -> int:
        if self.num_samples is not None:
            return self.num_samples
        return math.perm(size, self._taken(size))

    def _taken(self, size: int) -> int:
        """The number of elements in a tuple of a set of this size, without padding."""
        return size if self.arity is None else min(self.arity, size)

    def _mean(self, elements: Tensor) -> Tensor:
        """The mean over tuples of sets (B, n, d) of one size, a block of tuples at a time."""
        batch, size, width = elements.shape
        number = self._number_of_tuples(size)
        rows = max(1, BLOCK_NUMBERS // (width * (self.arity or size)))
        totals: dict[int, Tensor] = {}  # by the first set of a tile
        for sets, numbers in tiles(batch, number, rows):
            part = self._sum(elements[sets], numbers)
            totals[sets.start] = totals.get(sets.start, 0) + part
        return (torch.cat(list(totals.values())) / number).to(elements.dtype)

    def _sum(self, elements: Tensor, numbers: slice) -> Tensor:
        """The sum of the function over the tuples with these numbers, or over random tuples."""
        tuples = self._tuples(elements, numbers)
        values = self.function(tuples)
        if not isinstance(values, Tensor) or values.shape[:1] != tuples.shape[:1]:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"function must map {tuple(tuples.shape)} to a tensor ({len(tuples)}, p), one row "
                f"for each tuple; got {got}. Wrap it in a module that returns such a tensor."
            )
        by_set = values.unflatten(0, (len(elements), -1))
        return by_set.sum(1, dtype=accumulator_dtype(values.device))

    def _tuples(self, elements: Tensor, numbers: slice) -> Tensor:
        """Tuples (B * t, k, d), set by set."""
        batch, size = elements.shape[:2]
        taken, device = self._taken(size), elements.device
        if self.num_samples is None:
            places = enumerate_tuples(numbers, size, taken, device).unsqueeze(0)
        else:
            shape = (batch, numbers.stop - numbers.start)
            places = draw_tuples(shape, size, taken, device)
        starts = torch.arange(0, batch * size, size, device=device)
        rows = (places + starts[:, None, None]).flatten()
        tuples = elements.flatten(0, 1).index_select(0, rows).unflatten(0, (-1, taken))
        missing = 0 if self.arity is None else self.arity - taken
        return pad(tuples, (0, 0, 0, missing)) if missing else tuples


def enumerate_tuples(numbers: slice, size: int, taken: int, device: torch.device) -> Tensor:
    """Ordered tuples (t, taken) of distinct integers below `size`, by their lexicographic number.

    >>> enumerate_tuples(slice(2, 6), size=3, taken=2, device=torch.device("cpu")).tolist()
    [[1, 0], [1, 2], [2, 0], [2, 1]]
    """
    number = torch.arange(numbers.start, numbers.stop, device=device)
    skips = []
    for choices in range(size - taken + 1, size + 1):
        skips.append(number % choices)
        number = number // choices
    return _distinct(torch.stack(skips[::-1], -1))


def draw_tuples(shape: tuple[int, ...], size: int, taken: int, device: torch.device) -> Tensor:
    """Draw uniformly random ordered tuples (*shape, taken) of distinct integers below `size`.

    >>> draw_tuples((5,), size=4, taken=4, device=torch.device("cpu")).sort().values.unique(dim=0)
    tensor([[0, 1, 2, 3]])
    """
    if 2 * taken > size:
        # Sort random keys. Keys in float32 could tie, and ties are not shuffled.
        keys = torch.rand(*shape, size, dtype=accumulator_dtype(device), device=device)
        return keys.argsort(-1)[..., :taken]
    choices = range(size, size - taken, -1)  # one from those that remain, each time
    return _distinct(torch.stack([torch.randint(c, shape, device=device) for c in choices], -1))


def _distinct(skips: Tensor) -> Tensor:
    """Distinct integers (..., k): each is the skips-th of those that were not taken before it."""
    for position in reversed(range(skips.shape[-1] - 1)):
        later = skips[..., position + 1 :]
        later += later >= skips[..., position : position + 1]
    return skips
