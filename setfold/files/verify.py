"""Verify a file of setfold: every byte of it, and everything that reading it relies on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from setfold.core import persist
from setfold.core.models import load
from setfold.core.persist import hold
from setfold.core.state import SetState
from setfold.core.structure import foreign_names
from setfold.errors import FileError
from setfold.files.encodings import is_archive, verify_encodings
from setfold.files.journal import Journal, check_folder, read_journal
from setfold.files.sealed import SealedFile, is_sealed
from setfold.files.states import holds_states, read_provenance, read_states
from setfold.files.tables.frames import read_frames
from setfold.files.tables.spill import check_length, read_tables
from setfold.files.tables.stream import reading
from setfold.files.tables.table import Table, from_arrow

AT_ONCE = 1 << 24  # bytes
ADVICE = "Write it again."


def verify(path: str | Path) -> str:
    """Check a file of setfold completely.

    Every byte is compared with the digests in the file. The content is then read as other functions
    read it, which checks everything that they rely on. Nothing is changed, and no class that is not
    part of setfold or torch.nn is imported.

    Args:
        path: A model, a state, a state file, encodings (.parquet, .arrow or .npz), or the work
            folder of an interrupted run.

    Returns:
        What was verified, in one line.

    Raises:
        FileError: The file is missing, truncated or corrupt, or setfold did not write it.
        DescriptionError: The model cannot be rebuilt in this version.

    >>> import setfold, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setfold.save(setfold.Pool(3, "mean"), f"{folder}/pool.safetensors")
    ...     setfold.verify(f"{folder}/pool.safetensors")
    'model with 0 tensors; it can be rebuilt'
    """
    path = persist.as_path(path)
    if path.is_dir():
        return _verify_work_folder(path)
    if not path.is_file():
        raise FileError(f"{path} does not exist. Check the path.")
    if is_archive(path):
        return _verify_encodings(path)
    if is_sealed(path):
        return _verify_table(path)
    kind, tensors, _ = persist.read(path)
    if kind == "model":
        return _verify_model(path)
    state = SetState.load(path)
    elements = sum(state.count.tolist())
    return f"state of {len(state):,} sets with {elements:,} elements in {len(tensors)} tensors"


def _verify_model(path: Path) -> str:
    _, tensors, description = persist.read(path, "model")
    with reading(path, ADVICE):
        foreign = sorted({*foreign_names(description["structure"])})
    if foreign:
        return f"model with {len(tensors)} tensors; it needs {', '.join(foreign)}, not imported"
    load(path)
    return f"model with {len(tensors)} tensors; it can be rebuilt"


def _verify_table(path: Path) -> str:
    with SealedFile(path) as file:
        while file.read(AT_ONCE):
            pass
    return _verify_states(path) if holds_states(path) else _verify_encodings(path)


def _verify_states(path: Path) -> str:
    _, sets, provenance = read_provenance(path)
    elements = sum(int(table.count.sum()) for table in read_states(path))
    model = "no model"
    if provenance.model is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model"
            file.write_bytes(provenance.model)
            model = _verify_model(file)
    return f"states of {sets:,} sets with {elements:,} elements; {model}"


def _verify_encodings(path: Path) -> str:
    found = verify_encodings(path)
    return f"encodings of {found.sets:,} sets, each {found.shape}"


# ---- work folders ------------------------------------------------------------------------------


def journal_of(folder: Path) -> Journal:
    """Return the journal of an interrupted run.

    Raises:
        FileError: There is none, or it is corrupt.
    """
    if (folder / "journal").exists():
        check_folder(folder)
        journal = read_journal(folder)
        if journal is not None:
            return journal
    raise FileError(
        f"{folder} has no journal, so it is not the work folder of an interrupted run. Check the "
        "path."
    )


def _verify_work_folder(folder: Path) -> str:
    journal_of(folder)  # before a lock is created
    with hold(folder / "lock", wait=False) as locked:
        if not locked:
            raise FileError(f"a run is using {folder}. Verify it when the run has ended.")
        journal = journal_of(folder)
        if journal.outputs:
            files = [folder / name for name in journal.outputs if (folder / name).exists()]
            done = [verify(file) for file in files]
            return f"work folder of a run that is complete: {'; '.join(done) or 'nothing left'}"
        check_length(folder / "skipped", journal.skipped_bytes)
        tables = sum(1 for _ in _tables(folder, journal))
        return f"work folder of an interrupted run: journal and {tables:,} tables"


def _tables(folder: Path, journal: Journal) -> Iterator[Table]:
    """Yield all tables that a resumed run would read."""
    lengths = journal.lengths
    if journal.buckets is not None:  # files of other buckets are sorted runs already
        needed = tuple(f"{bucket:02d}." for bucket in journal.buckets)
        lengths = {name: length for name, length in lengths.items() if name.startswith(needed)}
    for name, length in lengths.items():
        yield from read_tables(folder / "spill" / name, length)
    whole = [folder / journal.snapshot] if journal.snapshot is not None else []
    for path in [*whole, *(folder / "runs" / name for name in journal.sorted_runs)]:
        yield from map(from_arrow, read_frames(path))
