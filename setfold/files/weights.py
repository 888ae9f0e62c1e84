"""The weights of elements in files: a heat map of a slide, or which events a prediction is about.

The files are read twice. The first pass folds each set, and writes the states to a file next to the
output. The second pass reads the rows again, and writes the weights of each, given the state of its
set. So memory depends neither on the size of a set nor on the number of sets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from setfold.core.arguments import checked
from setfold.core.persist import replace_durably
from setfold.errors import InputError
from setfold.files.columns import ColumnSpec
from setfold.files.engines.task import Shard, Task
from setfold.files.execute import Job, execute
from setfold.files.heat_map import check_picture, draw_weights
from setfold.files.ids import unpack
from setfold.files.inputs import open_reader
from setfold.files.outputs import ArrowSink, CsvSink, check_target
from setfold.files.passes import find_places
from setfold.files.plan import Plan
from setfold.files.readers.slides import (
    COORDINATES,
    VECTORS,
    axes_of,
    holds_coordinates,
    holds_vectors,
)
from setfold.files.request import (
    InputNames,
    ReadOptions,
    build_plan,
    check_unchanged,
    describe_request,
    dtype_of,
    make_columns,
    prepare_encoder,
    resolve_stamps,
    select_engine,
    with_defaults,
)
from setfold.files.rows import Rows
from setfold.files.run import Output
from setfold.files.states import Provenance
from setfold.files.tables.arrow import combined
from setfold.files.tables.table import StateTable
from setfold.preprocessing.columns import decoded, elements_in

STATE_BYTES = 1 << 24  # of states that are expanded at once, one for each row
ROW, WEIGHT = "row", "weight"
WEIGHTS = re.compile(rf"{WEIGHT}(_\d+)?")
VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv")


@dataclass(frozen=True)
class WeightSummary:
    """What was written.

    Args:
        elements: The number of elements.
        sets: The number of sets.
        vectors: The number of weights of each element.
        features: The features of an element, as for --features.
        kept: The columns that were copied to the output.
    """

    elements: int
    sets: int
    vectors: int
    features: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@checked
def weigh_sets(
    model: nn.Module,
    inputs: InputNames,
    out: str | Path,
    *,
    set: str | Sequence[str] | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    root: str | Path | None = None,
    keep: Sequence[str] | None = None,
    picture: str | Path | None = None,
    **options: Unpack[ReadOptions],
) -> WeightSummary:
    """Write the weight of each element in each vector of its set's encoding.

    For attention, the weights of a vector sum to 1 over the elements of a set: they tell which
    elements a prediction is about. For slots, the weights of an element sum to 1 over the slots.

    The output has one row per element, in the order of the inputs: the set id, `row` (the number of
    the row in its file), the columns to keep, and `weight`, or `weight_0`, `weight_1`, ... if the
    encoding has several vectors. Coordinates of slides, in a column `coords`, become `x` and `y`.

    Args:
        model: A streaming set encoder that has weights, such as one that was trained with `task`
            "multiple-instance". It is switched to evaluation mode.
        inputs: Files, folders or glob patterns. They are read twice.
        out: The output, a .parquet, .arrow or .csv file.
        set: As for `encode_sets`.
        features: As for `encode_sets`.
        explode: As for `encode_sets`.
        root: As for `encode_sets`.
        keep: Columns to copy to the output; None for the coordinates of a slide, if there are any.
        picture: A .png file to draw the weights of one set to, where its elements are. There is a
            panel for each vector. It needs `x` and `y` in the output.
        options: Options of the run, such as memory="4GB" or overwrite=True.

    Raises:
        InputError: The model has no weights, or a column is missing.

    >>> import numpy as np, setfold, tempfile
    >>> import pyarrow.parquet as pq
    >>> encoder = setfold.GatedAttentionPool(dim_in=2, dim_hidden=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/slide.npy", np.random.rand(100, 2).astype("f4"))
    ...     _ = setfold.weigh_sets(encoder, f"{folder}/slide.npy", f"{folder}/heat.parquet")
    ...     heat = pq.read_table(f"{folder}/heat.parquet")
    >>> heat.column_names, round(sum(heat["weight"].to_pylist()), 3)
    (['set', 'row', 'weight'], 1.0)
    """
    settings, encoder = with_defaults(options, ReadOptions), prepare_encoder(model)
    if not encoder.has_weights:
        raise InputError(
            f"{type(encoder).__name__} has no weights: it treats all elements alike. Use a model "
            "with attention, slots or places."
        )
    if settings["skip_errors"]:
        raise InputError("weights are for all rows; correct bad rows, or omit --on-error skip.")
    path, drawn = Path(out).resolve(), None if picture is None else Path(picture).resolve()
    _check_out(path, settings["overwrite"])
    states, part = (path.with_name(f".{path.name}.{end}") for end in ("states.arrow", "part"))
    columns = make_columns(set, features, explode, root)
    stamps: dict[str, list[int]] = {}

    def prepare(without: Collection[Path]) -> Job:
        plan = build_plan(encoder, inputs, columns, settings, without=without)
        kept = _check_inputs(plan, path, keep)
        if drawn is not None:
            _check_picture(drawn, plan, kept, settings["overwrite"])
        stamps.update(check_unchanged(stamps, resolve_stamps(plan.inputs)))
        provenance = Provenance(None, stamps, plan.task.columns, dtype_of(encoder))
        return Job(plan, [Output(states, ArrowSink, True, provenance.metadata())])

    request = describe_request("weights", inputs, out, columns=columns.describe())
    execute(request, [states], prepare, select_engine(settings), {**settings, "overwrite": True})
    try:
        plan = build_plan(encoder, inputs, columns, settings, without=[states])
        check_unchanged(stamps, resolve_stamps(plan.inputs))
        second = _SecondPass(plan.task, states, _check_inputs(plan, path, keep))
        if drawn is not None:
            second.check_one_set()
        found = second.write(plan.shards, part)
        replace_durably(part, path)
        if drawn is not None:
            draw_weights(path, weight_names(found.vectors), second.title, drawn)
    finally:
        states.unlink()
        part.unlink(missing_ok=True)
    return found


class _SecondPass:
    """Reads the rows again, and writes their weights.

    Args:
        task: How rows are read.
        states: The states of all sets.
        keep: Columns to copy, and the type of each in the output.
    """

    def __init__(self, task: Task, states: Path, keep: Mapping[str, pa.DataType]) -> None:
        self.task, self.encoder, self.keep = task, task.encoder, keep
        self.states = pa.ipc.open_file(pa.memory_map(str(states))).read_all()
        self.elements = self.vectors = 0

    @cached_property
    def ids(self) -> pa.Array:
        """The ids of all sets, sorted."""
        return combined(self.states["set"])

    def check_one_set(self) -> None:
        """Raise InputError if there are several sets, which no picture shows."""
        if len(self.states) > 1:
            raise InputError(
                f"a picture shows one set; there are {len(self.states)}. Pass one file, or omit "
                "--picture."
            )

    @property
    def title(self) -> str:
        """What a picture calls the only set: its id, or the name of its file."""
        if self.task.columns.set is None and not self.task.columns.explode:
            return Path(self.ids[0].as_py()).stem
        return self.task.columns.show_id(self.ids[0])

    @torch.no_grad()
    def write(self, shards: Sequence[Shard], path: Path) -> WeightSummary:
        """Write the weights of all rows."""
        writer = None
        try:
            for shard in shards:
                for batch, rows in self.task.read(shard, list(self.keep)):
                    if not len(rows.elements):
                        continue
                    table = self._table(batch, rows, shard)
                    writer = writer or _open_writer(path, table.schema)
                    writer.write_table(table)
                    self.elements += len(table)
            if writer is None:
                raise InputError("there are no elements, so there is nothing to write.")
        finally:
            if writer is not None:
                writer.close()
        features = tuple(map(str, self.task.columns.features or ()))
        kept = tuple(_types_of_parts(self.keep))
        return WeightSummary(self.elements, len(self.states), self.vectors, features, kept)

    def _table(self, batch: pa.RecordBatch, rows: Rows, shard: Shard) -> pa.Table:
        sets = self.task.set_ids(rows, shard.input.name)
        weights = self._weights(sets, self.task.to_tensor(rows.elements))
        self.vectors = weights.shape[1]
        columns = _id_columns(sets, self.task.columns) | {ROW: pa.array(rows.numbers)}
        kept = rows.kept if rows.kept is not None else np.arange(len(rows.elements))
        copied: dict[str, pa.Array] = {}
        for name, kind in self.keep.items():
            explode = _is_exploded(name, batch.schema, self.task.columns)
            try:
                copied |= _parts(name, _kept(batch.column(name), kept, explode, kind))
            except pa.ArrowInvalid as error:  # an integer that is no float64
                raise InputError(
                    f"column {name!r} is {kind} in some inputs, but {error}."
                ) from error
        found = map(pa.array, weights.T.contiguous().cpu().numpy())
        named = dict(zip(weight_names(self.vectors), found, strict=True))
        return pa.table(columns | copied | named)

    def _weights(self, sets: pa.Array, elements: Tensor) -> Tensor:
        """Return the weights (N, K) of some elements, given the set of each."""
        encoded = sets if pa.types.is_dictionary(sets.type) else sets.dictionary_encode()
        places = find_places(encoded.dictionary, self.ids)
        chosen = self.states.take(pa.array(places))
        state = StateTable.from_arrow(chosen).state.to(self.encoder.device)
        if len(places) == 1:
            return self.encoder.weights(state, elements.unsqueeze(0))[0]
        index = torch.from_numpy(encoded.indices.to_numpy().astype(np.int64))
        size = max(1, STATE_BYTES // max(self.encoder.state_nbytes, 1))
        return torch.cat(
            [
                self.encoder.weights(state[own], some.unsqueeze(1))[:, 0]
                for own, some in zip(index.split(size), elements.split(size), strict=True)
            ]
        )


def weight_names(vectors: int) -> list[str]:
    """Return the names of the columns with weights."""
    return [WEIGHT] if vectors == 1 else [f"{WEIGHT}_{place}" for place in range(vectors)]


def _parts(name: str, values: pa.Array) -> dict[str, pa.Array]:
    """Return a kept column, or the columns that it becomes."""
    names = axes_of(name, values.type)
    if len(names) == 1:
        return {name: values}
    return {part: pc.list_element(values, place) for place, part in enumerate(names)}


def _id_columns(sets: pa.Array, columns: ColumnSpec) -> dict[str, pa.Array]:
    """Return the set ids as columns of the output."""
    plain = sets.dictionary_decode() if pa.types.is_dictionary(sets.type) else sets
    if not columns.id_fields:
        return {"set": plain}
    names, types = zip(*columns.id_fields, strict=True)
    return dict(zip(names, unpack(plain, types), strict=True))


def _kept(column: pa.Array, rows: np.ndarray, explode: bool, kind: pa.DataType) -> pa.Array:
    """Return the values of a column for some elements, given the row of each."""
    places = rows
    if explode:
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        if (lengths[rows] != np.bincount(rows, minlength=len(lengths))[rows]).any():
            raise InputError(
                "the lists to keep differ in length from those of the features. Omit them."
            )
        elements = np.arange(len(rows))
        first = np.r_[True, rows[1:] != rows[:-1]]
        within = elements - np.maximum.accumulate(np.where(first, elements, 0))
        places, column = (np.cumsum(lengths) - lengths)[rows] + within, column.flatten()
    return decoded(column).cast(kind).take(pa.array(places))


def _is_exploded(name: str, schema: pa.Schema, columns: ColumnSpec) -> bool:
    """Whether the lists of a column to keep hold one value for each element of a row."""
    kinds = {own: schema.field(own).type for own in (*columns.named, name)}
    return columns.explode and name in elements_in(kinds)


def _open_writer(path: Path, schema: pa.Schema) -> Any:
    """Open a new file, whose format is the suffix before .part."""
    suffix = path.with_suffix("").suffix
    if suffix == ".csv":
        return pacsv.CSVWriter(str(path), schema)
    if suffix in (".parquet", ".pq"):
        return pq.ParquetWriter(str(path), schema, compression="zstd")
    return pa.ipc.new_file(str(path), schema)


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix not in SUFFIXES:
        raise InputError(f"weights must go to a .parquet, .arrow or .csv file; got {path.name}.")
    check_target(path)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists. Choose another output, or replace it with --overwrite.")


def _check_picture(
    path: Path, plan: Plan, kept: Mapping[str, pa.DataType], overwrite: bool
) -> None:
    """Raise InputError if no picture can be drawn."""
    check_picture(path, _types_of_parts(kept))
    check_target(path)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists. Choose another picture, or replace it with --overwrite.")
    if plan.task.columns.set is None and len(plan.inputs) > 1:
        raise InputError(
            f"a picture shows one set; there are {len(plan.inputs)} files. Pass one file, or omit "
            "--picture."
        )


def _check_inputs(plan: Plan, path: Path, keep: Sequence[str] | None) -> dict[str, pa.DataType]:
    """Return the columns to keep, and the type of each in the output.

    Raises:
        InputError: The output is an input, or cannot hold a column to keep, or an input lacks it.
        FileError: A column to keep is not stored completely.
    """
    columns, kept = plan.task.columns, dict[str, pa.DataType]()
    for found in dict.fromkeys(shard.input.path for shard in plan.shards):
        if found.resolve() == path:
            raise InputError(f"{path} is an input and would be replaced. Choose another output.")
        with open_reader(found) as reader:
            names = reader.schema.names
            if keep is None:  # the first file decides
                keep = [COORDINATES] if _is_slide(reader.schema, columns) else []
            for name in keep:
                if name not in names:
                    raise InputError(
                        f"{found} has no column {name!r} to keep; it has {names}. Name the columns "
                        "to keep with --keep."
                    )
                kind = _type_to_keep(name, reader.schema, columns)
                kept[name] = _common_type(name, kept.get(name, kind), kind, found)
            reader.check([*dict.fromkeys([*columns.named, *keep])])
    _check_columns(plan, kept, path)
    return kept


def _type_to_keep(name: str, schema: pa.Schema, columns: ColumnSpec) -> pa.DataType:
    """Return the type of a column in the output, where values are not shared by a dictionary."""
    kind = schema.field(name).type
    if _is_exploded(name, schema, columns):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return VIEWS.get(kind, kind)


def _common_type(name: str, before: pa.DataType, kind: pa.DataType, path: Path) -> pa.DataType:
    """Return the type for the values of a column in several files."""
    schemas = [pa.schema([(name, own)]) for own in (before, kind)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(name).type
    except pa.ArrowException as error:
        raise InputError(
            f"column {name!r} of {path} is {kind}; in earlier inputs it is {before}. Convert it to "
            "one type, or omit it from --keep."
        ) from error


def _types_of_parts(kept: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Return the columns that kept columns become, and their types."""
    found: dict[str, pa.DataType] = {}
    for name, kind in kept.items():
        parts = axes_of(name, kind)
        found |= dict.fromkeys(parts, kind if len(parts) == 1 else kind.value_type)
    return found


def _check_columns(plan: Plan, kept: Mapping[str, pa.DataType], path: Path) -> None:
    """Raise InputError if columns of the output would have one name, or a type it cannot hold."""
    columns = plan.task.columns
    ids = dict(columns.id_fields) or {"set": plan.set_type}
    for name in columns.set_names if len(columns.set_names) > 1 else ():
        if name == ROW or WEIGHTS.fullmatch(name):
            raise InputError(f"the set column cannot be named {name!r}. Rename it.")
    seen = {*ids, ROW}
    for name, kind in kept.items():
        for part in axes_of(name, kind):
            if part in seen or WEIGHTS.fullmatch(part):
                raise InputError(
                    f"the output has a column {part!r} already. Omit {name!r} from --keep."
                )
            seen.add(part)
    for name, kind in (ids | _types_of_parts(kept)).items() if path.suffix == ".csv" else ():
        if not CsvSink.can_store(kind):
            raise InputError(
                f"CSV files cannot store the column {name!r}, which is {kind}. Write .parquet or "
                ".arrow."
            )


def _is_slide(schema: pa.Schema, columns: ColumnSpec) -> bool:
    """Whether the elements are the vectors of a slide, beside their coordinates."""
    vectors = columns.named == [VECTORS] and not columns.explode and holds_vectors(schema)
    return vectors and holds_coordinates(schema)
