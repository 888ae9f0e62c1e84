"""Model cards: what a model is, whether it folds, how it was trained and how to use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from setfold.core.structure import describe, foreign_names
from setfold.laws.check import check
from setfold.laws.report import NOT_APPLICABLE, Report
from setfold.preprocessing.columns import Columns, columns_of
from setfold.preprocessing.targets import target_of

REPORT_KEYS = {"target", "task", "splits", "best", "candidates", "baselines", "verdict"}
SHOWN_COLUMNS = 20  # names in a sentence
NUM_ELEMENTS = 1000  # of the set in the example
DIGITS = 4


@dataclass(frozen=True)
class Card:
    """The text of a model card, in Markdown.

    Args:
        title: The name of the model.
        sections: By heading.
    """

    title: str
    sections: Mapping[str, str]

    def __str__(self) -> str:
        parts = [
            f"# {self.title}",
            *(f"## {name}\n\n{text}" for name, text in self.sections.items()),
        ]
        return "\n\n".join(parts) + "\n"


def card_of(
    model: nn.Module, name: str, dim_in: int | None, report: Mapping[str, Any] | None
) -> Card:
    """Describe a model. The laws are checked, which takes some seconds.

    Args:
        model: The model.
        name: What `from_pretrained` takes to load it.
        dim_in: The width of the elements; None if the model knows it.
        report: The report of its training, or None.
    """
    columns = columns_of(model)
    width: Any = getattr(model, "dim_in", None) if dim_in is None else dim_in
    if width is None and columns is not None:
        width = columns.width
    laws = check(deepcopy(model).eval(), width, processes=False)
    sections = {
        "Use": _use(model, name, width, columns),
        "Architecture": _architecture(model, width),
        "Laws": _laws(laws),
    }
    if report is not None:
        sections["Training"] = _training(report)
    return Card(name.rpartition("/")[2], sections)


def _use(model: nn.Module, name: str, width: int, columns: Columns | None) -> str:
    allowed = sorted({*foreign_names(describe(model))})
    allow = f", allow={allowed!r}" if allowed else ""
    lines = [f'model = from_pretrained("{name}"{allow})']
    if columns is not None:
        lines = ["import setfold", "from setfold.hub import from_pretrained", "", *lines]
        target = target_of(model)
        out, options = ("encodings", "") if target is None else ("predictions", ", head=True")
        files = f'"rows.parquet", "{out}.parquet"'
        lines += [f'setfold.encode_sets(model, {files}, set="id"{options})']
        names = ", ".join(f"`{own}`" for own in columns.names[:SHOWN_COLUMNS])
        more = f" and {len(columns.names) - SHOWN_COLUMNS} more"
        names += more if len(columns.names) > SHOWN_COLUMNS else ""
        told = f"The rows of `rows.parquet` have a set id and the columns {names}."
    else:
        lines = ["import torch", "from setfold.hub import from_pretrained", "", *lines]
        lines += [
            f"elements = torch.randn(1, {NUM_ELEMENTS}, {width})  # one set",
            "encoding = model(elements)",
        ]
        told = "The model takes sets of any size: (sets, elements, numbers)."
        if hasattr(model, "initial_state"):
            lines += [
                "",
                "state = model.initial_state()  # the same in chunks",
                "for chunk in elements.split(100, dim=1):",
                "    state = model.update(state, chunk)",
                "encoding = model.readout(state)",
            ]
    warning = ""
    if allowed:
        warning = " Loading runs the classes that are allowed: they must be installed and trusted."
    return f"`pip install 'setfold[hub]'`\n\n{_fenced('python', lines)}\n\n{told}{warning}"


def _architecture(model: nn.Module, width: int) -> str:
    numbers = sum(parameter.numel() for parameter in model.parameters())
    facts = {"parameters": f"{numbers:,}", "numbers per element": f"{width}"}
    passes, state = getattr(model, "passes", None), getattr(model, "state_nbytes", None)
    facts["passes over a set"] = "needs whole sets" if passes is None else str(passes)
    if state is not None:
        facts["state"] = f"{state:,} bytes, for a set of any size"
    rows = [[name, value] for name, value in facts.items()]
    return f"{_table(['', ''], rows)}\n\n{_fenced('text', [str(model)])}"


def _laws(report: Report) -> str:
    applying = [finding for finding in report.findings if finding.verdict != NOT_APPLICABLE]
    dtypes = list(dict.fromkeys(dtype for finding in applying for dtype in finding.errors))
    rows = [
        [
            finding.law,
            finding.verdict,
            *(f"{finding.errors[d]:.1e}" if d in finding.errors else "" for d in dtypes),
        ]
        for finding in applying
    ]
    return (
        f"{report.verdict} `setfold.check` tests a model on small sets; the numbers are the largest "
        f"relative errors.\n\n{_table(['law', 'verdict', *dtypes], rows)}"
    )


def _training(report: Mapping[str, Any]) -> str:
    trained = [*report["candidates"], *report["baselines"]]
    metrics = list(dict.fromkeys(key for row in trained for key in row))
    metrics = [metric for metric in metrics if metric not in ("name", "seconds")]
    rows = [[row["name"], *(_shown(row.get(metric)) for metric in metrics)] for row in trained]
    return (
        f"Trained by `setfold train` to predict `{report['target']}` ({report['task']}): "
        f"{report['splits']}. {report['verdict']}\n\n{_table(['test sets', *metrics], rows)}"
    )


def _shown(value: object) -> str:
    return (
        f"{value:.{DIGITS}g}" if isinstance(value, float) else "" if value is None else str(value)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _fenced(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
