"""The beginning and the end of a run's work folder.

At the beginning, a run locks its outputs, and finds the checkpoint of an interrupted run. At the
end, complete outputs get their final names. Nothing is replaced that the user wants to keep.
"""

from __future__ import annotations

import errno
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from setfold.core.persist import hold, is_full_disk, replace_durably, sync
from setfold.errors import FileError, InputError
from setfold.files.encodings import verify_encodings
from setfold.files.journal import (
    START_OVER,
    Journal,
    WorkFolder,
    check_folder,
    read_journal,
    to_json_value,
)
from setfold.files.outputs import CsvSink, digest_of_content, sink_for
from setfold.files.results import published_result
from setfold.files.states import read_states


@contextmanager
def open_work_folder(
    outputs: Sequence[Path],
    request: dict[str, Any],
    *,
    resume: bool,
    restart: bool,
    save_every: float,
) -> Iterator[WorkFolder]:
    """Lock all outputs, and create the work folder of the first one.

    If the block ends without error, or before the first checkpoint, the folder is removed.

    Args:
        outputs: The outputs, as absolute paths.
        request: What the user asked for; must be serializable as JSON.
        resume: Whether to resume an interrupted run.
        restart: Whether to discard an interrupted run.
        save_every: The checkpoint interval in seconds.

    Raises:
        FileError: Another process writes one of the outputs, the checkpoint cannot be read, or the
            disk is full.
        InputError: There is an interrupted run, and neither `resume` nor `restart` is set.
    """
    if resume and restart:
        raise InputError("--resume and --restart exclude each other; pass one of them, not both.")
    folder, is_complete = _folder_of(outputs[0]), False
    try:
        with ExitStack() as locks:
            for path in sorted(outputs):  # the same order everywhere, so that one process succeeds
                locks.enter_context(_claim(path))
            journal = _open(outputs, to_json_value(request), resume, restart)
            yield WorkFolder(folder, to_json_value(request), journal, save_every)
            is_complete = True
            _discard_checkpoint(folder)
    except KeyboardInterrupt as error:
        error.add_note(_describe_end(folder, is_complete))
        raise
    except (OSError, FileError) as error:
        if not is_full_disk(error):
            raise
        raise FileError(
            f"the disk of {folder} is full. Free some space. {_describe_end(folder, is_complete)}"
        ) from error


def _open(
    outputs: Sequence[Path], request: dict[str, Any], resume: bool, restart: bool
) -> Journal | None:
    """Return the journal of the run to resume. If there is none, empty the folder."""
    folder = _folder_of(outputs[0])
    for path in outputs[1:]:
        if (_folder_of(path) / "journal").exists():
            raise InputError(
                f"an earlier run for {path} was interrupted; its checkpoint is in "
                f"{_folder_of(path)}. Complete that run first, or remove the folder."
            )
    if restart:
        _discard_checkpoint(folder)
    journal = read_journal(folder)
    if journal is None:
        _empty(folder)
        return None
    if not resume:
        raise InputError(
            f"an earlier run for {outputs[0]} was interrupted; its checkpoint is in {folder}. "
            "Resume it with --resume, or discard it with --restart."
        )
    differ = [name for name in request if journal.request.get(name) != request[name]]
    if differ:
        raise InputError(
            f"cannot resume: the interrupted run had different {', '.join(differ)}. Use the same "
            "arguments as before, or start over with --restart."
        )
    return journal


def _folder_of(out: Path) -> Path:
    return out.with_name(out.name + ".work")


@contextmanager
def _claim(out: Path) -> Iterator[None]:
    """Lock an output. At the end, remove its work folder, except if it has a checkpoint."""
    folder = _folder_of(out)
    check_folder(folder)
    with hold(folder / "lock", wait=False) as locked:
        if not locked:
            raise FileError(
                f"another process is writing {out} (it has locked {folder / 'lock'}). Wait until "
                "it ends, or choose another output."
            )
        try:
            yield
        finally:
            if not (folder / "journal").exists():
                _empty(folder)
                (folder / "lock").unlink()  # safe while it is locked: see `hold`
                with suppress(OSError):  # another process may already have created a new lock
                    folder.rmdir()


def _discard_checkpoint(folder: Path) -> None:
    """Remove the journal first and for good: the rest is not needed any more."""
    (folder / "journal").unlink(missing_ok=True)
    sync(folder)


