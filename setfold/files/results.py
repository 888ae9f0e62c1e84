"""What an output is the result of, by which a retry recognizes that nothing is left to do."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from setfold.errors import FileError
from setfold.files.encodings import is_archive, open_table, result_in
from setfold.files.outputs import CsvSink, digest_of_content, sink_for
from setfold.files.tables.arrow import RESULT, result_of
from setfold.files.tables.stream import reading

ADVICE = "Write it again with --overwrite."


def read_result(path: Path) -> str | None:
    """Return the digest of what a file is the result of; None if it is no output, or not there."""
    if not path.is_file():
        return None
    try:
        with reading(path, ADVICE):
            if not is_archive(path):
                with open_table(path) as (schema, _, _):
                    return result_of((schema.metadata or {}).get(RESULT))
            with zipfile.ZipFile(path) as archive:
                return result_in(archive)
    except FileError:
        return None


def published_result(path: Path) -> str | None:
    """Return what a run notes about a complete output: as `read_result`, but also of CSV files.

    A CSV file cannot say what it is the result of. A digest of its content shows that it is the
    file that a run has written, not that a repeated command would write the same.
    """
    if sink_for(path) is CsvSink:
        return digest_of_content(path) if path.is_file() else None
    return read_result(path)


def read_totals(path: Path) -> tuple[int, int]:
    """Return the number of sets in an output, and of their elements. All of the file is verified.

    Raises:
        FileError: The file is damaged.
    """
    with reading(path, ADVICE):
        if is_archive(path):
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} does not match its content")
            with np.load(path) as arrays:
                return len(arrays["count"]), int(arrays["count"].sum())
        with open_table(path) as (_, sets, batches):
            return sets, sum(pc.sum(batch.column("count")).as_py() or 0 for batch in batches)
