"""The command info: what is in a file, whether it is intact, and what runs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from setfold.cli.app import app

MAX_COUNTED_BYTES = 1 << 28  # larger text files are not read to count their rows


@app.command(
    epilog="Examples:\n\n  setfold info\n\n  setfold info encoder.safetensors\n\n"
    "  setfold info state.safetensors --json\n\n"
    "  setfold info states.arrow --verify\n\n"
    "  setfold info events.parquet"
)
def info(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A model, a state, a state file, encodings, the work folder of an interrupted run, "
            "or an input of any format, such as events.parquet or file.root:Events. Without a file: "
            "versions of setfold and torch, and which kernels run on this machine."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check the file completely: every byte, and all that it contains."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a file contains, or which kernels run here. No code from the file is run.

    The exit code is 0, or 2 if the file cannot be read or, with --verify, is damaged.
    """
    from setfold.files.tables.stream import reading
    from setfold.files.verify import verify as verify_file

    if file is None:
        if verify:
            raise typer.BadParameter("--verify needs a file.")
        _print_info(_describe_machine(), as_json)
        return
    verified = {"verified": verify_file(file)} if verify else {}
    with reading(file, "Write it again."):
        _print_info(_describe(file) | verified, as_json)


def _describe_machine() -> dict[str, Any]:
    """Return the versions, and the kernels that run here."""
    import platform

    import torch

    import setfold
    from setfold.native.library import describe

    return {
        "setfold": setfold.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": describe(),
    }


def _describe(file: Path) -> dict[str, Any]:
    """Return the facts about a file or folder of any kind."""
    from setfold.errors import FileError
    from setfold.files.encodings import is_archive
    from setfold.files.inputs import reader_of
    from setfold.files.sealed import is_sealed

    is_input = reader_of(file) is not None
    if file.is_dir() and not is_input:
        return _describe_work_folder(file)
    if file.is_file() and (is_archive(file) or is_sealed(file)):
        try:
            return _describe_table(file)
        except FileError:
            if not is_input or _is_ours(file):
                raise
    if is_input:
        return _describe_rows(file)
    return _describe_report(file) or _describe_tensors(file)


def _is_ours(file: Path) -> bool:
    """Whether setfold wrote a table or an archive, even if it is damaged now."""
    import zipfile

    from setfold.files.encodings import is_archive
    from setfold.files.inputs import open_reader
    from setfold.files.tables.arrow import HEADER, RESULT

    if is_archive(file):
        with zipfile.ZipFile(file) as archive:
            return archive.comment.startswith(RESULT)
    with open_reader(file) as reader:
        return HEADER in (reader.schema.metadata or {})


def _describe_rows(file: Path) -> dict[str, Any]:
    """Return the facts about an input: its columns, their types, and the number of rows."""
    from setfold.files.inputs import file_of, open_reader

    size = file_of(file).stat().st_size if file_of(file).is_file() else None
    with open_reader(file) as reader:
        lengths = {name: column.length for name, column in getattr(reader, "columns", {}).items()}
        rows = reader.num_rows
        if rows is None and not lengths and size is not None and size <= MAX_COUNTED_BYTES:
            rows = 0
            for batch in reader.read(reader.schema.names[:1], rows=1 << 16):
                rows += batch.num_rows + len(reader.take_bad_rows())
        more = {} if rows is not None else {n: f", {k:,} rows" for n, k in lengths.items()}
        return {
            "file": str(file),
            "kind": f"rows, {type(reader).__name__.removesuffix('Reader')}",
            **({} if size is None else {"bytes": size}),
            "rows": "not known before reading" if rows is None and not lengths else rows,
            "columns": {f.name: f"{f.type}{more.get(f.name, '')}" for f in reader.schema},
        }


