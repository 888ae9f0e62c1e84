"""Encoders that fold in several passes. Each pass is a fold, and its readout is the context of the
next pass.

A layer that pools the set into a few vectors, and then updates each element given these vectors, is
a fold followed by an element-wise function. So a network of L such layers and a last pool folds
exactly in L + 1 passes over the chunks, in constant memory: the features of an element after layer
l follow from the element and the readouts of the first l passes.

    MultiPassSetEncoder    the interface: `begin` a pass, given the readouts of earlier passes
    Layer                  pool, then look: an element-wise function of element and readout
    LayeredSetEncoder      features -> layers -> pool -> head
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from setfold.core.absorb import check_encoding
from setfold.core.arguments import check_modules
from setfold.core.composition import Composition, apply_features
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import spread
from setfold.core.whole import WholeSetEncoder
from setfold.errors import InputError
from setfold.kernels.modes import autocasts


class MultiPassSetEncoder(WholeSetEncoder):
    """A set encoder that folds exactly if its chunks can be read several times.

    `encoder(elements)` encodes whole sets. `setfold.fold(encoder, chunks)` reads the chunks
    `passes` times and returns the same encoding.
    """

    passes: int

    @abstractmethod
    def begin(
        self, found: tuple[Tensor, ...], batch_size: int
    ) -> tuple[StreamingSetEncoder, SetState]:
        """The encoder of the next pass, and the state that its fold begins with.

        Args:
            found: the readout of each earlier pass, (B, ...).
            batch_size: the number B of sets.
        """

    def conclude(self, found: tuple[Tensor, ...], count: Tensor) -> Tensor:
        """The encoding from the readouts of all passes and the number of elements (B,)."""
        encoding = found[-1]
        encoding = torch.where(spread(count > 0, encoding), encoding, 0)
        check_encoding(encoding)
        return encoding if self.head is None else self.head(encoding)


class Layer(nn.Module):
    """Pool the set, then update each element given the result. Equivariant; folds in two passes.

    Args:
        pool: a streaming encoder, (B, n, d) -> (B, ...).
        look: an element-wise module, called as look(elements (B, n, d), summary (B, ...)), where
            summary is the readout of the pool. Returns (B, n, d').

    >>> import setfold
    >>> class Subtract(nn.Module):
    ...     def forward(self, elements, summary):
    ...         return elements - summary.unsqueeze(1)
    >>> layer = Layer(setfold.Pool(3, "mean"), Subtract())
    >>> layer(torch.randn(2, 100, 3)).mean(1).abs().max() < 1e-6
    tensor(True)
    """

    def __init__(self, pool: StreamingSetEncoder, look: nn.Module) -> None:
        super().__init__()
        if not isinstance(pool, StreamingSetEncoder):
            raise InputError(
                f"pool must be a streaming set encoder; got {type(pool).__name__}. The order is "
                "Layer(pool, look)."
            )
        if not isinstance(look, nn.Module):
            raise InputError(
                f"look must be a torch.nn.Module, called as look(elements, summary); got {look!r}."
            )
        self.pool = pool
        self.look = look

    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, d) -> (B, n, d'); the output is zero where the mask (B, n) is False."""
        if mask is not None:  # an empty set has no element to replace its padding with
            elements = elements.masked_fill(~spread(mask, elements), 0)
        return apply_features(self.look, elements, mask, (apply_pool(self.pool, elements, mask),))


def apply_pool(pool: StreamingSetEncoder, elements: Tensor, mask: Tensor | None) -> Tensor:
    """Call a pool on features, which autocast may have cast to another dtype."""
    like = pool.first_weight
    if like is not None and autocasts(elements.device):
        elements = elements.to(like.dtype)
    return pool(elements, mask)


class LayeredSetEncoder(MultiPassSetEncoder):
    """features -> layers -> pool -> head. Folds exactly in len(layers) + 1 passes.

    Args:
        layers: a list of `Layer`, such as `ISAB` or `SetNorm`.
        pool: a streaming encoder for the output of the last layer.
        features: a module applied to each element before the first layer, (N, ...) -> (N, d).
        head: a module on the readout (B, ...) of the pool.

    >>> import setfold
    >>> layers = [setfold.SetNorm(3), setfold.ISAB(3, num_inducing=4, num_heads=1)]
    >>> encoder = LayeredSetEncoder(layers, pool=setfold.Pool(3, "max")).eval()
    >>> encoder.passes
    3
    >>> elements = torch.randn(2, 100, 3)
    >>> found = setfold.fold(encoder, elements.split(10, dim=1))
    >>> torch.allclose(found, encoder(elements), atol=1e-5)
    True
    """

    obstacle = "message passing: each layer pools the whole set before the next layer runs"

    def __init__(
        self,
        layers: Sequence[Layer],
        pool: StreamingSetEncoder,
        features: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, Sequence | nn.ModuleList):
            raise InputError(f"layers must be a list of setfold.Layer; got {layers!r}.")
        if not all(isinstance(layer, Layer) for layer in layers):
            kinds = [type(layer).__name__ for layer in layers]
            raise InputError(
                f"layers must be a list of setfold.Layer, such as setfold.ISAB; got {kinds}."
            )
        if not isinstance(pool, StreamingSetEncoder):
            raise InputError(f"pool must be a streaming set encoder; got {type(pool).__name__}.")
        check_modules(features=features, head=head)
        pools = [*(layer.pool for layer in layers), pool]
        for layer, following in zip(layers, pools[1:], strict=True):
            width = getattr(layer, "dim_out", None)  # optional for user-defined layers
            if width is not None and following.dim_in not in (None, width):
                raise InputError(
                    f"{type(layer).__name__} returns elements of width {width}, but "
                    f"{type(following).__name__}, which follows it, has dim_in={following.dim_in}."
                )
        self.features = features
        self.layers = nn.ModuleList(layers)
        self.pool = pool
        self.head = head
        self.dim_in = pools[0].dim_in if features is None else None
        self.passes = len(layers) + 1

    @property
    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        if self.features is not None:
            elements = apply_features(self.features, elements, mask)
        for layer in self._layers:
            elements = layer(elements, mask)
        return apply_pool(self.pool, elements, mask)

    def begin(
        self, found: tuple[Tensor, ...], batch_size: int
    ) -> tuple[StreamingSetEncoder, SetState]:
        pools = [*(layer.pool for layer in self._layers), self.pool]
        looks = [layer.look for layer in self._layers[: len(found)]]
        features = _Looks(self.features, looks) if looks else self.features
        stage = Composition(pools[len(found)], features)
        stage.dim_in = self.dim_in  # the width of the elements, not of the features
        return stage, stage.initial_state(batch_size, context=found)


class _Looks(nn.Module):
    """The features of elements after some layers, given the readouts of their pools."""

    def __init__(self, features: nn.Module | None, looks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.features = features
        self.looks = nn.ModuleList(looks)

    def forward(self, elements: Tensor, *summaries: Tensor) -> Tensor:
        if self.features is not None:
            elements = apply_features(self.features, elements, None)
        for look, summary in zip(self.looks, summaries, strict=True):
            elements = look(elements, summary)
        return elements
