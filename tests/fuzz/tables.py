"""State files and encodings: digests protect them, also if they are Arrow or Parquet."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import setfold
from setfold.files.sealed import CHUNK, Seal, SealedFile, SealedWriter, digest
from tests.fuzz.documents import changed, text_of
from tests.fuzz.kind import ANYTHING, Kind
from tests.fuzz.mutations import mutated
from tests.fuzz.saved import WIDTH, encoders

ROWS, SETS = 300, 30
WORDS = (
    "states",
    "rows",
    "encodings",
    "Sum",
    "Max",
    "Softmax",
    "Reduction",
    "slots",
    "count",
    [4, 5],
)


def rows() -> pa.Table:
    generator = np.random.default_rng(0)
    elements = generator.standard_normal((WIDTH, ROWS), dtype=np.float32)
    names = [f"user {number}" for number in generator.integers(0, SETS, ROWS)]
    return pa.table({"user": names, **{f"f{i}": values for i, values in enumerate(elements)}})


def content_of(path: Path) -> Any:
    """What is in a file of encodings."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: arrays[name].tolist() for name in ("set", "count", "encoding")}
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pydict()
    with pa.ipc.open_file(str(path)) as file:
        return file.read_all().to_pydict()


def sealed_again(path: Path, random: Random) -> bytes:
    """A sealed file with other content, and with the digests of that content."""
    with SealedFile(path) as file:
        seal, magic, content = file.seal, file.format, path.read_bytes()
    data, footer = content[: seal.data], content[seal.data + seal.size : -4 - len(magic)]
    match random.randrange(4):
        case 0:
            footer = mutated(footer, random)
        case 1:
            seal = seal._replace(rows=random.choice((0, 1, seal.rows + 1, 2**63, 2**64 - 1)))
        case _:
            data = mutated(data, random)
    footer += len(footer).to_bytes(4, "little") + magic
    chunks = b"".join(digest(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))
    return data + Seal(seal.rows, len(data), digest(footer)).pack(chunks) + footer


class Sealed(Kind):
    """Files that are damaged, or changed and sealed again."""

    def damage(self, random: Random) -> Any:
        sample = random.choice(sorted(self.expected))
        self.path = self.target / sample
        source = self.samples / sample
        if random.randrange(2):
            self.path.write_bytes(mutated(source.read_bytes(), random))
            return self.expected[sample]
        self.change(source, random)
        return ANYTHING

    @abstractmethod
    def change(self, sample: Path, random: Random) -> None:
        """Write a changed sample with valid digests to `path`."""


class StateFiles(Sealed):
    """State files."""

    name = "states"

    def make(self) -> None:
        self.expected = {}
        pq.write_table(rows(), self.samples / "rows.parquet")
        for number, encoder in enumerate(encoders()):
            path = self.samples / f"{number}.arrow"
            out = self.samples / "out.arrow"
            inputs = self.samples / "rows.parquet"
            setfold.encode_sets(encoder, inputs, out, set="user", states=path, overwrite=True)
            self.expected[path.name] = self._readout(path, out)

    def change(self, sample: Path, random: Random) -> None:
        if random.randrange(2):
            self.path.write_bytes(sealed_again(sample, random))
            return
        with pa.ipc.open_file(str(sample)) as file:
            table = file.read_all()
        metadata = dict(table.schema.metadata)
        name = random.choice(sorted(metadata))
        if metadata[name][:1] in b"{[":
            metadata[name] = text_of(changed(json.loads(metadata[name]), random, WORDS)).encode()
        else:
            metadata[name] = mutated(metadata[name], random)
        writer = SealedWriter(self.path)
        table = table.replace_schema_metadata(metadata)
        with pa.ipc.new_file(writer, table.schema) as stream:
            stream.write_table(table)
        writer.seal(len(table))

    def read(self) -> Any:
        return self._readout(self.path, self.target / "out.arrow")

    def _readout(self, path: Path, out: Path) -> Any:
        setfold.readout_states(path, out, overwrite=True)
        return content_of(out)


class Encodings(Sealed):
    """Encodings, which are verified."""

    name = "encodings"

    def make(self) -> None:
        self.expected = {}
        pq.write_table(rows(), self.samples / "rows.parquet")
        for suffix in (".parquet", ".arrow", ".npz"):
            path = self.samples / f"out{suffix}"
            setfold.encode_sets(encoders()[0], self.samples / "rows.parquet", path, set="user")
            self.expected[path.name] = content_of(path)

    def change(self, sample: Path, random: Random) -> None:
        is_archive = sample.suffix == ".npz"
        content = (
            mutated(sample.read_bytes(), random) if is_archive else sealed_again(sample, random)
        )
        self.path.write_bytes(content)

    def read(self) -> Any:
        verified = setfold.verify(self.path)
        try:
            return content_of(self.path)
        except Exception:  # setfold does not read the footer that other tools need
            return verified
