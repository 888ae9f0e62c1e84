"""Likely reasons why a model breaks a law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from setfold.core.whole import WholeSetEncoder
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.laws.report import CONSISTENCY_LAW

MIXING = "the features of an element depend on other elements of the chunk"
SELF_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def likely_reason(model: Any, elements: Tensor, law: str) -> str | None:
    """The likeliest reason why a model breaks a law, or None.

    Args:
        model: the model that breaks it.
        elements: (B, n, d), for which it breaks it.
        law: the name of the law.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(m, _BatchNorm) and m.training for m in modules):
        return "BatchNorm in training mode uses the statistics of each chunk: call model.eval()"
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in modules):
        return "dropout in training mode is random in every call: call model.eval()"
    if isinstance(model, WholeSetEncoder):
        if any(isinstance(m, SlotSetEncoder) and m.training for m in modules):
            return "in training mode every call draws new random slots: call model.eval()"
        if law == CONSISTENCY_LAW:
            return model.obstacle
        return MIXING if _passes_mix(model, elements) else None
    if any(isinstance(m, SELF_ATTENTION) for m in modules):
        return "self-attention: the features of an element depend on all other elements"
    if _features_mix(model, elements):
        return MIXING
    return None


def _passes_mix(model: Any, elements: Tensor) -> bool:
    """Whether, in any pass, the features of an element depend on other elements."""
    found: tuple[Tensor, ...] = ()
    try:
        with torch.no_grad():
            for _ in range(getattr(model, "passes", None) or 0):
                stage, empty = model.begin(found, elements.shape[0])
                if _features_mix(stage, elements, empty.context):
                    return True
                found = (*found, stage.readout(stage.update(empty, elements)))
    except Exception:  # the report contains it
        return False
    return False


def _features_mix(model: Any, elements: Tensor, context: tuple[Tensor, ...] = ()) -> bool:
    """Whether the features of an element change if other elements are removed."""
    if not hasattr(model, "featurize") or elements.shape[1] < 2:
        return False
    half = elements.shape[1] // 2
    try:
        with torch.no_grad():
            together = model.featurize(elements, None, context)[:, :half]
            alone = model.featurize(elements[:, :half], None, context)
        return not torch.allclose(together, alone, rtol=1e-4, atol=1e-6)
    except Exception:  # features with another signature
        return False