def _facts(file: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the facts about any file."""
    facts = {"file": str(file), "kind": kind, "format": version}
    return facts | ({"bytes": file.stat().st_size} if file.is_file() else {})


def _describe_tensors(file: Path) -> dict[str, Any]:
    """Return the facts about a model or a state."""
    import torch

    from setfold.core import persist

    kind, tensors, description = persist.read(file)
    facts = _facts(file, kind, persist.FORMAT_VERSION)
    if kind == "state":
        # Not loaded as a state, because its statistics may be of a module that is not imported.
        counts = tensors.get("count", torch.empty(0)).flatten().tolist()
        facts |= {"sets": len(counts), "elements": sum(counts)}
    else:
        facts |= {"parameters": sum(t.numel() for t in tensors.values())}
    facts |= description
    facts["tensors"] = {
        name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
        for name, t in tensors.items()
    }
    return facts


def _describe_table(file: Path) -> dict[str, Any]:
    """Return the facts about a state file or about encodings."""
    from setfold.files.encodings import describe_encodings, is_archive
    from setfold.files.features import format_features
    from setfold.files.states import holds_states, read_provenance
    from setfold.files.tables.arrow import VERSION

    if is_archive(file) or not holds_states(file):
        found = describe_encodings(file)
        return _facts(file, "encodings", VERSION) | {
            "sets": found.sets,
            "named by": found.set_type,
            "shape": list(found.shape),
        }
    set_type, sets, provenance = read_provenance(file)
    columns = provenance.columns
    return _facts(file, "states", VERSION) | {
        "sets": sets,
        "named by": str(set_type),
        "features": format_features(columns.features or ()) if columns else "unknown",
        "model": f"{len(provenance.model):,} bytes" if provenance.model else "not in the file",
        "inputs": {name: f"{size:,} bytes" for name, (size, _) in provenance.inputs.items()},
    }


def _describe_report(file: Path) -> dict[str, Any] | None:
    """Return the facts about the report of a training; None for other files."""
    if file.suffix != ".json":
        return None
    try:
        report = json.loads(file.read_bytes())
        told = {name: report[name] for name in ("target", "task", "splits", "best", "verdict")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {"file": str(file), "kind": "report of a training", **told}


def _describe_work_folder(folder: Path) -> dict[str, Any]:
    """Return the facts about an interrupted run."""
    from setfold.files.journal import VERSION
    from setfold.files.verify import journal_of
    from setfold.learning.work_folder import REQUEST

    if (folder / REQUEST).exists():
        trained = sorted(path.stem for path in folder.glob("*.safetensors"))
        return {
            "file": str(folder),
            "kind": "interrupted training",
            "checkpoints": ", ".join(trained) or "none",
            "to do": "train with the same arguments and --resume, or with --restart",
        }
    journal = journal_of(folder)
    return _facts(folder, "work folder", VERSION) | {
        "command": journal.request["command"],
        "elements": journal.elements,
        "skipped": journal.skipped,
    }


def _print_info(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if value is None:
            continue
        typer.echo(
            f"{name + ':':<12} {value if isinstance(value, (str, int)) else _format_value(value)}"
        )


def _format_value(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        value = _outline(value)
    elif isinstance(value, dict):
        value = [f"{name:<32} {shown}" for name, shown in value.items()]
    else:
        return ", ".join(map(str, value))
    return "\n  " + "\n  ".join(value)


def _outline(structure: dict[str, Any], label: str = "", depth: int = 0) -> list[str]:
    """Return the description of a model as indented lines."""
    arguments = structure.get("arguments", {})
    inner: list[tuple[str, dict[str, Any]]] = []
    plain = []
    for name, value in arguments.items():
        nested = value if isinstance(value, list) else [value]
        modules = [v["module"] for v in nested if isinstance(v, dict)]
        inner += [(name if len(modules) == 1 else f"{name}[{i}]", m) for i, m in enumerate(modules)]
        if not modules:
            plain.append(f"{name}={value!r}")
    inner += [(name, child) for name, child in structure.get("children", [])]
    lines = ["  " * depth + f"{label}{structure['class']}({', '.join(plain)})"]
    for name, module in inner:
        lines += _outline(module, f"{name}: ", depth + 1)
    return lines
