"""Encoders that fold in several passes: each pass is a fold, and its result the next one's context.

A layer of the form "pool the set into a few vectors, then let every element look at them" is a fold
followed by a function of each element alone. A network of L such layers and a last pooling is
therefore exact in L + 1 passes over the chunks, in constant memory: what an element is at layer
l follows from the element itself and from what the earlier passes found.

    MultiPassSetEncoder    the contract: `begin` a pass, knowing what the earlier ones found
    Layer                  pool, then look
    LayeredSetEncoder      features -> layers -> pool -> head
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from setfold.core.composition import Composition, apply_features
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import spread
from setfold.core.whole import WholeSetEncoder
from setfold.errors import InputError
from setfold.kernels.precision import autocasts


class MultiPassSetEncoder(WholeSetEncoder):
    """A set encoder that folds exactly if its chunks can be read several times.

    `encoder(elements)` encodes whole sets; `setfold.fold(encoder, chunks)` reads the chunks `passes`
    times and gives the same.
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
        return encoding if self.head is None else self.head(encoding)


class Layer(nn.Module):
    """Pool the set, then let every element look at the result: equivariant, and exact in two passes.

    Args:
        pool: a streaming encoder, (B, n, d) -> (B, ...).
        look: a module (elements (B, n, d), summary (B, ...)) -> (B, n, d'), on each element alone.

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
                f"pool must be a streaming set encoder; got {type(pool).__name__}. The order is Layer(pool, look)."
            )
        self.pool = pool
        self.look = look

    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, d) -> (B, n, d'); elements that the mask (B, n) hides come out as zeros."""
        if mask is not None:  # an empty set has nothing that could stand in for its padding
            elements = elements.masked_fill(~spread(mask, elements), 0)
        return apply_features(self.look, elements, mask, (pooled(self.pool, elements, mask),))


def pooled(pool: StreamingSetEncoder, elements: Tensor, mask: Tensor | None) -> Tensor:
    """What a pool makes of features, which come out of autocast in another dtype than they went in."""
    like = pool.first_weight
    if like is not None and autocasts(elements.device):
        elements = elements.to(like.dtype)
    return pool(elements, mask)


class LayeredSetEncoder(MultiPassSetEncoder):
    """features -> layers -> pool -> head, exact in as many passes as there are layers, and one.

    Args:
        layers: each pools the set and lets every element look at the result.
        pool: a streaming encoder for what comes out of the last layer.
        features: a module applied to each element before the first layer, (N, ...) -> (N, d).
        head: any module on the pool's readout (B, ...).

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

    obstacle = "message passing: each layer looks at the whole set before the next one does"

    def __init__(
        self,
        layers: Sequence[Layer],
        pool: StreamingSetEncoder,
        features: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not all(isinstance(layer, Layer) for layer in layers):
            raise InputError("layers must be a list of setfold.Layer, such as setfold.ISAB.")
        if not isinstance(pool, StreamingSetEncoder):
            raise InputError(f"pool must be a streaming set encoder; got {type(pool).__name__}.")
        pools = [*(layer.pool for layer in layers), pool]
        for layer, following in zip(layers, pools[1:], strict=True):
            width = getattr(layer, "dim_out", None)  # layers of one's own need not tell
            if width is not None and following.dim_in not in (None, width):
                raise InputError(
                    f"{type(layer).__name__} puts out elements of width {width}; what follows takes "
                    f"{following.dim_in}."
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
        return pooled(self.pool, elements, mask)

    def begin(
        self, found: tuple[Tensor, ...], batch_size: int
    ) -> tuple[StreamingSetEncoder, SetState]:
        pools = [*(layer.pool for layer in self._layers), self.pool]
        looks = [layer.look for layer in self._layers[: len(found)]]
        features = _Looks(self.features, looks) if looks else self.features
        stage = Composition(pools[len(found)], features)
        stage.dim_in = self.dim_in  # of the elements, whatever the features make of them
        return stage, stage.initial_state(batch_size, context=found)


class _Looks(nn.Module):
    """What an element is after some layers: a function of itself and of what those layers pooled."""

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
