"""Formats that can be read: no checksum protects most, so changed numbers are other content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import setfold
from setfold.files.columns import ColumnSpec
from setfold.files.engines import local
from setfold.files.inputs import open_reader
from setfold.files.plan import SHARD_ROWS, make_plan
from tests.files.readers.written import FORMATS, Format
from tests.fuzz import samples
from tests.fuzz.archives import mutated_gzip, mutated_zip
from tests.fuzz.documents import changed, text_of
from tests.fuzz.kind import ANYTHING, Kind
from tests.fuzz.mutations import mutated

ROWS = 51
MEMORY = 600_000_000

Mutation = Callable[[bytes, Random], bytes]


class InputFile(Kind):
    """Files of one suffix.

    Attributes:
        forms: how to write samples.
        inside: mutates what is in an archive; None for other formats.
    """

    forms: ClassVar[tuple[Format, ...]]
    inside: ClassVar[Mutation | None] = None

    def make(self) -> None:
        self.widths = {}
        for number, form in enumerate(self.forms):
            path = self.samples / f"{number}{form.suffix}"
            form.write(path, ROWS)
            with open_reader(path) as reader:
                self.widths[path.name] = ColumnSpec(None, None).width(reader.schema) or 3

    def damage(self, random: Random) -> Any:
        sample = random.choice(sorted(self.samples.iterdir()))
        self.path = self.target / sample.name
        self.skip = bool(random.randrange(2))
        self.write_damaged(sample, random)
        return ANYTHING

    def write_damaged(self, sample: Path, random: Random) -> None:
        mutate = mutated
        if type(self).inside is not None and random.randrange(2):
            mutate = type(self).inside
        self.path.write_bytes(mutate(sample.read_bytes(), random))

    def read(self) -> Any:
        """All columns, as the reader returns them, and the elements, as an encoder sees them."""
        error = None
        try:
            self.read_columns()
        except setfold.SetfoldError as found:
            error = found
        self.read_elements()
        if error is not None:
            raise error

    def read_columns(self) -> None:
        with open_reader(self.path) as reader:
            if reader.block_bytes(reader.schema.names) > MEMORY // 3:  # the plan refuses it
                return
            reader.check(reader.schema.names)
            reader.cuts(SHARD_ROWS)
            for batch in reader.read(reader.schema.names, rows=8):
                batch.to_pylist()
                reader.take_bad_rows()
                reader.take_reasons()

    def read_elements(self) -> None:
        encoder = setfold.Pool(self.widths[self.path.name], ["sum", "max"]).eval()
        columns = ColumnSpec(None, None)
        plan = make_plan(encoder, [self.path], columns, memory=MEMORY, skip=self.skip)
        for _ in local.steps(plan.task, plan.shards, 0, 0):
            pass


class ZarrStore(InputFile):
    """A Zarr store is a folder: one of its files is damaged."""

    name = "zarr"
    forms = (
        FORMATS["zarr"],
        FORMATS["zarr, array"],
        Format(".zarr", samples.zarr_shards),
        Format(".zarr", samples.zarr_2),
    )

    def write_damaged(self, sample: Path, random: Random) -> None:
        shutil.copytree(sample, self.path)
        path = random.choice(sorted(file for file in self.path.rglob("*") if file.is_file()))
        match random.randrange(6):
            case 0:
                path.unlink()
            case 1 | 2 if path.name.startswith((".z", "zarr.json")):
                path.write_text(text_of(changed(json.loads(path.read_text()), random)))
            case _:
                path.write_bytes(mutated(path.read_bytes(), random))


def _kind(name: str, *forms: str | Format, inside: Mutation | None = None) -> type[InputFile]:
    found = tuple(FORMATS[form] if isinstance(form, str) else form for form in forms)
    more = {"inside": inside and staticmethod(inside)}
    return type(f"{name} files", (InputFile,), {"name": name, "forms": found, **more})


INPUTS: tuple[type[InputFile], ...] = (
    _kind("parquet", "parquet", Format(".parquet", samples.parquet_plain)),
    _kind(
        "arrow",
        "arrow",
        "arrow stream",
        "feather",
        Format(".arrow", samples.arrow_dictionaries),
        Format(".ipc", samples.arrow_dictionaries),
    ),
    _kind("csv", "csv", "tsv"),
    _kind("csv.gz", "csv.gz", inside=mutated_gzip),
    _kind("jsonl", "jsonl"),
    _kind("jsonl.gz", "ndjson.gz", inside=mutated_gzip),
    _kind("npy", "npy", "npy, plain", "npy, fortran", "npy, fields"),
    _kind("npz", "npz", "npz, compressed", inside=mutated_zip),
    _kind("torch", "torch", "torch, tensor", inside=mutated_zip),
    _kind("hdf5", "hdf5", "hdf5, chunks", Format(".h5", samples.hdf5_ragged)),
    ZarrStore,
    _kind("las", "las", Format(".las", samples.laz_layers)),
    _kind("laz", "laz", Format(".laz", samples.laz_layers)),
    _kind("ply", "ply", "ply, text"),
    _kind("off", "off"),
    _kind("stl", "stl"),
    _kind("obj", "obj"),
    _kind("glb", "glb"),
    _kind("root", "root", "root, ntuple"),
)
