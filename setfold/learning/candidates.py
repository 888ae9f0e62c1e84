"""Models for tables: what `setfold train` tries.

All begin with the columns of the table, and all but "statistics" keep the plain statistics of the
set beside what they learn. Their head begins as the linear model of these statistics, so training
starts from the best that plain statistics and a linear model can do.

    statistics    count, mean, deviation, minimum and maximum of each column, and a linear model
    deep-sets     mean and maximum of learned features
    slots         slots that learned features attend to
    attention     gated attention over elements; its weights explain a prediction
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from torch import nn

from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import LayeredSetEncoder
from setfold.encoders.attention_pool import GatedAttentionPool
from setfold.encoders.concat import Concat
from setfold.encoders.deep_sets import DeepSets
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.encoders.summary import SummaryStatistics
from setfold.errors import InputError
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.heads import ResidualHead, Standardize
from setfold.preprocessing.kinds import TimeColumn
from setfold.preprocessing.relative import RelativeLayer
from setfold.preprocessing.targets import Classes, Target

STATISTICS = "statistics"
CANDIDATES = (STATISTICS, "deep-sets", "slots", "attention")
HIDDEN = 64
SLOTS, SLOT_DIM = 8, 16

Model = Composition | LayeredSetEncoder


def build_model(name: str, columns: Columns, target: Target, center: Sequence[str] = ()) -> Model:
    """Build an untrained model.

    Args:
        name: One of `CANDIDATES`.
        columns: The columns of the table.
        target: What to predict.
        center: Columns to center in each set.
    """
    columns, target = deepcopy(columns), deepcopy(target)  # models share no weights
    dim = columns.dim_out
    outputs = len(target.labels) if isinstance(target, Classes) else 1
    plain = SummaryStatistics(dim)
    encoder: SummaryStatistics | Concat = plain
    last: nn.Module = nn.Linear(plain.dim_readout, outputs)
    if name != STATISTICS:
        encoder = Concat({STATISTICS: plain, name: _learned(name, dim)})
        last = ResidualHead(encoder.dim_readout, plain.dim_readout, outputs, HIDDEN)
    head = nn.Sequential(Standardize(encoder.dim_readout), last, target)
    layer = relative_layer(columns, center)
    if layer is None:
        return Composition(encoder, columns, head)
    return LayeredSetEncoder([layer], encoder, columns, head)


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
    if name == "attention":
        return Composition(GatedAttentionPool(HIDDEN, HIDDEN), features)
    raise InputError(f"encoder must be one of auto, {', '.join(CANDIDATES)}; got {name!r}.")
