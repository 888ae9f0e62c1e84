"""The report of a training as one HTML page, with figures as SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from setfold.learning.candidates import ATTENTIVE, INSTANCES
from setfold.learning.fit import History
from setfold.learning.metrics import Predictions, metric_name
from setfold.learning.objective import VALIDATION_LOSS
from setfold.learning.train import Result
from setfold.preprocessing.targets import Classes

SHOWN_COLUMNS = 8  # of an element
MAX_CLASSES = 30  # of a confusion matrix that is drawn
LARGE = 10.0  # numbers below it have four decimals
BLUE, GREY, LIGHT = "#1f6feb", "#8a8a8a", "#bbbbbb"
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem;
margin: 2rem auto; padding: 0 1rem } table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right;
font-variant-numeric: tabular-nums } th { font-weight: 600; color: #555 }
th:first-child, td:first-child, .left th, .left td { text-align: left }
tr.best { font-weight: 600; background: #eef4ff } tr.rule td { border-top: 2px solid #bbb }
h1 { font-size: 1.6rem } h2 { margin-top: 2.2rem; font-size: 1.2rem } h3 { font-size: 1rem }
svg { max-width: 100%; height: auto } .note { color: #666; max-width: 46rem }
.verdict { border-left: 4px solid #1f6feb; padding: .4rem 1rem; background: #f5f8ff }
.side { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start }"""


