"""Files in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

from torch import nn

from setfold.files.columns import Columns, features_of
from setfold.files.job import (
    Job,
    Names,
    ReadOptions,
    as_states,
    carried_out,
    chosen_engine,
    completed,
    full_name,
    plan_for,
    request_of,
    stamps_of,
    streaming,
)
from setfold.files.outputs import ArrowSink, sink_for
from setfold.files.run import Output, Summary
from setfold.files.states import Provenance, model_bytes


def encode_sets(
    model: nn.Module,
    inputs: Names,
    out: str | Path,
    *,
    set: str | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    states: str | Path | None = None,
    **options: Unpack[ReadOptions],
) -> Summary:
    """Encode all sets whose elements stand in some files: one vector for each set, in one file.

    Sets may be larger than memory, more than memory holds, and spread over the files in any order. The result
    is sorted by the sets' names.

    Args:
        model: a streaming set encoder. It is put into evaluation mode.
        inputs: files, folders or patterns, such as "events/*.parquet".
        out: a .parquet, .arrow or .npz file: set, count, encoding.
        set: the column that tells which set a row belongs to; without it every file is one set.
        features: columns in the order in which the model takes them, "x, y*0.01" or a list of such; all columns of
            numbers but the set's if left out.
        explode: whether each row holds many elements, in lists.
        states: an .arrow file for the states, which can be updated and merged.
        options: of a run, such as memory="4GB", resume=True, skip_errors=True or engine="ray"; all of them are listed
            under `setfold.files.job.ReadOptions`.

    >>> import setfold, tempfile
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8)
    >>> events = pa.table({"event": [7, 8, 7], "x": [0.1, 0.2, 0.3], "y": [1.0, 2.0, 3.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(events, f"{folder}/events.parquet")
    ...     out = f"{folder}/encodings.parquet"
    ...     summary = setfold.encode_sets(encoder, f"{folder}/events.parquet", out, set="event")
    ...     print(summary.sets, pq.read_table(out)["count"].to_pylist())
    2 [2, 1]
    """
    chosen = completed(options, ReadOptions)
    encoder, engine = streaming(model), chosen_engine(chosen)
    columns = Columns(features_of(features), set, explode)
    kept = None if states is None else as_states(states)

    def prepare() -> Job:
        plan = plan_for(encoder, inputs, columns, chosen)
        outputs = [Output(Path(out), sink_for(Path(out)), states=False)]
        if kept is not None:
            known = Provenance(model_bytes(encoder), stamps_of(plan.inputs), plan.task.columns)
            outputs.append(Output(kept, ArrowSink, True, known.metadata()))
        return plan, outputs

    request = request_of("encode", inputs, out, columns=asdict(columns), states=full_name(states))
    return carried_out(request, prepare, engine, chosen)
