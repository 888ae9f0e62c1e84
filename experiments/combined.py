"""Settings of encoders that combine pools over one stream: candidates for a better one-pass encoder.

    Beside      aggregates of the elements beside a Slot Set Encoder
    EveryLayer  an aggregate of the features after every layer, not only after the last
    Sharp       slots whose attention begins sharp

All fold in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import setfold
from experiments.pools import Slots


@dataclass(frozen=True)
class Beside:
    """Aggregates of the elements beside slots; a linear layer maps both to dim_out.

    Args:
        aggregates: aggregates of the elements, such as ("mean", "max").
        slots: settings of the slots; each outputs `slots.width` numbers.

    >>> pool = Beside(("mean", "max"), Slots(8, width=16))
    >>> pool.build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    aggregates: tuple[str, ...]
    slots: Slots

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        parts = setfold.Concat(
            {
                "elements": setfold.Pool(dim_in, list(self.aggregates)),
                "slots": self.slots.encoder(dim_in, dim_out),
            }
        )
        return setfold.Composition(parts, features, nn.Linear(parts.dim_readout, dim_out))


@dataclass(frozen=True)
class EveryLayer:
    """The maximum of the features after every layer; a linear layer maps all to dim_out.

    >>> features = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU())
    >>> encoder = EveryLayer().build(dim_in=16, dim_out=64, features=features)
    >>> encoder.encoder.dim_in, encoder(torch.randn(2, 100, 3)).shape
    (24, torch.Size([2, 64]))
    """

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        if not isinstance(features, nn.Sequential):
            raise setfold.InputError(
                "EveryLayer needs features that are an nn.Sequential of layers; got "
                f"{type(features).__name__}."
            )
        layers = AllLayers(features)
        pool = setfold.Pool(layers.dim_out, "max")
        return setfold.Composition(pool, layers, nn.Linear(pool.dim_readout, dim_out))


class AllLayers(nn.Module):
    """Concatenates the outputs of all layers of a network, after activations: (N, d) -> (N, dim_out)."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        flat = [one for one in layers.modules() if not isinstance(one, nn.Sequential)]
        self.layers = nn.Sequential(*flat)
        self.dim_out = sum(one.out_features for one in flat if isinstance(one, nn.Linear))

    def forward(self, elements: Tensor) -> Tensor:
        found = []
        for number, layer in enumerate(self.layers, 1):
            elements = layer(elements)
            if isinstance(layer, nn.ReLU | nn.Tanh) or number == len(self.layers):
                found.append(elements)
        return torch.cat(found, -1)


@dataclass(frozen=True)
class Sharp(Slots):
    """Slots with cosine similarity that begin with another temperature than the library's.

    >>> Sharp(8, slots="learned", similarity="cosine").encoder(3, 64).temperature.item()
    10.0
    """

    temperature: float = 10.0

    def encoder(self, dim_in: int, dim_out: int) -> setfold.SlotSetEncoder:
        encoder = super().encoder(dim_in, dim_out)
        nn.init.constant_(encoder.temperature, self.temperature)
        return encoder
