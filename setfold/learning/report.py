"""The report of a training: what it says, as JSON, and as one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import write_atomically
from setfold.core.state import SetState
from setfold.errors import SetfoldError
from setfold.laws.diagnosis import LEAST_SETS, diagnose
from setfold.learning.candidates import ATTENTIVE, Model
from setfold.learning.dataset import SetDataset
from setfold.learning.fit import History
from setfold.learning.metrics import Predictions, measure, metric_name, standard_error
from setfold.learning.objective import VALIDATION_LOSS
from setfold.learning.page import make_page
from setfold.learning.train import Result, describe_splits
from setfold.preprocessing.columns import columns_of
from setfold.preprocessing.targets import Classes, Target

SIZES = 5  # groups of sets by size
BINS = 8  # of the calibration curve
SHOWN_SETS, SHOWN_ELEMENTS = 4, 5
MAX_ELEMENTS = 20_000  # of a set whose elements are compared
DIAGNOSED_SETS, MAX_DIAGNOSED = 32, 500  # sets, and elements of each
LEAST = 1e-12  # against division by zero


def write_report(result: Result, path: Path) -> dict[str, Any]:
    """Write a report as HTML, and as JSON beside it; return the JSON.

    Args:
        result: The result of a training.
        path: The HTML file.
    """
    facts = facts_of(result)
    best = result.search.best
    facts["influence"] = influence(best.model, result.data.reported, best.name)
    facts["diagnosis"] = diagnosis(best.model, result.data.reported)
    write_atomically(path, make_page(result, facts).encode())
    write_atomically(path.with_suffix(".json"), json.dumps(facts, indent=2).encode())
    return facts


def facts_of(result: Result) -> dict[str, Any]:
    """Return what the report says, as JSON."""
    target, search, data = result.target, result.search, result.data
    best = search.best
    return {
        "target": target.name,
        "task": result.task,
        "classes": target.labels if isinstance(target, Classes) else None,
        "sets": dict(zip(("training", "validation", "test"), result.sets, strict=True)),
        "folds": data.number,
        "elements": result.elements,
        "splits": describe_splits(data),
        "columns": {c.name: type(c).__name__ for c in result.fitted.columns.all},
        "columns_left_out": result.fitted.left_out,
        "left_out": result.left_out,
        "skipped_rows": result.skipped,
        "best": best.name,
        "candidates": [_row(target, one.name, one.found, one.seconds) for one in search.trials],
        "baselines": [_row(target, one.name, one.found, None) for one in search.baselines],
        "verdict": verdict(result),
        "histories": [_history(curve, metric_name(target)) for curve in best.histories],
        "by_size": _by_size(target, best.found, data.reported.lengths),
        "confusion": _confusion(target, best.found),
        "calibration": _calibration(best.found) if isinstance(target, Classes) else None,
    }


def _history(curve: History, metric: str) -> dict[str, Any]:
    return {
        "epoch": curve["epoch"],
        "training_loss": [None if math.isnan(loss) else loss for loss in curve["loss"]],
        "validation_loss": curve[VALIDATION_LOSS],
        metric: curve[f"validation {metric}"],
    }


def verdict(result: Result) -> str:
    """Say in one sentence whether the set model is better than the best baseline."""
    target, best = result.target, result.search.best
    name = metric_name(target)
    sign = 1 if isinstance(target, Classes) else -1
    rival = max(result.search.baselines, key=lambda b: sign * measure(target, b.found)[name])
    mine, other = measure(target, best.found)[name], measure(target, rival.found)[name]
    error = standard_error(target, best.found)
    text = f"{best.name} {mine:.4g}, {rival.name} {other:.4g}, standard error {error:.2g}"
    if sign * (mine - other) > error:
        return f"The set model is better than the best baseline: {name} {text}."
    if sign * (other - mine) > error:
        return (
            f"A baseline is better than the set model: {name} {text}. Use the baseline, or train "
            "longer."
        )
    return f"The set model and the best baseline are level: {name} {text}."


def influence(model: Model, data: SetDataset, name: str) -> list[dict[str, Any]]:
    """Return the elements of a few sets that influence the prediction most.

    If the model attends to elements, their influence is their weight. Otherwise it is the gradient
    of the predicted score, times the distance of the element from the mean of its set.

    Args:
        model: The model.
        data: Sets.
        name: The name of the candidate.
    """
    columns = columns_of(model)
    assert columns is not None
    usual = [n for n in range(len(data)) if 1 < data.lengths[n] <= MAX_ELEMENTS]
    found = []
    for number in usual[:SHOWN_SETS]:
        elements = torch.tensor(data[number][0]).unsqueeze(0)
        shares = _weights(model, elements) if name in ATTENTIVE else _gradients(model, elements)
        if shares is None:
            continue
        top = shares.argsort(descending=True)[:SHOWN_ELEMENTS].tolist()
        found.append(
            {
                "set": data.ids[number],
                "elements": [
                    {
                        "element": place,
                        "share": round(float(shares[place]), 4),
                        "values": columns.show(elements[0, place].tolist()),
                    }
                    for place in top
                ],
            }
        )
    return found


def diagnosis(model: Model, data: SetDataset) -> dict[str, Any] | None:
    """Return what `diagnose` says about the model; None if it cannot be computed.

    Args:
        model: The model.
        data: Sets.
    """
    some = [number for number in range(len(data)) if data.lengths[number]][:DIAGNOSED_SETS]
    if len(some) < LEAST_SETS:
        return None
    sets = [data[number][0][:MAX_DIAGNOSED] for number in some]
    try:
        return diagnose(model, sets).as_dict()
    except (SetfoldError, RuntimeError):  # encodings that are not finite; the report goes on
        return None


@torch.no_grad()
def _weights(model: Model, elements: Tensor) -> Tensor:
    """Return the attention weight of each element of a set (1, n, d), (n,)."""
    encoder, state = begin_last_pass(model.eval(), elements)
    state = encoder.update(state, elements)
    return encoder.weights(state, elements)[0].mean(-1)


def begin_last_pass(model: Model, elements: Tensor) -> tuple[StreamingSetEncoder, SetState]:
    """Return the encoder of the last pass over a set, and the state that it begins with."""
    if isinstance(model, Composition):
        return model, model.initial_state(1)
    found: tuple[Tensor, ...] = ()
    encoder, state = model.begin(found, 1)
    for _ in range(model.passes - 1):
        found = (*found, encoder.readout(encoder.update(state, elements)))
        encoder, state = model.begin(found, 1)
    return encoder, state


def _gradients(model: Model, elements: Tensor) -> Tensor | None:
    """Return the influence of each element by its gradient; None if all columns are categories."""
    elements = elements.clone().requires_grad_()
    with torch.enable_grad():
        scores = model.eval()(elements)
        (gradient,) = torch.autograd.grad(scores.max(), elements, allow_unused=True)
    if gradient is None:
        return None
    distance = elements.detach() - elements.detach().mean(1, keepdim=True)
    influence = (gradient * distance).sum(-1).abs().squeeze(0)
    return influence / influence.sum().clamp_min(LEAST)


def _row(target: Target, name: str, found: Predictions, seconds: float | None) -> dict[str, Any]:
    timed = {} if seconds is None else {"seconds": round(seconds)}
    return {"name": name, **measure(target, found), **timed}


def _by_size(target: Target, found: Predictions, lengths: np.ndarray) -> list[dict[str, Any]]:
    """Return the first metric for small to large sets."""
    order = np.argsort(lengths, kind="stable")
    name = metric_name(target)
    parts = [part for part in np.array_split(order, SIZES) if len(part)]
    return [
        {
            "elements": f"{lengths[part].min()} to {lengths[part].max()}",
            "sets": len(part),
            name: measure(target, Predictions(found.scores[part], found.targets[part]))[name],
        }
        for part in parts
    ]


def _confusion(target: Target, found: Predictions) -> list[list[int]] | None:
    if not isinstance(target, Classes):
        return None
    number = len(target.labels)
    flat = np.bincount(found.targets * number + found.scores.argmax(1), minlength=number**2)
    return flat.reshape(number, number).tolist()


def _calibration(found: Predictions) -> list[dict[str, float]]:
    """Return how often sets are right, from those of which the model is least to most sure."""
    sure, right = found.scores.max(1), found.scores.argmax(1) == found.targets
    parts = np.array_split(np.argsort(sure, kind="stable"), BINS)
    return [
        {
            "sets": len(part),
            "predicted": float(sure[part].mean()),
            "right": float(right[part].mean()),
        }
        for part in parts
        if len(part)
    ]
