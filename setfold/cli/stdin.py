"""Rows from standard input, as a temporary file: a run reads its inputs more than once."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setfold.errors import InputError

STDIN = "-"


@contextmanager
def with_stdin(
    inputs: list[str], kind: str | None, *, column: str | None, resume: bool
) -> Iterator[list[str]]:
    """Yield the inputs, with a temporary file in place of "-".

    Args:
        inputs: Files, folders and glob patterns, and "-" for standard input.
        kind: The format of standard input, a suffix without its dot; None without "-".
        column: The set column; None if each file is a set.
        resume: Whether to resume an interrupted run.

    Raises:
        InputError: The format is missing or unknown, or standard input cannot be used here.
    """
    if STDIN not in inputs:
        if kind is not None:
            raise InputError("--format is for standard input. Pass - as an input, or omit it.")
        yield inputs
        return
    _check(inputs, kind, column, resume)
    with tempfile.TemporaryDirectory(prefix="setfold-") as folder:
        path = Path(folder) / f"stdin.{kind}"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield [str(path) if name == STDIN else name for name in inputs]


def _check(inputs: list[str], kind: str | None, column: str | None, resume: bool) -> None:
    """Raise InputError if standard input cannot be read."""
    from setfold.files.readers import READERS

    known = [s.removeprefix(".") for r in READERS if not r.is_folder for s in r.suffixes]
    if kind not in known:
        got = "none" if kind is None else repr(kind)
        raise InputError(
            f"expected the format of standard input with --format; got {got}. Pass one of "
            f"{', '.join(known)}."
        )
    if inputs.count(STDIN) > 1:
        raise InputError("standard input can be read once; got - several times.")
    if column is None:
        raise InputError("standard input has no name that could be a set id. Pass --set.")
    if resume:
        raise InputError(
            "standard input cannot be read again, so --resume is not possible. Write it to a file "
            "first, or start over with --restart."
        )