def _empty(folder: Path) -> None:
    """Remove everything except the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _describe_end(folder: Path, is_complete: bool) -> str:
    """Say what is kept of a run that ended early, and how to continue."""
    if is_complete:
        return "The outputs are complete: with --resume, the same command has nothing to do."
    if (folder / "journal").exists():
        return (
            f"Everything up to the last checkpoint is kept in {folder}. Continue with the same "
            "command and --resume, or discard it with --restart."
        )
    return (
        "There was no checkpoint yet, so nothing is kept, and no output has changed. Start again "
        "with the same command, with or without --resume."
    )


# ---- the end: outputs get their final names ----------------------------------------------------


def check_replaceable(path: Path, digest: str | None, *, overwrite: bool) -> None:
    """Raise an error if a file exists that an output must not replace.

    Args:
        path: The final name of the output.
        digest: What the output is the result of. A file with the same digest may be replaced.
        overwrite: Whether the user allows to replace existing files.
    """
    if not path.exists() or (digest is not None and published_result(path) == digest):
        return
    if not overwrite:
        raise InputError(
            f"{path} exists{'' if digest is None else ', but it is not the result of this command'}"
            ". Choose another output, or replace it with --overwrite."
            + (" To keep it if this command wrote it, pass --resume." if digest is None else "")
        )


def publish_outputs(work: WorkFolder) -> str | None:
    """Move the outputs of a complete run to their final names, except those that are there.

    Returns:
        The list of what was skipped, next to the first output; None if nothing was.

    Raises:
        InputError: A file has appeared that must not be replaced.
        FileError: An output is lost.
    """
    journal = work.journal
    assert journal is not None
    finals = [Path(final) for final in journal.outputs.values()]
    for name, final in journal.outputs.items():
        _check(work.folder / name, Path(final), journal.digests[name], journal)
    for name, final in journal.outputs.items():
        if (work.folder / name).exists():
            _move(work.folder / name, Path(final))
    report = report_of(finals[0])
    if work.skipped_file.exists():
        work.skipped_file.replace(report)
    elif not journal.skipped:  # the list of an earlier run
        report.unlink(missing_ok=True)
    for folder in {final.parent for final in finals}:
        sync(folder)
    return str(report) if journal.skipped else None


def verify_outputs(work: WorkFolder) -> None:
    """Read the outputs of an interrupted run completely, before they get their final names.

    Raises:
        FileError: One of them is damaged.
    """
    journal = work.journal
    assert journal is not None
    only_states = journal.request["command"] == "merge"
    for number, (name, final) in enumerate(journal.outputs.items()):
        path = work.folder / name
        if not path.exists():  # it has its final name already
            continue
        try:
            if only_states or number > 0:
                deque(read_states(path), maxlen=0)
            elif sink_for(Path(final)) is CsvSink:
                if digest_of_content(path) != journal.digests[name]:
                    raise FileError(f"{path} is corrupt: it has changed.")
            else:
                verify_encodings(path)
        except FileError as error:
            raise FileError(f"a complete output was damaged: {error} {START_OVER}") from error


def report_of(out: Path) -> Path:
    """Return where rows, files and sets are listed that were skipped."""
    return out.with_name(out.name + ".skipped.jsonl")


def _check(path: Path, final: Path, digest: str, journal: Journal) -> None:
    if path.exists():
        check_replaceable(final, digest, overwrite=journal.overwrite)
    elif published_result(final) != digest:
        raise FileError(f"{final} was complete, but it is missing or has changed. {START_OVER}")


def _move(path: Path, final: Path) -> None:
    """Move a file whose content is on the disk, also to another disk. The caller syncs the name."""
    try:
        path.replace(final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_to_another_disk(path, final)


def _move_to_another_disk(path: Path, final: Path) -> None:
    temporary = final.with_name(f".{final.name}.part")  # of its own, because `final` is locked
    try:
        shutil.copyfile(path, temporary)
        replace_durably(temporary, final)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_full_disk(error):
            raise FileError(
                f"the disk of {final} is full. Free some space, then run the same command with "
                f"--resume. The complete output is kept in {path.parent}."
            ) from None  # with no cause: it is not the disk of the work folder
        raise
    path.unlink()
