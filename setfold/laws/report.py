"""The result of a check, which prints as a table."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

HOLDS, FAILS, NOT_APPLICABLE = "holds", "fails", "does not apply"
CONSISTENCY_LAW = "mini-batch consistency"
STYLES = {HOLDS: "green", FAILS: "bold red", NOT_APPLICABLE: "dim"}


@dataclass(frozen=True)
class Finding:
    """The result for one law.

    Attributes:
        law: the name of the law.
        statement: the law in one sentence.
        verdict: "holds", "fails" or "does not apply".
        errors: the largest relative error, by dtype.
        example: the smallest case for which the law fails.
        reason: why the law fails or does not apply; empty if unknown.
    """

    law: str
    statement: str
    verdict: str
    errors: dict[str, float]
    example: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The results for one model.

    Attributes:
        model: the class name of the model.
        findings: one for each law.
        passes: the attribute `passes` of the model: how often the chunks of a set must be read.
    """

    model: str
    findings: tuple[Finding, ...]
    passes: int | None = None

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the laws that fail.

        An encoder of several passes does not have to be mini-batch consistent in one.
        """
        excused = None if self.passes is None else CONSISTENCY_LAW
        return tuple(f.law for f in self.findings if f.verdict == FAILS and f.law != excused)

    @property
    def passed(self) -> bool:
        """Whether every law that applies holds."""
        return not self.broken

    @property
    def folds(self) -> bool:
        """Whether the model folds and every law that applies holds."""
        partition = next((f for f in self.findings if f.law == "any partition"), None)
        return self.passed and partition is not None and partition.verdict == HOLDS

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.folds:
            how = "folds" if (self.passes or 1) == 1 else f"folds in {self.passes} passes"
            return f"{self.model} {how}: every law that applies holds."
        if self.broken:
            laws = "law" if len(self.broken) == 1 else "laws"
            return f"{self.model} breaks {len(self.broken)} {laws}: {', '.join(self.broken)}."
        return f"{self.model} has no states, but the encodings of its chunks combine."

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict that json.dumps accepts."""
        findings = [asdict(finding) for finding in self.findings]
        for finding in findings:  # JSON has no infinity
            errors = finding["errors"].items()
            finding["errors"] = {d: e if math.isfinite(e) else None for d, e in errors}
        return {
            "model": self.model,
            "verdict": self.verdict,
            "passed": self.passed,
            "passes": self.passes,
            "laws": findings,
        }

    def __getitem__(self, law: str) -> Finding:
        for finding in self.findings:
            if finding.law == law:
                return finding
        raise KeyError(law)

    def __rich__(self) -> Table:
        dtypes = list(dict.fromkeys(d for finding in self.findings for d in finding.errors))
        table = Table(title=self.verdict, title_justify="left", title_style="bold")
        table.add_column("law", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for dtype in dtypes:
            table.add_column(dtype, justify="right", no_wrap=True)
        table.add_column("note")
        for finding in self.findings:
            errors = [f"{finding.errors[d]:.1e}" if d in finding.errors else "" for d in dtypes]
            note = "; ".join(filter(None, (finding.reason, finding.example)))
            if finding.verdict == HOLDS:
                note = finding.statement
            table.add_row(
                finding.law, finding.verdict, *errors, note, style=STYLES[finding.verdict]
            )
        return table

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=120, color_system=None).print(self)
        return buffer.getvalue()
