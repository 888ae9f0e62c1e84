"""Why a model breaks a law, where that can be told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from setfold.core.whole import WholeSetEncoder
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.laws.report import CONSISTENCY_LAW

LOOKING = "features that look at other elements of the chunk, not at each one alone"
SELF_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def diagnose(model: Any, elements: Tensor, law: str) -> str | None:
    """The likeliest reason why a model breaks a law, or None.

    Args:
        model: what failed.
        elements: (B, n, d) with which it failed.
        law: the name of the law.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(m, _BatchNorm) and m.training for m in modules):
        return "BatchNorm in training mode normalises by the chunk it sees: call model.eval()"
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in modules):
        return "dropout in training mode draws anew at every call: call model.eval()"
    if isinstance(model, WholeSetEncoder):
        if any(isinstance(m, SlotSetEncoder) and m.training for m in modules):
            return "random slots are drawn anew at every call in training mode: call model.eval()"
        if law == CONSISTENCY_LAW:
            return model.obstacle
        return LOOKING if _a_pass_mixes(model, elements) else None
    if any(isinstance(m, SELF_ATTENTION) for m in modules):
        return "self-attention over elements: each one's features depend on all that are there"
    if _features_mix(model, elements):
        return LOOKING
    return None


def _a_pass_mixes(model: Any, elements: Tensor) -> bool:
    """Whether features or looks of an encoder of several passes change when others leave."""
    found: tuple[Tensor, ...] = ()
    try:
        with torch.no_grad():
            for _ in range(getattr(model, "passes", None) or 0):
                stage, empty = model.begin(found, elements.shape[0])
                if _features_mix(stage, elements, empty.context):
                    return True
                found = (*found, stage.readout(stage.update(empty, elements)))
    except Exception:  # what it raises is told elsewhere
        return False
    return False


def _features_mix(model: Any, elements: Tensor, context: tuple[Tensor, ...] = ()) -> bool:
    """Whether an element's features change when others leave."""
    if not hasattr(model, "featurize") or elements.shape[1] < 2:
        return False
    half = elements.shape[1] // 2
    try:
        with torch.no_grad():
            together = model.featurize(elements, None, context)[:, :half]
            alone = model.featurize(elements[:, :half], None, context)
        return not torch.allclose(together, alone, rtol=1e-4, atol=1e-6)
    except Exception:  # features that cannot be called like this tell nothing
        return False
