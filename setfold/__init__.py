"""setfold folds a set of any size into one vector.

Names are imported when they are first used, so that the command line need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from setfold import distributed as distributed
    from setfold.checks import check as check
    from setfold.checks import check_all as check_all
    from setfold.composition import Composition as Composition
    from setfold.composition import SlotPool as SlotPool
    from setfold.encoder import SetEncoder as SetEncoder
    from setfold.encoder import StreamingSetEncoder as StreamingSetEncoder
    from setfold.encoders.attention_pool import AttentionPool as AttentionPool
    from setfold.encoders.attention_pool import GatedAttentionPool as GatedAttentionPool
    from setfold.encoders.deep_sets import DeepSets as DeepSets
    from setfold.encoders.deep_sets import Pool as Pool
    from setfold.encoders.equivariant import EquivariantDeepSets as EquivariantDeepSets
    from setfold.encoders.equivariant import EquivariantLayer as EquivariantLayer
    from setfold.encoders.fspool import FSPool as FSPool
    from setfold.encoders.hierarchical import (
        HierarchicalSlotSetEncoder as HierarchicalSlotSetEncoder,
    )
    from setfold.encoders.janossy import JanossyPool as JanossyPool
    from setfold.encoders.set_norm import Moments as Moments
    from setfold.encoders.set_norm import SetNorm as SetNorm
    from setfold.encoders.set_transformer import ISAB as ISAB
    from setfold.encoders.set_transformer import MAB as MAB
    from setfold.encoders.set_transformer import PMA as PMA
    from setfold.encoders.set_transformer import SAB as SAB
    from setfold.encoders.set_transformer import FullSetTransformer as FullSetTransformer
    from setfold.encoders.set_transformer import SeedAttention as SeedAttention
    from setfold.encoders.set_transformer import SetTransformer as SetTransformer
    from setfold.encoders.slot_attention import SlotAttention as SlotAttention
    from setfold.encoders.slot_set import SlotSetEncoder as SlotSetEncoder
    from setfold.encoders.wrong_way import ChunkAverage as ChunkAverage
    from setfold.encoders.wrong_way import PublishedSlotSetEncoder as PublishedSlotSetEncoder
    from setfold.errors import CancelledAttentionWarning as CancelledAttentionWarning
    from setfold.errors import DescriptionError as DescriptionError
    from setfold.errors import DistributedError as DistributedError
    from setfold.errors import FileError as FileError
    from setfold.errors import InputError as InputError
    from setfold.errors import NonFiniteError as NonFiniteError
    from setfold.errors import NotRemovableError as NotRemovableError
    from setfold.errors import SetfoldError as SetfoldError
    from setfold.errors import StateMismatchError as StateMismatchError
    from setfold.folding import fold as fold
    from setfold.io.models import load as load
    from setfold.io.models import save as save
    from setfold.io.partials import merge_partials as merge_partials
    from setfold.io.partials import pack_partials as pack_partials
    from setfold.io.partials import partial_states as partial_states
    from setfold.io.partials import read_partials as read_partials
    from setfold.io.partials import unpack_partials as unpack_partials
    from setfold.jobs.encode import encode_sets as encode_sets
    from setfold.jobs.states import merge_states as merge_states
    from setfold.jobs.states import readout_states as readout_states
    from setfold.jobs.states import update_states as update_states
    from setfold.passes import Layer as Layer
    from setfold.passes import LayeredSetEncoder as LayeredSetEncoder
    from setfold.passes import MultiPassSetEncoder as MultiPassSetEncoder
    from setfold.state import SetState as SetState
    from setfold.whole import WholeSetEncoder as WholeSetEncoder

__version__ = "0.1.0"

_HOMES = {
    "setfold.checks": ("check", "check_all"),
    "setfold.composition": ("Composition", "SlotPool"),
    "setfold.encoder": ("SetEncoder", "StreamingSetEncoder"),
    "setfold.encoders.attention_pool": ("AttentionPool", "GatedAttentionPool"),
    "setfold.encoders.deep_sets": ("DeepSets", "Pool"),
    "setfold.encoders.equivariant": ("EquivariantDeepSets", "EquivariantLayer"),
    "setfold.encoders.fspool": ("FSPool",),
    "setfold.encoders.hierarchical": ("HierarchicalSlotSetEncoder",),
    "setfold.encoders.janossy": ("JanossyPool",),
    "setfold.encoders.set_norm": ("Moments", "SetNorm"),
    "setfold.encoders.set_transformer": (
        "ISAB",
        "MAB",
        "PMA",
        "SAB",
        "FullSetTransformer",
        "SeedAttention",
        "SetTransformer",
    ),
    "setfold.encoders.slot_attention": ("SlotAttention",),
    "setfold.encoders.slot_set": ("SlotSetEncoder",),
    "setfold.encoders.wrong_way": ("ChunkAverage", "PublishedSlotSetEncoder"),
    "setfold.errors": (
        "CancelledAttentionWarning",
        "DescriptionError",
        "DistributedError",
        "FileError",
        "InputError",
        "NonFiniteError",
        "NotRemovableError",
        "SetfoldError",
        "StateMismatchError",
    ),
    "setfold.folding": ("fold",),
    "setfold.io.models": ("load", "save"),
    "setfold.io.partials": (
        "merge_partials",
        "pack_partials",
        "partial_states",
        "read_partials",
        "unpack_partials",
    ),
    "setfold.jobs.encode": ("encode_sets",),
    "setfold.jobs.states": ("merge_states", "readout_states", "update_states"),
    "setfold.passes": ("Layer", "LayeredSetEncoder", "MultiPassSetEncoder"),
    "setfold.state": ("SetState",),
    "setfold.whole": ("WholeSetEncoder",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("distributed",)

__all__ = sorted([*_HOME_OF, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"setfold.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'setfold' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return __all__
