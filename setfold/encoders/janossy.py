"""Janossy pooling (Murphy, Srinivasan, Rao and Ribeiro, ICLR 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from setfold.core.inputs import check_sizes
from setfold.core.whole import WholeSetEncoder
from setfold.errors import InputError
from setfold.kernels.precision import accumulator_dtype
from setfold.kernels.tiles import tiles

MAX_TUPLES = 10**8  # in a batch; who asks for more has hardly counted them
BLOCK_NUMBERS = 1 << 18  # of elements in the tuples that are looked at together


class JanossyPool(WholeSetEncoder):
    """The mean, over the orders of a set, of a function that sees the first k elements.

        y = 1/n! sum_pi f(x_pi(1), ..., x_pi(k))

    f need not be invariant: the mean is. It runs over the n! / (n - k)! ordered tuples of distinct
    elements, all of which are visited, or over a sample of them (pi-SGD). A sample is drawn anew
    for each set by each call, in training and in evaluation, so that its mean is invariant in
    expectation only; `torch.manual_seed` repeats it. A set of fewer than k elements gives tuples of
    all of them, filled up with zeros at the end.

    Args:
        function: a module that looks at each tuple alone, (N, k, d) -> (N, p); with arity None at
            sequences, (N, n, d) -> (N, p) for every n.
        dim_in: width d of the elements.
        arity: the number k of elements that the function sees; None for whole permutations,
            which must be sampled.
        num_samples: the number of permutations that are drawn for each set; None for all tuples.

    >>> pairs = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3, 16), nn.ReLU())
    >>> JanossyPool(pairs, dim_in=3)(torch.randn(4, 10, 3)).shape
    torch.Size([4, 16])

    A recurrent network reads whole permutations, once it returns nothing but its last state:

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
    obstacle = "permutations: tuples that straddle chunks are never seen"

    def __init__(
        self,
        function: nn.Module,
        dim_in: int,
        arity: int | None = 2,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(function, nn.Module):
            raise InputError(f"function must be a torch.nn.Module; got {function!r}.")
        check_sizes(dim_in=dim_in)
        if arity is not None:
            check_sizes(arity=arity)
        if num_samples is not None:
            check_sizes(num_samples=num_samples)
        if arity is None and num_samples is None:
            raise InputError(
                "whole permutations (arity=None) are too many to visit them all: say with num_samples "
                "how many to draw for each set, or give an arity such as 2."
            )
        self.function = function
        self.dim_in = dim_in
        self.arity = arity
        self.num_samples = num_samples
        # Remembers device and dtype, which a function without parameters would not.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, arity={self.arity}, num_samples={self.num_samples}"

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            self._refuse_too_many([elements.shape[1]] * elements.shape[0])
            return self._mean(elements)
        counts = mask.sum(1)
        self._refuse_too_many(counts.tolist())
        members, found = [], []
        for size in counts.unique().tolist():
            sets = (counts == size).nonzero().squeeze(1)
            present = elements[sets][mask[sets]].unflatten(0, (len(sets), size))
            members.append(sets)
            found.append(self._mean(present))
        return torch.cat(found)[torch.cat(members).argsort()]

    def _refuse_too_many(self, sizes: list[int]) -> None:
        if self.num_samples is None and sum(map(self._number_of_tuples, sizes)) > MAX_TUPLES:
            raise InputError(
                f"expected at most {MAX_TUPLES:,} ordered tuples of {self.arity} elements in a batch; "
                f"{len(sizes)} sets of up to {max(sizes)} elements have more. Give num_samples, to "
                "draw that many for each set, or a smaller arity."
            )

    def _number_of_tuples(self, size: int) -> int:
        if self.num_samples is not None:
            return self.num_samples
        return math.perm(size, self._taken(size))

    def _taken(self, size: int) -> int:
        """How many elements of a set a tuple holds."""
        return size if self.arity is None else min(self.arity, size)

    def _mean(self, elements: Tensor) -> Tensor:
        """The mean over tuples of sets (B, n, d) of one size, a block of tuples at a time."""
        batch, size, width = elements.shape
        number = self._number_of_tuples(size)
        rows = max(1, BLOCK_NUMBERS // (width * (self.arity or size)))
        totals: dict[int, Tensor] = {}  # by the first of the sets
        for sets, numbers in tiles(batch, number, rows):
            part = self._sum(elements[sets], numbers)
            totals[sets.start] = totals.get(sets.start, 0) + part
        return (torch.cat(list(totals.values())) / number).to(elements.dtype)

    def _sum(self, elements: Tensor, numbers: slice) -> Tensor:
        """The sum of the function over the tuples of these numbers, or over as many random ones."""
        tuples = self._tuples(elements, numbers)
        made = self.function(tuples)
        if not isinstance(made, Tensor) or made.shape[:1] != tuples.shape[:1]:
            what = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise InputError(
                f"function must map {tuple(tuples.shape)} to a tensor ({len(tuples)}, p), a row for "
                f"each tuple; got {what}. Wrap it in a module that does."
            )
        by_set = made.unflatten(0, (len(elements), -1))
        return by_set.sum(1, dtype=accumulator_dtype(made.device))

    def _tuples(self, elements: Tensor, numbers: slice) -> Tensor:
        """Tuples (B * t, k, d), those of one set after those of another."""
        batch, size = elements.shape[:2]
        taken, device = self._taken(size), elements.device
        if self.num_samples is None:
            places = enumerated(numbers, size, taken, device).unsqueeze(0)
        else:
            places = drawn((batch, numbers.stop - numbers.start), size, taken, device)
        starts = torch.arange(0, batch * size, size, device=device)
        rows = (places + starts[:, None, None]).flatten()
        tuples = elements.flatten(0, 1).index_select(0, rows).unflatten(0, (-1, taken))
        missing = 0 if self.arity is None else self.arity - taken
        return pad(tuples, (0, 0, 0, missing)) if missing else tuples


def enumerated(numbers: slice, size: int, taken: int, device: torch.device) -> Tensor:
    """Ordered tuples of distinct places below `size`, by their number in lexicographic order.

    >>> enumerated(slice(2, 6), size=3, taken=2, device=torch.device("cpu")).tolist()
    [[1, 0], [1, 2], [2, 0], [2, 1]]
    """
    number = torch.arange(numbers.start, numbers.stop, device=device)
    skips = []
    for choices in range(size - taken + 1, size + 1):
        skips.append(number % choices)
        number = number // choices
    return _distinct(torch.stack(skips[::-1], -1))


def drawn(shape: tuple[int, ...], size: int, taken: int, device: torch.device) -> Tensor:
    """Uniformly random ordered tuples (*shape, taken) of distinct places below `size`.

    >>> drawn((5,), size=4, taken=4, device=torch.device("cpu")).sort().values.unique(dim=0)
    tensor([[0, 1, 2, 3]])
    """
    if 2 * taken > size:
        # Shuffled as a whole. Keys of single precision would tie, and ties are not shuffled.
        keys = torch.rand(*shape, size, dtype=accumulator_dtype(device), device=device)
        return keys.argsort(-1)[..., :taken]
    choices = range(size, size - taken, -1)  # a few of many: each from those that remain
    return _distinct(torch.stack([torch.randint(c, shape, device=device) for c in choices], -1))


def _distinct(skips: Tensor) -> Tensor:
    """Places (..., k) of which each is the skips-th among those that the ones before it left."""
    for position in reversed(range(skips.shape[-1] - 1)):
        later = skips[..., position + 1 :]
        later += later >= skips[..., position : position + 1]
    return skips
