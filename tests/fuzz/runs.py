"""The work folder of an interrupted run: journal, snapshot, spilled tables, sorted runs, outputs."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import setfold
from setfold.core import persist
from setfold.files import journal, plan, run
from setfold.files.budget import Budget
from setfold.files.sealed import is_sealed
from setfold.files.tables import frames, spill
from setfold.files.tables.store import Store
from tests.fuzz.documents import changed, text_of
from tests.fuzz.kind import ANYTHING, Kind, NotAllowedError
from tests.fuzz.mutations import mutated
from tests.fuzz.tables import sealed_again

ROWS, SETS = 240, 40
MOMENTS: dict[str, tuple[Any, str, int]] = {  # where runs are interrupted: before the n-th call
    "reading": (Store, "add", 12),
    "merging": (Store, "drop_bucket", 2),
    "publishing": (run, "publish", 1),
}


class WorkFolders(Kind):
    """Resuming gives the bytes of a run that was never interrupted, or is refused.

    With digests that match, journal, tables and outputs may hold anything, and so may the result.
    Files outside of the folder stay as they are in any case.
    """

    name = "runs"

    def make(self) -> None:
        _use_little_memory()
        self.out, self.states = self.target / "out.parquet", self.target / "states.arrow"
        self.canary = self.target / "thesis"
        self._write_inputs()
        torch.manual_seed(0)
        self.encoder = setfold.SlotSetEncoder(3, 4, 6, 5).eval()
        self.target.mkdir()
        self._encode()
        self.expected = self._outputs()
        for moment, (owner, name, call) in MOMENTS.items():
            shutil.rmtree(self.target)
            self.target.mkdir()
            self._interrupt(owner, name, call)
            shutil.copytree(self.work, self.samples / moment)

    @property
    def work(self) -> Path:
        return self.target / "out.parquet.work"

    def _write_inputs(self) -> None:
        self.inputs = self.samples.parent / "in"
        self.inputs.mkdir()
        generator = np.random.default_rng(0)
        for part in range(3):
            numbers = generator.standard_normal((ROWS // 3, 3)).astype(np.float32)
            numbers[5] = np.nan  # a row that is skipped
            columns = {f"f{i}": numbers[:, i] for i in range(3)}
            events = generator.integers(0, SETS, ROWS // 3)
            pq.write_table(pa.table({"event": events, **columns}), self.inputs / f"{part}.parquet")

    def _encode(self, **options: Any) -> None:
        setfold.encode_sets(
            self.encoder,
            self.inputs,
            self.out,
            set="event",
            states=self.states,
            skip_errors=True,
            save_every=0,
            **options,
        )

    def _outputs(self) -> tuple[bytes, bytes]:
        return self.out.read_bytes(), self.states.read_bytes()

    def _interrupt(self, owner: Any, name: str, call: int) -> None:
        original, calls = getattr(owner, name), count(1)

        def stop(*arguments: Any) -> Any:
            if next(calls) == call:
                raise KeyboardInterrupt
            return original(*arguments)

        with patch.object(owner, name, stop):
            try:
                self._encode()
            except KeyboardInterrupt:
                return
        raise AssertionError(f"{name} was not called {call} times")

    # ---- damage ------------------------------------------------------------------------------

    def damage(self, random: Random) -> Any:
        sample = random.choice(sorted(self.samples.iterdir()))
        shutil.copytree(sample, self.work)
        self.canary.mkdir()
        (self.canary / "00.states.tables").write_text("years of work")
        self.kept = self._others()
        files = sorted(path for path in self.work.rglob("*") if path.is_file())
        if random.randrange(2):
            path = self.work / "journal" if random.randrange(2) else random.choice(files)
            self._change(path, random)
            return ANYTHING
        path = random.choice([self.work / "journal", *files])
        if random.randrange(10) == 0:
            self._link(random.choice([path, path.parent]), random)
        else:
            random.choice(DAMAGES)(path, files, random)
        return self.expected

    def _change(self, path: Path, random: Random) -> None:
        """Change the content of a file, and write its digests again."""
        if path.name == "journal":
            saved = json.loads(path.read_text())["journal"]
            saved = changed(saved, random, (*WORDS, str(self.canary), str(self.out)))
            path.write_text(text_of(journal._to_save(saved)))
        elif path.name.startswith("output") and is_sealed(path):
            path.write_bytes(sealed_again(path, random))
        elif path.name.startswith("snapshot") or path.suffix in (".run", ".tables"):
            _change_a_frame(path, random)
        else:
            _mutate(path, [], random)

    def _link(self, path: Path, random: Random) -> None:
        """Replace a file or a folder by a link."""
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(random.choice((self.canary, self.canary / "00.states.tables")))

    def read(self) -> Any:
        try:
            self._encode(resume=True)
            return self._outputs()
        finally:
            if self._others() != self.kept:
                raise NotAllowedError("changed a file that is not its own")

    def _others(self) -> dict[str, tuple[int, int]]:
        """All files that are not of the run, with size and time."""
        files = [*self.canary.rglob("*"), *self.inputs.rglob("*"), *self.samples.rglob("*")]
        stats = {str(path): path.stat() for path in files}
        return {name: (found.st_size, found.st_mtime_ns) for name, found in stats.items()}


def _use_little_memory() -> None:
    """Small batches and shards, many spills, and a checkpoint after each step."""
    plan.split_memory = lambda *_: Budget(batch_rows=16, store_bytes=8_000)
    plan.SHARD_ROWS = 60
    spill.BUCKETS = 4
    journal.SAVE_SHARE = math.inf
    os.fsync = lambda _: None


def _change_a_frame(path: Path, random: Random) -> None:
    """Change the content of a table on disk, and write its digest again."""
    content = path.read_bytes()
    found, position = [], 0
    while position < len(content):
        _, length, _ = frames.HEAD.unpack_from(content, position)
        start = position + frames.HEAD.size
        found.append(content[start : start + length])
        position = start + length
    place = random.randrange(len(found))
    match random.randrange(4):
        case 0:
            del found[place]
        case 1:
            found.insert(place, found[random.randrange(len(found))])
        case _:
            found[place] = mutated(found[place], random)
    written = bytearray()
    for inside in found:
        hasher = blake2b(inside, digest_size=persist.DIGEST_BYTES)
        hasher.update(frames.place_of(path, len(written), len(inside)))
        written += frames.HEAD.pack(frames.MAGIC, len(inside), hasher.digest()) + inside
    path.write_bytes(written)


WORDS = (
    "output-0",
    "output-1",
    "snapshot-1",
    "00.run",
    "03.run",
    "00.states.tables",
    "01.rows.tables",
    "../thesis",
    "../thesis/00.states.tables",
    "../../thesis/00.states.tables",
    "encode",
    "merge",
    [0, 1, 2, 3],
    99,
    {"00.states.tables": 0},
    {"../../thesis/00.states.tables": 0},
)

Damage = Callable[[Path, list[Path], Random], None]


def _mutate(path: Path, files: list[Path], random: Random) -> None:
    path.write_bytes(mutated(path.read_bytes(), random))


def _remove(path: Path, files: list[Path], random: Random) -> None:
    path.unlink()


def _empty(path: Path, files: list[Path], random: Random) -> None:
    path.write_bytes(b"")


def _exchange(path: Path, files: list[Path], random: Random) -> None:
    other = random.choice(files)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def _append(path: Path, files: list[Path], random: Random) -> None:
    with path.open("ab") as file:
        file.write(random.choice(files).read_bytes())


DAMAGES: tuple[Damage, ...] = (
    *[_mutate] * 6,
    _remove,
    _empty,
    _exchange,
    _append,
)
