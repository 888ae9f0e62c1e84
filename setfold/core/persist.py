"""Files: atomic, durable, with a checksum; and locks, with which processes coordinate their work.

States and models are safetensors files. Their header contains the kind ("state" or "model"), the
format version, a checksum of the tensors and a JSON description. Pickle is not used. A file may come
from anywhere: whatever is wrong with it raises FileError.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from setfold.errors import FileError, InputError

FORMAT_VERSION = 1
HEADER = "setfold"  # the only entry of a file's metadata: a JSON object with these types
HEAD = {"kind": str, "version": int, "description": dict, "checksum": str}
MAX_HEADER = 1 << 24  # characters of JSON; as Python objects they take up to twenty times as much
DIGEST_BYTES = 16


def digest_of(tensors: dict[str, Tensor], *words: str) -> str:
    """A hash of tensors (names, dtypes, shapes, bytes) and strings, the same on every machine.

    >>> digest_of({"a": torch.zeros(2)}) == digest_of({"a": torch.zeros(2)})
    True
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for word in words:
        hasher.update(word.encode() + b"\0")
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def checksum(text: str) -> str:
    """A hash of a text, the same on every machine.

    >>> checksum("setfold") == checksum("setfold"), len(checksum(""))
    (True, 32)
    """
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def write(
    path: str | Path, kind: str, tensors: dict[str, Tensor], description: dict[str, Any]
) -> None:
    """Write tensors and a JSON description to a file, atomically.

    Args:
        path: the file.
        kind: "state" or "model".
        tensors: by name.
        description: a JSON object.

    Raises:
        FileError: the folder does not exist, or the path is a folder.
    """
    target, tensors = as_path(path), _unshared(tensors)
    head = {"kind": kind, "version": FORMAT_VERSION, "description": description}
    head["checksum"] = digest_of(tensors, json.dumps(head))
    text = json.dumps(head)
    if len(text) > MAX_HEADER:
        raise FileError(
            f"cannot write {target}: its description has {len(text):,} characters; at most "
            f"{MAX_HEADER:,} are supported. Describe less."
        )
    # One entry, because safetensors shuffles several. Equal content must give equal files.
    write_atomically(target, save(tensors, {HEADER: text}))


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file.

    Raises:
        InputError: it is not a path.

    >>> as_path("a/b").name
    'b'
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"expected the path of a file; got {type(path).__name__}.")
    return Path(path)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU. Shared memory is copied, as safetensors requires."""
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: to a temporary file, which then replaces `path`.

    When the function returns, the file survives a power loss.

    Raises:
        FileError: the folder does not exist, the path is a folder, or the disk is full.
    """
    if not path.parent.is_dir():
        raise FileError(
            f"cannot write {path}: the folder {path.parent} does not exist. Create it first."
        )
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder. Pass the path of a file.")
    try:
        _write_and_replace(path, content)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise FileError(
            f"cannot write {path}: the disk is full. Free some space, then try again."
        ) from error


def _write_and_replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # like other new files; mkstemp uses 0o600
        replace_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_durably(path: Path, target: Path) -> None:
    """Rename a file, replacing the target. The target is always complete, even after a power loss.

    The content reaches the disk before the new name does, and the new name before this returns.
    """
    sync(path)
    path.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some network file systems cannot sync folders; they do it themselves
    finally:
        os.close(handle)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether a full disk or an exhausted quota caused an error."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return error is not None and is_full_disk(error.__cause__)


def read(
    path: str | Path, kind: str | None = None
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read a file that `write` wrote.

    Args:
        path: the file.
        kind: the expected kind, "state" or "model"; None for any.

    Returns:
        The kind, the tensors by name and the description.

    Raises:
        FileError: the file is missing, truncated, corrupt, or of another kind or format version.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileError(f"{path} does not exist. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            head = _head(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (FileError, OSError):
        raise
    except Exception as error:  # safetensors and torch raise various errors for a damaged header
        raise FileError(
            f"{path} is truncated, corrupt or not a safetensors file ({error}). Write it again."
        ) from error
    saved = head.pop("checksum")
    if digest_of(tensors, json.dumps(head)) != saved:
        raise FileError(
            f"{path} is corrupt: its checksum does not match its content. Write it again."
        )
    if kind is not None and head["kind"] != kind:
        raise FileError(f"{path} contains a setfold {head['kind']}; expected a {kind}.")
    return head["kind"], tensors, head["description"]


def _head(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The parsed header entry of a file: kind, version, description and checksum."""
    if HEADER not in metadata:
        raise FileError(
            f"{path} is a safetensors file, but setfold did not write it: its header has no entry "
            f"{HEADER!r}. Write states with state.save and models with setfold.save."
        )
    text = metadata[HEADER]
    if len(text) > MAX_HEADER:
        raise FileError(
            f"{path} is corrupt: its header has {len(text):,} characters; at most {MAX_HEADER:,} "
            "are supported. Write it again."
        )
    try:
        head = json.loads(text)
        types = {name: type(value) for name, value in head.items()}
    except (AttributeError, ValueError, RecursionError):
        head, types = {}, {}
    if types.get("version") is int and head["version"] != FORMAT_VERSION:
        raise FileError(
            f"{path} has format version {head['version']}; this version of setfold reads version "
            f"{FORMAT_VERSION}. Read it with the setfold that wrote it, or write it again."
        )
    if types != HEAD or len(metadata) != 1:
        raise FileError(f"{path} is corrupt: its header cannot be read. Write it again.")
    return head


# ---- locks: the operating system releases them when a process ends, even if it is killed ---------


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file while the block runs.

    The block may remove the file and its folder as its last step. A process that opened the file
    before it was removed notices that, and locks a new file.

    Args:
        path: The file. It is created if it does not exist, and so is its folder.
        wait: Whether to wait until no other process has locked the file.

    Yields:
        Whether the file is locked. Always True if `wait` is set.
    """
    while True:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # another process has just removed the folder
            continue
        with file:
            locked = _lock(file, wait)
            if not _is_at(file, path):  # a lock on a removed file excludes nobody
                continue
            try:
                yield locked
            finally:  # explicitly, because a forked child process may keep the file open
                if locked:
                    _unlock(file)
            return


def _lock(file: IO[bytes], wait: bool) -> bool:
    import fcntl  # not on Windows, where encoders work all the same

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: IO[bytes]) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one that a path refers to."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
