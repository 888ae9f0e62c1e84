"""Mean and covariance of sets, and the linear maps that follow from those of several classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.readout import Count, mean_of
from setfold.core.state import SetState
from setfold.core.statistic import Field, Fields, Scatter, Statistics
from setfold.encoders.parameter_free import ParameterFreeEncoder
from setfold.errors import InputError

FIELD = "scatter"
SMALLEST = 1e-12  # eigenvalues below this share of the largest one are rounding errors


class Covariance(ParameterFreeEncoder):
    """The mean and the covariance of the elements: (B, n, d) -> (B, 1 + d, d).

        mean = sum_i x_i / n          covariance = sum_i (x_i - mean) (x_i - mean)^T / n

    The first row of the encoding is the mean. The state keeps the count, the mean and the scatter
    matrix, which join without cancellation. If each set holds the elements of one class,
    `linear_discriminant` and `whitening` turn the state into layers.

    Args:
        dim_in: width d of the elements.

    >>> Covariance(2)(torch.tensor([[[1.0, 0.0], [3.0, 2.0]]]))
    tensor([[[2., 1.],
             [1., 1.],
             [1., 1.]]])
    """

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {FIELD: Field(Scatter(), (self.dim_in,))}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {FIELD: Scatter().absorb(elements, mask)}

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        _, mean, scatter = statistics[FIELD]
        return torch.cat([mean.unsqueeze(1), mean_of(scatter, count)], 1).to(self.like.dtype)


def linear_discriminant(state: SetState, shrinkage: float | None = None) -> nn.Linear:
    """Linear discriminant analysis in closed form: a layer from elements to logits of classes.

        logit_c(x) = m_c^T S^-1 x - m_c^T S^-1 m_c / 2 + log(n_c / n)

    with the mean m_c of class c and the covariance S within classes.

    Args:
        state: of `Covariance`, one set per class; no class may be empty.
        shrinkage: from 0 to 1, how far S is moved towards a multiple of the identity; None for the
            oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero, 2010).

    Returns:
        A layer (d -> number of classes) in float64.

    >>> encoder = Covariance(2)
    >>> classes = torch.tensor([[[0.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [4.0, 1.0]]])
    >>> layer = linear_discriminant(encoder.update(encoder.initial_state(2), classes), 0.5)
    >>> layer(torch.tensor([[1.0, 0.0], [3.0, 9.0]], dtype=torch.float64)).argmax(1)
    tensor([0, 1])
    """
    count, mean, covariance = _within_classes(state, shrinkage)
    weight = torch.linalg.solve(covariance, mean.mT).mT  # (C, d)
    bias = (count / count.sum()).log() - (weight * mean).sum(1) / 2
    return _layer(weight, bias)


def whitening(state: SetState, shrinkage: float | None = None) -> nn.Linear:
    """A layer after which the covariance within classes is the identity.

        y = S^-1/2 (x - m)

    with the mean m of all elements and the covariance S within classes. Euclidean distances of its
    outputs are Mahalanobis distances, so nearest class means are the best linear classifier if all
    classes are normal with covariance S.

    Args:
        state: of `Covariance`, one set per class; no class may be empty.
        shrinkage: as for `linear_discriminant`.

    Returns:
        A layer (d -> d) in float64.

    >>> encoder = Covariance(2)
    >>> classes = torch.tensor([[[0.0, 0.0], [0.0, 2.0]], [[8.0, 0.0], [8.0, 2.0]]])
    >>> layer = whitening(encoder.update(encoder.initial_state(2), classes), shrinkage=0.5)
    >>> layer(torch.tensor([4.0, 1.0], dtype=torch.float64)).abs().max() < 1e-12  # the mean
    tensor(True)
    """
    count, mean, covariance = _within_classes(state, shrinkage)
    values, vectors = torch.linalg.eigh(covariance)
    weight = vectors * values.rsqrt() @ vectors.mT
    return _layer(weight, -weight @ (count / count.sum() @ mean))


def _within_classes(state: SetState, shrinkage: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (C,), means (C, d) and the shrunk covariance (d, d) within classes."""
    if not isinstance(state, SetState) or state.fields.get(FIELD, [None])[0] != Scatter():
        raise InputError("expected a state of Covariance, with one set per class.")
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise InputError(f"shrinkage must be from 0 to 1, or None; got {shrinkage!r}.")
    count, mean, scatter = (part.detach() for part in state.statistics[FIELD])
    if len(count) == 0 or not bool((count > 0).all()):
        raise InputError("every class needs at least one element: leave empty classes out.")
    number = float(count.sum())
    covariance = scatter.sum(0) / number
    share = _oracle_shrinkage(covariance, number) if shrinkage is None else shrinkage
    scale = covariance.diagonal().mean()
    if float(scale) == 0:
        raise InputError(
            "all elements of each class are equal: there is no covariance within them."
        )
    unit = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    shrunk = (1 - share) * covariance + share * scale * unit
    values = torch.linalg.eigvalsh(shrunk)
    if float(values[0]) <= SMALLEST * float(values[-1]):
        raise InputError(
            "the covariance within classes is singular: use a larger shrinkage, fewer columns or "
            "more elements."
        )
    return count, mean, shrunk


def _oracle_shrinkage(covariance: Tensor, number: float) -> float:
    """The shrinkage that minimizes the expected squared error for normal elements."""
    width = len(covariance)
    size = float(covariance.square().mean())
    scale = float(covariance.diagonal().mean()) ** 2
    spread = (number + 1) * (size - scale / width)
    return 1.0 if spread <= 0 else min((size + scale) / spread, 1.0)


def _layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    rows, width = weight.shape
    layer = nn.Linear(width, rows, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer
