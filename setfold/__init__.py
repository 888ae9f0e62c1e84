"""setfold folds a set of any size into one vector."""

from setfold.composition import Composition, SlotPool
from setfold.encoder import SetEncoder, StreamingSetEncoder
from setfold.encoders.deep_sets import DeepSets, Pool
from setfold.encoders.hierarchical import HierarchicalSlotSetEncoder
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.errors import (
    CancelledAttentionWarning,
    DescriptionError,
    FileError,
    InputError,
    NonFiniteError,
    NotRemovableError,
    SetfoldError,
    StateMismatchError,
)
from setfold.fold import fold
from setfold.state import SetState

__all__ = [
    "CancelledAttentionWarning",
    "Composition",
    "DeepSets",
    "DescriptionError",
    "FileError",
    "HierarchicalSlotSetEncoder",
    "InputError",
    "NonFiniteError",
    "NotRemovableError",
    "Pool",
    "SetEncoder",
    "SetState",
    "SetfoldError",
    "SlotPool",
    "SlotSetEncoder",
    "StateMismatchError",
    "StreamingSetEncoder",
    "__version__",
    "fold",
]

__version__ = "0.1.0"
