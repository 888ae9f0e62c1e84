"""The report of a training: one HTML file that needs nothing else, and the same as JSON."""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from setfold.core.persist import write_atomically
from setfold.learning.candidates import Model
from setfold.learning.dataset import SetDataset
from setfold.learning.fit import History
from setfold.learning.metrics import Predictions, measure, metric_name, standard_error
from setfold.learning.objective import VALIDATION_LOSS
from setfold.learning.train import Result
from setfold.preprocessing.columns import columns_of
from setfold.preprocessing.targets import Classes, Target

SIZES = 5  # groups of sets by size
BINS = 8  # of the calibration curve
SHOWN_SETS, SHOWN_ELEMENTS, SHOWN_COLUMNS = 4, 5, 8
MAX_ELEMENTS = 20_000  # of a set whose elements are compared
MAX_CLASSES = 30  # of a confusion matrix that is drawn

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem } table { border-collapse: collapse; margin: .5rem 0 1.5rem } th, td { padding: .2rem
.8rem; border-bottom: 1px solid #ddd; text-align: right } th:first-child, td:first-child
{ text-align: left } td.left { text-align: left } tr.best { font-weight: 600 } h2 { margin-top: 2rem }
svg { max-width: 100%; height: auto } .note { color: #666 }"""


def write_report(result: Result, path: Path) -> dict[str, Any]:
    """Write a report as HTML, and as JSON beside it; return the JSON.

    Args:
        result: The result of a training.
        path: The HTML file.
    """
    facts = facts_of(result)
    facts["influence"] = influence(result.search.best.model, result.test)
    write_atomically(path, _page(result, facts).encode())
    write_atomically(path.with_suffix(".json"), json.dumps(facts, indent=2).encode())
    return facts


def facts_of(result: Result) -> dict[str, Any]:
    """Return what the report says, as JSON."""
    target, search = result.target, result.search
    rows = [(trial.name, trial.found, trial.seconds) for trial in search.trials]
    others = [(base.name, base.found, None) for base in result.baselines]
    best = search.best
    curve = best.history
    return {
        "target": target.name,
        "task": "classification" if isinstance(target, Classes) else "regression",
        "classes": target.labels if isinstance(target, Classes) else None,
        "sets": dict(zip(("training", "validation", "test"), result.sets, strict=True)),
        "elements": result.elements,
        "columns": {c.name: type(c).__name__ for c in result.fitted.columns.all},
        "columns_left_out": result.fitted.left_out,
        "left_out": result.left_out,
        "skipped_rows": result.skipped,
        "best": best.name,
        "candidates": [_row(target, *row) for row in rows],
        "baselines": [_row(target, *row) for row in others],
        "verdict": verdict(result),
        "history": None
        if curve is None
        else {
            "epoch": curve["epoch"],
            "training_loss": [None if math.isnan(loss) else loss for loss in curve["loss"]],
            "validation_loss": curve[VALIDATION_LOSS],
            metric_name(target): curve[f"validation {metric_name(target)}"],
        },
        "by_size": _by_size(target, best.found, result.test.lengths),
        "confusion": _confusion(target, best.found),
    }


def verdict(result: Result) -> str:
    """Say in one sentence whether the set model is better than the best baseline."""
    target, best = result.target, result.search.best
    name = metric_name(target)
    sign = 1 if isinstance(target, Classes) else -1
    rival = max(result.baselines, key=lambda b: sign * measure(target, b.found)[name])
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


def influence(model: Model, data: SetDataset) -> list[dict[str, Any]]:
    """Return the elements of a few sets that influence the prediction most.

    The influence of an element is the gradient of the predicted score, times the distance of the
    element from the mean of its set.
    """
    columns = columns_of(model)
    assert columns is not None
    usual = [n for n in range(len(data)) if 1 < data.lengths[n] <= MAX_ELEMENTS]
    found = []
    for number in usual[:SHOWN_SETS]:
        elements = torch.tensor(data[number][0]).unsqueeze(0).requires_grad_()
        with torch.enable_grad():
            scores = model.eval()(elements)
            (gradient,) = torch.autograd.grad(scores.max(), elements, allow_unused=True)
        if gradient is None:  # all columns are categories
            continue
        distance = elements.detach() - elements.detach().mean(1, keepdim=True)
        weight = (gradient * distance).sum(-1).abs().squeeze(0)
        top = weight.argsort(descending=True)[:SHOWN_ELEMENTS].tolist()
        total = float(weight.sum()) or 1.0
        found.append(
            {
                "set": data.ids[number],
                "elements": [
                    {
                        "element": place,
                        "share": round(float(weight[place]) / total, 4),
                        "values": columns.show(elements[0, place].tolist()),
                    }
                    for place in top
                ],
            }
        )
    return found


def _row(target: Target, name: str, found: Predictions, seconds: float | None) -> dict[str, Any]:
    timed = {} if seconds is None else {"seconds": round(seconds, 2)}
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


# ---- HTML --------------------------------------------------------------------------------------


def _page(result: Result, facts: Mapping[str, Any]) -> str:
    target, best = result.target, result.search.best
    name = metric_name(target)
    parts = [
        f"<h1>{_text(target.name)}: {_text(facts['task'])}</h1>",
        f"<p><b>{_text(facts['verdict'])}</b></p>",
        f"<p>{_sizes(facts)}</p>",
        "<h2>Candidates and baselines</h2>",
        _table(facts["candidates"] + facts["baselines"], best.name),
    ]
    if best.history is not None:
        parts += ["<h2>Learning curve</h2>", _svg(_draw_history(best.history, name))]
    if isinstance(target, Classes):
        if len(target.labels) <= MAX_CLASSES:
            parts += [
                "<h2>Confusion matrix</h2>",
                _svg(_draw_confusion(target, facts["confusion"])),
            ]
        parts += ["<h2>Calibration</h2>", _svg(_draw_calibration(best.found))]
    else:
        parts += ["<h2>Residuals</h2>", _svg(_draw_residuals(best.found, target.name))]
    parts += ["<h2>By size of the set</h2>", _table(facts["by_size"])]
    parts += ["<h2>Most influential elements</h2>", _influence(facts["influence"])]
    parts += ["<h2>Columns</h2>", _columns(result)]
    title = f"setfold: {_text(target.name)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _sizes(facts: Mapping[str, Any]) -> str:
    sets = facts["sets"]
    text = (
        f"{sets['training']:,} sets for training, {sets['validation']:,} for validation, "
        f"{sets['test']:,} for the test; {facts['elements']:,} elements. "
    )
    if sets["test"]:
        return text + "All numbers are of the test sets, which were used for nothing else."
    return text + (
        "There are no test sets. All numbers are of the validation sets, which also chose the "
        "model, so they are too good. Measure new sets with <code>setfold evaluate</code>."
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(rows: Sequence[Mapping[str, Any]], best: str | None = None) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{_number(row.get(name))}</td>" for name in names)
        mark = ' class="best"' if best is not None and row.get("name") == best else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _number(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else _text(value)


def _influence(sets: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        '<p class="note">The share of an element: the gradient of the predicted score, times the '
        "distance of the element from the mean of its set. Categories have no share.</p>"
    ]
    for one in sets:
        rows = [
            {
                "(element)": e["element"],
                "(share)": f"{e['share']:.1%}",
                **dict(list(e["values"].items())[:SHOWN_COLUMNS]),
            }
            for e in one["elements"]
        ]
        parts.append(f"<h3>Set {_text(one['set'])}</h3>{_table(rows)}")
    return "".join(parts)


def _columns(result: Result) -> str:
    rows = [
        {"column": column.name, "read as": f"{type(column).__name__}({column.extra_repr()})"}
        for column in result.fitted.columns.all
    ]
    rows += [
        {"column": name, "read as": f"left out: {why}"}
        for name, why in result.fitted.left_out.items()
    ]
    return _table(rows).replace("<td>", '<td class="left">')


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    found = text.getvalue()
    return found[found.index("<svg") :]


def _figure(width: float = 6.0, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure((width, height))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_text(value: object) -> str:
    """Return text that matplotlib does not take for a formula."""
    return str(value).replace("$", r"\$")


def _draw_history(history: History, metric: str) -> Figure:
    figure, axes = _figure()
    epochs, validated = history["epoch"], history[VALIDATION_LOSS]
    axes.plot(epochs, history["loss"], label="training loss", color="#999")
    axes.plot(epochs, validated, label=VALIDATION_LOSS, color="#1f6feb")
    best = int(np.argmin(validated))
    axes.axvline(epochs[best], color="#1f6feb", lw=0.8, ls=":")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    axes.legend(frameon=False, title=f"best: {metric} {history[f'validation {metric}'][best]:.4g}")
    return figure


def _draw_confusion(target: Classes, matrix: Sequence[Sequence[int]]) -> Figure:
    number = len(target.labels)
    side = max(2.5, 0.35 * number + 1)
    figure, axes = _figure(side + 1, side)
    counts = np.array(matrix)
    axes.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(counts.shape):
        if counts[row, column]:
            share = counts[row, column] / max(counts[row].sum(), 1)
            axes.text(
                column,
                row,
                str(counts[row, column]),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if share > 0.6 else "#222",
            )
    labels = [_plot_text(label)[:16] for label in target.labels]
    axes.set_xticks(range(number), labels, rotation=90 if number > 4 else 0)
    axes.set_yticks(range(number), labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def _draw_calibration(found: Predictions) -> Figure:
    sure, right = found.scores.max(1), found.scores.argmax(1) == found.targets
    figure, axes = _figure(4, 3)
    axes.plot([0, 1], [0, 1], color="#bbb", lw=0.8)
    order = np.argsort(sure, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    axes.plot(
        [sure[part].mean() for part in parts],
        [right[part].mean() for part in parts],
        "o-",
        color="#1f6feb",
    )
    axes.set_xlabel("predicted probability")
    axes.set_ylabel("share that is right")
    return figure


def _draw_residuals(found: Predictions, name: str) -> Figure:
    figure, axes = _figure(5, 3.5)
    axes.scatter(found.targets, found.scores, s=8, alpha=0.6, color="#1f6feb")
    ends = [
        min(found.targets.min(), found.scores.min()),
        max(found.targets.max(), found.scores.max()),
    ]
    axes.plot(ends, ends, color="#bbb", lw=0.8)
    axes.set_xlabel(f"true {_plot_text(name)}")
    axes.set_ylabel(f"predicted {_plot_text(name)}")
    return figure
