"""Models for tables: what `setfold train` tries.

All begin with the columns of the table.

    statistics    count, mean, deviation, minimum and maximum of each column, and a linear model
    deep-sets     mean and maximum of learned features
    slots         slots that learned features attend to
    attention     gated attention over learned features
    places        slots on a grid over the columns that are positions, and convolutions
    instances     gated attention and a linear model, nothing else

"deep-sets", "slots", "attention" and "places" keep the plain statistics of the set beside what they
learn. Their head begins as the linear model of these statistics, so training starts from the best
that plain statistics and a linear model can do.

"instances" is for multiple-instance learning. Its prediction is a weighted mean of linear
predictions for the elements, so the weights explain it completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import LayeredSetEncoder
from setfold.encoders.attention_pool import GatedAttentionPool
from setfold.encoders.concat import Concat
from setfold.encoders.deep_sets import DeepSets
from setfold.encoders.placed_slots import PlacedSlotEncoder
from setfold.encoders.places import Grid
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.encoders.summary import SummaryStatistics
from setfold.errors import InputError
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.heads import GridHead, ResidualHead, Standardize
from setfold.preprocessing.kinds import TimeColumn
from setfold.preprocessing.relative import RelativeLayer
from setfold.preprocessing.targets import Classes, Target

STATISTICS, PLACES, INSTANCES = "statistics", "places", "instances"
LEARNED = ("deep-sets", "slots", "attention")
ATTENTIVE = ("attention", INSTANCES)  # their weights sum to 1 over the elements of a set
HIDDEN = 64
SLOTS, SLOT_DIM = 8, 16
CELLS = {1: 32, 2: 14, 3: 6}  # of a grid along each axis, by the number of axes
TAIL = 0.01  # the share of sets whose elements may lie outside the grid

Model = Composition | LayeredSetEncoder


@dataclass(frozen=True)
class Design:
    """What all candidates share.

    Args:
        columns: The columns of the table.
        target: What to predict.
        center: Columns to center in each set.
        position: Columns that are the position of an element.
    """

    columns: Columns
    target: Target
    center: Sequence[str] = ()
    position: Sequence[str] = ()

    @property
    def places(self) -> list[int]:
        """The places of the position in an element."""
        return [place for name in self.position for place in self.columns.places_out(name)]

    def bounds(self, statistics: Tensor) -> tuple[list[float], list[float]]:
        """The box of most positions: the lower and the upper corner.

        Args:
            statistics: `(n, 1 + 4 d)`, the readouts of `SummaryStatistics` for the training sets.
        """
        low, high = statistics[:, 1:].double().chunk(4, 1)[2:]
        lower = np.quantile(low[:, self.places].numpy(), TAIL, 0)
        upper = np.quantile(high[:, self.places].numpy(), 1 - TAIL, 0)
        same = upper - lower < 1e-6
        return (lower - same).tolist(), (upper + same).tolist()


def choose_names(encoder: str, task: str | None, position: Sequence[str]) -> list[str]:
    """Return the candidates that compete.

    Args:
        encoder: "auto", or the name of a candidate.
        task: "multiple-instance" for models whose weights explain their predictions.
        position: Columns that are the position of an element.

    >>> choose_names("auto", None, [])
    ['statistics', 'deep-sets', 'slots', 'attention']
    >>> choose_names("auto", "multiple-instance", [])
    ['instances']
    """
    if encoder != "auto":
        return [encoder]
    if task == "multiple-instance":
        return [INSTANCES]
    return [STATISTICS, *LEARNED, *([PLACES] if position else [])]


def build_plain(design: Design) -> Model:
    """Build the candidate "statistics": plain statistics and a linear model."""
    plain = SummaryStatistics(design.columns.dim_out)
    return _assemble(design, plain, nn.Linear(plain.dim_readout, _outputs(design)))


def build_model(name: str, design: Design, statistics: Tensor) -> Model:
    """Build an untrained candidate.

    Args:
        name: "deep-sets", "slots", "attention", "places" or "instances".
        design: What all candidates share.
        statistics: The readouts of `SummaryStatistics` for the training sets.
    """
    dim, outputs = design.columns.dim_out, _outputs(design)
    if name == INSTANCES:
        alone = Concat({name: _learned("attention", dim)})
        return _assemble(design, alone, nn.Linear(HIDDEN, outputs))
    plain = SummaryStatistics(dim)
    if name == PLACES:
        grid = _grid(design, statistics)
        encoder = Concat({STATISTICS: plain, name: grid})
        assert grid.places.shape is not None
        head = GridHead(plain.dim_readout, grid.dim_readout, grid.places.shape, outputs, HIDDEN)
        return _assemble(design, encoder, head)
    encoder = Concat({STATISTICS: plain, name: _learned(name, dim)})
    width = encoder.dim_readout
    return _assemble(design, encoder, ResidualHead(width, plain.dim_readout, outputs, HIDDEN))


def relative_layer(columns: Columns, center: Sequence[str]) -> RelativeLayer | None:
    """Return the layer that makes columns relative to their set; None if there is none."""
    centered = [place for name in center for place in columns.places_out(name)]
    times = [c for c in columns.all if isinstance(c, TimeColumn) and c.age]
    latest = [columns.places_out(column.name)[0] for column in times]
    if not centered and not latest:
        return None
    return RelativeLayer(columns.dim_out, centered, latest)


def encoder_of(model: Model) -> StreamingSetEncoder:
    """Return the encoder within a model."""
    return model.encoder if isinstance(model, Composition) else model.pool


def _outputs(design: Design) -> int:
    return len(design.target.labels) if isinstance(design.target, Classes) else 1


def _assemble(design: Design, encoder: SummaryStatistics | Concat, last: nn.Module) -> Model:
    """Put columns before an encoder, and the last layers and the target behind it."""
    columns, target = deepcopy(design.columns), deepcopy(design.target)  # models share no weights
    head = nn.Sequential(Standardize(encoder.dim_readout), last, target)
    layer = relative_layer(columns, design.center)
    if layer is None:
        return Composition(encoder, columns, head)
    return LayeredSetEncoder([layer], encoder, columns, head)


def _grid(design: Design, statistics: Tensor) -> PlacedSlotEncoder:
    """Build slots on a grid over the positions."""
    places, dim = design.places, design.columns.dim_out
    if len(places) not in CELLS:
        raise InputError(
            f"the encoder 'places' needs 1 to {max(CELLS)} columns that are the position of an "
            f"element; got {list(design.position)}. Name them with --position."
        )
    low, high = design.bounds(statistics)
    values = ["offsets"] if dim == len(places) else ["features", "offsets"]
    return PlacedSlotEncoder(
        dim,
        Grid(low, high, [CELLS[len(places)]] * len(places)),
        values=values,
        aggregate=["mass", "mean", "weighted_mean"],
        position=places,
    )


def _learned(name: str, dim: int) -> StreamingSetEncoder:
    features = nn.Sequential(
        nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
    )
    if name == "deep-sets":
        return DeepSets(features, HIDDEN, ["mean", "max"])
    if name == "slots":
        slots = SlotSetEncoder(
            HIDDEN, SLOTS, SLOT_DIM, SLOT_DIM, ["weighted_mean", "max"], slots="learned"
        )
        return Composition(slots, features)
    assert name == "attention"
    return Composition(GatedAttentionPool(HIDDEN, HIDDEN), features)
