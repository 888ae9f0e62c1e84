"""Plan a run: inspect the inputs, split them into shards, and split the memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import digest_of
from setfold.core.structure import is_known
from setfold.core.weights import NARROW, weights_of
from setfold.errors import FileError, InputError, SetfoldError
from setfold.files.budget import Budget, format_size, split_memory
from setfold.files.columns import ColumnSpec, Validated, parsed_by
from setfold.files.engines.local import one_thread
from setfold.files.engines.task import Shard, Skipped, Stamp, Task
from setfold.files.features import Feature
from setfold.files.inputs import Input, absolute, find_inputs, open_reader
from setfold.files.readers.reader import Reader
from setfold.files.rows import rows_of
from setfold.files.states import read_provenance
from setfold.files.tables.absorb import TOO_LARGE, find_unusable
from setfold.files.tables.table import check_storable, element_dtypes
from setfold.kernels.modes import without_autocast
from setfold.preprocessing.columns import columns_of

SHARD_ROWS = 1 << 20
SAMPLE_ROWS = 256
POSITION = (Feature("x"), Feature("y"), Feature("z"))  # default features of 3D models on scans
ID_COPIES = 12  # copies of a set id in memory while its row is processed


@dataclass(frozen=True)
class Plan:
    """What a run reads, and how.

    Args:
        task: How shards become partial states.
        shards: All shards, in order.
        inputs: The files, with their stamps.
        rows: The number of rows; None if it is not known before reading.
        set_type: The type of the set ids.
        skipped: Files that are skipped because they cannot be used.
        budget: How the memory is split.
        memory: The memory limit of the process in bytes.
        left_out: Files that would be inputs, but are outputs of the run.
    """

    task: Task
    shards: list[Shard]
    inputs: dict[str, Stamp]
    rows: int | None
    set_type: pa.DataType
    skipped: list[Skipped]
    budget: Budget
    memory: int
    left_out: list[Path]

    @property
    def bytes(self) -> int:
        """The size of the inputs."""
        return sum(stamp.bytes for stamp in self.inputs.values())

    @property
    def features(self) -> tuple[str, ...]:
        """The features of an element, as for --features; empty if no rows are read."""
        return tuple(map(str, self.task.columns.features or ()))

    def signature(self) -> dict[str, Any]:
        """Return what determines the result. A resumed run must have the same signature."""
        encoder, columns = self.task.encoder, self.task.columns
        return {
            "model": weights_of(encoder, encoder.shaping_modules()).digest,
            "head": digest_of(encoder.state_dict(), str(encoder)),
            "features": columns.features,
            "set": columns.set,
            "explode": columns.explode,
            "root": columns.root,
            "on_error": "skip" if self.task.skip else "stop",
            "memory": self.memory,
            "batch_rows": self.task.batch_rows,
            "inputs": [[absolute(name), *stamp] for name, stamp in self.inputs.items()],
        }


def make_plan(
    encoder: StreamingSetEncoder,
    names: Sequence[str | Path],
    columns: ColumnSpec,
    *,
    memory: int,
    skip: bool,
    threads: int = 1,
    states: Sequence[Path] = (),
    without: Collection[Path] = (),
) -> Plan:
    """Inspect all inputs, without reading more than a few rows.

    Args:
        encoder: The encoder, in evaluation mode.
        names: Files, folders and glob patterns.
        columns: Which columns hold the features and the set id.
        memory: The memory limit of the process in bytes.
        skip: Whether to skip files that cannot be used, instead of raising an error.
        threads: How many threads may process batches, if the model and the memory allow it.
        states: State files to start from.
        without: Files to leave out, as resolved paths.
    """
    check_storable(encoder)
    model_bytes = sum(part.nbytes for part in (*encoder.parameters(), *encoder.buffers()))
    split_memory(memory, model_bytes, 1, 1)  # an error before anything is opened
    scan = _InputScan(encoder, parsed_by(columns_of(encoder), columns), skip, memory)
    for path in states:
        scan.add_states(path)
    left_out = []
    for found in find_inputs(names, columns.root, columns.set_names) if names else ():
        if without and found.path.resolve() in without:
            left_out.append(found.path)
        else:
            scan.add_rows(found)
    if not scan.shards and scan.skipped:
        raise InputError(
            f"none of the inputs can be used. The first error is: {scan.skipped[0].reason}"
        )
    width = scan.width or 1
    row_bytes = estimate_row_bytes(encoder, width) + ID_COPIES * scan.id_bytes
    stored_bytes = 8 * width + scan.id_bytes
    budget = split_memory(memory, model_bytes, scan.num_columns, row_bytes, stored_bytes)
    batch_rows = max(1, int(budget.batch_rows / scan.elements_per_row))
    threads = min(
        threads_for(encoder, threads),
        budget.batches,
        max(1, memory // 3 // max(scan.block_bytes, 1)),
    )
    task = Task(encoder, scan.columns, scan.width, batch_rows, skip, threads)
    set_type = scan.set_type or pa.large_string()
    return Plan(
        task,
        scan.shards,
        scan.inputs,
        scan.rows,
        set_type,
        scan.skipped,
        budget,
        memory,
        left_out,
    )


def is_thread_safe(model: nn.Module) -> bool:
    """Whether several threads may call a model at the same time.

    Modules and hooks of the user may keep something in their attributes during a call. Weights in
    half precision are replaced by float32 weights during a call.
    """
    tensors = chain(model.parameters(), model.buffers())
    if any(tensor.dtype in NARROW for tensor in tensors):
        return False
    return all(
        is_known(type(module)) and not (module._forward_hooks or module._forward_pre_hooks)
        for module in model.modules()
    )


def threads_for(encoder: StreamingSetEncoder, threads: int) -> int:
    """Return how many threads process batches, if the memory allows it."""
    if not is_thread_safe(encoder):
        return 1
    # With another device, one thread reads while the other one waits for it.
    return threads if encoder.device.type == "cpu" else 2


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Set how torch computes in a run, with any number of threads: in the model's own precision.

    If batches are processed by one thread only, its operations use as many as torch does.
    """
    tensors = chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    with (
        torch.no_grad(),
        without_autocast(device),  # which new threads do not have, either
        one_thread() if is_thread_safe(model) else nullcontext(),
    ):
        yield