def make_page(result: Result, facts: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        result: The result of a training.
        facts: What the report says, as JSON.
    """
    target, best = result.target, result.search.best
    name = metric_name(target)
    candidates, baselines = facts["candidates"], facts["baselines"]
    parts = [
        f"<h1>{_text(target.name)}: {_text(facts['task'])}</h1>",
        f'<p class="verdict">{_text(facts["verdict"])}</p>',
        f"<p>{_sizes(facts)}</p>",
        "<h2>Candidates and baselines</h2>",
        _table(candidates + baselines, best.name, rule=len(candidates)),
        f'<p class="note">{_legend(facts)}</p>',
    ]
    if best.histories:
        parts += ["<h2>Learning curve</h2>", _svg(_draw_histories(best.histories, name))]
    if isinstance(target, Classes):
        parts += ["<h2>Which classes are confused, and how sure predictions are</h2>"]
        drawings = []
        if len(target.labels) <= MAX_CLASSES:
            drawings.append(_svg(_draw_confusion(target, facts["confusion"])))
        drawings.append(_svg(_draw_calibration(facts["calibration"])))
        parts.append(f'<div class="side">{"".join(f"<div>{d}</div>" for d in drawings)}</div>')
    else:
        parts += ["<h2>Residuals</h2>", _svg(_draw_residuals(best.found, target.name))]
    parts += ["<h2>By size of the set</h2>", _table(facts["by_size"])]
    parts += ["<h2>Most influential elements</h2>", _influence(facts["influence"], best.name)]
    parts += ["<h2>Encodings, weights and gradients</h2>", _diagnosis(facts["diagnosis"])]
    parts += ["<h2>Columns</h2>", _columns(result)]
    title = f"setfold: {_text(target.name)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _sizes(facts: Mapping[str, Any]) -> str:
    text = f"{_text(facts['splits'])}. "
    if facts["sets"]["test"]:
        return text + "All numbers are of the test sets, which were used for nothing else."
    return text + (
        "There are no test sets. All numbers are of the sets held out for validation, which also "
        "chose the model, so they are too good. Measure new sets with <code>setfold evaluate</code>."
    )


def _legend(facts: Mapping[str, Any]) -> str:
    return (
        f"The saved model, {_text(facts['best'])}, is marked: of the candidates above the line, it "
        "has the least loss on the sets held out for validation. Below the line are the baselines: "
        "count, mean, deviation, minimum and maximum of each column, and scikit-learn."
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(rows: Sequence[Mapping[str, Any]], best: str | None = None, rule: int = 0) -> str:
    """Return a table; the best row is marked, and a line is above row number `rule`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{_number(row.get(name))}</td>" for name in names)
        marks = ["best"] * (best is not None and row.get("name") == best)
        marks += ["rule"] * bool(rule and number == rule)
        mark = f' class="{" ".join(marks)}"' if marks else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _number(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return _text(value)
    return f"{value:.4f}" if abs(value) < LARGE else f"{value:.4g}"


def _diagnosis(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return '<p class="note">There are too few sets, or their encodings are not finite.</p>'
    rows = [{"symptom": name, "value": value} for name, value in found["symptoms"].items()]
    problems = found["problems"] or ["No problem found."]
    listed = "".join(f"<li>{_text(problem)}</li>" for problem in problems)
    return f'{_table(rows)}<ul class="note">{listed}</ul>'


def _influence(sets: Sequence[Mapping[str, Any]], name: str) -> str:
    if not sets:
        return '<p class="note">No test set has several elements that could be compared.</p>'
    if name in ATTENTIVE:
        rest = "" if name == INSTANCES else " The model also reads plain statistics of the set."
        about = "The share of an element is its attention weight." + rest
    else:
        about = (
            "The share of an element is the gradient of the predicted score, times the distance of "
            "the element from the mean of its set. Categories have no share."
        )
    parts = [f'<p class="note">{about} Elements are numbered from 0 in the order of the rows.</p>']
    for one in sets:
        rows = [
            {
                "element": e["element"],
                "share": f"{e['share']:.1%}",
                # the space keeps apart columns that are named "element" or "share"
                **{f"{column} ": v for column, v in list(e["values"].items())[:SHOWN_COLUMNS]},
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
    return _table(rows).replace("<table>", '<table class="left">')


# ---- figures -----------------------------------------------------------------------------------


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


def _draw_histories(histories: Sequence[History], metric: str) -> Figure:
    """Draw the losses of each fold; dotted lines mark the weights that were kept."""
    figure, axes = _figure()
    kept = []
    for number, history in enumerate(histories):
        names = ("training", "validation") if number == 0 else (None, None)
        epochs, validated = history["epoch"], history[VALIDATION_LOSS]
        axes.plot(epochs, history["loss"], label=names[0], color=GREY)
        axes.plot(epochs, validated, label=names[1], color=BLUE)
        best = int(np.argmin(validated))
        axes.axvline(epochs[best], color=BLUE, lw=0.8, ls=":")
        kept.append(history[f"validation {metric}"][best])
    folds = f", {len(histories)} folds" if len(histories) > 1 else ""
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    about = f"{metric} at the dotted line: {np.mean(kept):.3g}{folds}"
    axes.legend(frameon=False, title=about, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _draw_confusion(target: Classes, matrix: Sequence[Sequence[int]]) -> Figure:
    number = len(target.labels)
    side = max(2.5, 0.35 * number + 1)
    figure, axes = _figure(side + 1, side)
    counts = np.array(matrix)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counts):
        axes.text(
            column,
            row,
            str(counts[row, column]),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if shares[row, column] > 0.6 else "#222",
        )
    labels = [_plot_text(label)[:16] for label in target.labels]
    turned = 90 if max(map(len, labels)) * number > 24 else 0
    axes.set_xticks(range(number), labels, rotation=turned)
    axes.set_yticks(range(number), labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title("confusion matrix", fontsize=10)
    return figure


def _draw_calibration(bins: Sequence[Mapping[str, float]]) -> Figure:
    figure, axes = _figure(3.5, 3.2)
    axes.plot([0, 1], [0, 1], color=LIGHT, lw=0.8)
    axes.plot([b["predicted"] for b in bins], [b["right"] for b in bins], "o-", color=BLUE)
    axes.set_xlabel("predicted probability of the class")
    axes.set_ylabel("share that is right")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_title("calibration: on the line is best", fontsize=10)
    return figure


def _draw_residuals(found: Predictions, name: str) -> Figure:
    figure = Figure((8, 3.2))
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.scatter(found.targets, found.scores, s=8, alpha=0.6, color=BLUE)
    both = np.concatenate([found.targets, found.scores])
    left.plot([both.min(), both.max()], [both.min(), both.max()], color=LIGHT, lw=0.8)
    left.set_xlabel(f"true {_plot_text(name)}")
    left.set_ylabel(f"predicted {_plot_text(name)}")
    right.hist(found.scores - found.targets, bins=30, color=BLUE)
    right.axvline(0, color=LIGHT, lw=0.8)
    right.set_xlabel("predicted - true")
    right.set_ylabel("sets")
    figure.tight_layout()
    return figure