def estimate_row_bytes(encoder: StreamingSetEncoder, width: int) -> int:
    """Estimate the memory of one row: copies of its features, attention weights, activations."""
    slots = max((part.shape[1] for part in encoder.draw_frame(None, None)), default=1)
    numbers = 4 * width + 4 * slots
    if encoder.has_features:  # the output of a layer is at most as wide as its weights
        numbers += 3 * max(
            (max(part.shape) for part in encoder.parameters() if part.dim()), default=1
        )
    return numbers * 8


class _InputScan:
    """What is known about the inputs so far."""

    def __init__(
        self, encoder: StreamingSetEncoder, columns: ColumnSpec, skip: bool, memory: int
    ) -> None:
        self.encoder, self.columns, self.skip, self.memory = encoder, columns, skip, memory
        self.parser = columns_of(encoder)
        self.width = encoder.dim_in if self.parser is None else self.parser.width
        self.valid = Validated()
        self.shards: list[Shard] = []
        self.inputs: dict[str, Stamp] = {}
        self.skipped: list[Skipped] = []
        self.rows: int | None = 0
        self.set_type: pa.DataType | None = None
        self.num_columns = 0
        self.block_bytes = 0  # of the rows that must be read together, by each thread
        self.is_sampled = False
        self.elements_per_row = 1.0  # more than 1 if rows are exploded
        self.id_bytes = 0  # of a set id

    def add_states(self, path: Path) -> None:
        """Add a state file."""
        if not path.is_file():
            raise FileError(f"{path} does not exist. Check the path.")
        stamp = Stamp.of(path)
        set_type, sets, _ = read_provenance(path)
        self._check_set_type(set_type, path)
        self.inputs[str(path)] = stamp
        if sets:
            self.shards.append(Shard(Input(path, {}), stamp, 0, sets, 1.0, holds_states=True))

    def add_rows(self, found: Input) -> None:
        """Add a file of rows."""
        try:
            stamp = Stamp.of(found.path)
            numbers = self.columns.numbers(self.parser)
            texts = self.columns.texts(self.parser)
            with open_reader(found.path, texts, numbers) as reader:
                shards = list(self._split(found, stamp, reader))
        except SetfoldError as error:
            if not self.skip:
                raise
            self.skipped.append(Skipped(str(found.path), None, str(error)))
            return
        self.inputs[str(found.path)] = stamp
        self.shards += shards
        if self.rows is not None:
            self.rows = None if reader.num_rows is None else self.rows + reader.num_rows

    def _split(self, found: Input, stamp: Stamp, reader: Reader) -> Iterator[Shard]:
        """Validate the columns of a file and split its rows into shards."""
        path, partition, _ = found
        if reader.num_rows == 0 and not reader.schema.names:
            return  # JSON lines have columns only if there is a line
        if not self.valid.holds(reader.schema, partition):
            self._validate(reader, found)
        names = self.valid.names
        block = reader.block_bytes(names)
        self._check_blocks(block, path)
        self.block_bytes = max(self.block_bytes, block)
        reader.check(names)
        if not self.is_sampled:
            with suppress(FileError):  # raised or listed when the rows are read
                self._sample(reader, names, found)
        if self.columns.features is None or self.columns.excluded:
            # The first file determines the features; later files may have them in another order.
            chosen = self.columns.chosen(reader.schema)
            self.columns = replace(self.columns, features=chosen, excluded=())
        self.num_columns = max(self.num_columns, len(names))
        total = reader.num_rows
        for start, stop in reader.cuts(SHARD_ROWS):
            share = 1.0 if stop is None or not total else (stop - start) / total
            yield Shard(found, stamp, start, stop, share)

    def _validate(self, reader: Reader, found: Input) -> None:
        """Validate the columns of a file, and note which are read."""
        path, partition, _ = found
        if self.columns.features is None and self._is_scan(reader.schema):
            self.columns = replace(self.columns, features=POSITION, excluded=())
        if reader.holds_sets and self.valid.schema is None:
            self.columns = self.columns.exploded(reader.schema)
        names = self.columns.needed(reader.schema, partition, path, self.parser)
        self._check_set_type(self._set_type(reader, partition), path)
        if self.width is None:
            self.width = self.columns.width(reader.schema)
        if self.width is not None and self.parser is None:
            self.columns.check_width(reader.schema, self.width, path)
        self.valid = Validated(reader.schema, frozenset(partition), names)

    def _check_blocks(self, block: int, path: Path) -> None:
        """Raise FileError if the rows that must be read together do not fit in memory."""
        if block > self.memory // 3:
            raise FileError(
                f"{path} is stored in chunks of {format_size(block)}, and a chunk must be read as "
                f"a whole. Pass at least --memory {3 * block // 10**6 + 1}MB, or write the file "
                "with smaller chunks."
            )

    def _is_scan(self, schema: pa.Schema) -> bool:
        """Whether a file has x, y, z and more, and the model expects three numbers."""
        chosen = self.columns.chosen(schema)
        return self.width == len(POSITION) < len(chosen) and set(POSITION) <= {*chosen}

    def _set_type(self, reader: Reader, partition: dict[str, str]) -> pa.DataType:
        return self.columns.set_type(reader.schema, partition) or pa.large_string()

    def _sample(self, reader: Reader, names: Sequence[str], found: Input) -> None:
        """Read the first rows of the first file that has any, for what the schema does not say."""
        (dtype, wanted), partition = element_dtypes(self.encoder), found.partition
        for batch in reader.read(names, 0, None, rows=SAMPLE_ROWS):
            rows = rows_of(
                batch,
                self.columns,
                first=0,
                dtype=dtype,
                width=self.width,
                partition=partition,
                parser=self.parser,
            )
            self.is_sampled = True
            if len(rows.elements):
                self._check_model(torch.tensor(rows.elements, dtype=wanted), found.path)
                self.width = rows.elements.shape[1]
                self.elements_per_row = max(1.0, len(rows.elements) / rows.read)
                if rows.sets is not None:
                    self.id_bytes = -(-rows.sets.nbytes // len(rows.sets))
            return

    def _check_model(self, elements: Tensor, path: Path) -> None:
        """Raise InputError if the model can absorb neither the elements (n, d) nor zeros."""
        tried = torch.cat([elements.new_zeros(1, *elements.shape[1:]), elements])
        wrong = find_unusable(self.encoder, tried.to(self.encoder.device))
        if len(wrong) < len(tried):
            return
        if wrong[0] == TOO_LARGE:
            raise InputError(
                "the model returns NaN or infinity even for zeros. Its weights may be NaN or too "
                "large. Train it again, or load another checkpoint."
            )
        raise InputError(
            f"the model cannot encode {path}: for elements of {elements.shape[1]} numbers "
            f"{wrong[0]}. Select the features with --features."
        )

    def _check_set_type(self, set_type: pa.DataType, path: Path) -> None:
        if self.set_type is None:
            self.set_type = set_type
            if pa.types.is_struct(set_type) and self.columns.set is not None:
                types = tuple(str(field.type) for field in set_type)
                self.columns = replace(self.columns, types=types)
        elif self.set_type != set_type:
            raise InputError(
                f"the set ids of {path} are {set_type}, those of earlier inputs are "
                f"{self.set_type}. Convert them to one type."
            )
