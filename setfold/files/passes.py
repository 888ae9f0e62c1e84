"""Encode sets with a model of several passes: each pass is a run that reads the files again.

A pass writes what it found about each set to a file next to the output, `.NAME.pass-1.arrow` and so
on. The next pass looks it up there by set id, so its memory is bounded as that of any run. An
interrupted pass is resumed like any run, and passes that are complete are not repeated. When the
output is complete, these files are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.errors import FileError, InputError
from setfold.files.encodings import ids_in
from setfold.files.plan import computing
from setfold.files.request import ReadOptions, prepare_encoder
from setfold.files.run import Summary
from setfold.files.tables.arrow import header_of, shape_of
from setfold.files.tables.stage import Stage

# Runs one pass: from its encoder, output and options.
RunPass = Callable[[StreamingSetEncoder, Path, ReadOptions], Summary]


class Readouts:
    """What earlier passes have found, by set id. The files are mapped, not read into memory.

    Args:
        paths: One file for each pass.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __call__(self, names: pa.Array) -> tuple[Tensor, ...]:
        """Return the readouts (B, ...) of some sets.

        Raises:
            FileError: An earlier pass has not seen a set.
        """
        if not self._paths:
            return ()
        places = self._places(names)
        return tuple(take_readouts(table, places) for table in self._tables)

    @cached_property
    def _tables(self) -> list[pa.Table]:
        return [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in self._paths]

    @cached_property
    def _ids(self) -> pa.Array:
        return ids_in(self._tables[0])

    def _places(self, names: pa.Array) -> np.ndarray:
        return find_places(names, self._ids)


def find_places(names: pa.Array, ids: pa.Array) -> np.ndarray:
    """Return where sets are in a file of an earlier pass.

    Args:
        names: The ids of these sets.
        ids: The ids in the file, sorted.

    Raises:
        FileError: The file has no such set.
    """
    if pa.types.is_integer(names.type):
        wanted, known = names.to_numpy(), ids.to_numpy()
        places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        missing = known[places] != wanted if len(known) else np.ones(len(wanted), bool)
    else:
        found = pc.index_in(names, ids)
        missing = found.is_null().to_numpy(zero_copy_only=False)
        places = found.fill_null(0).to_numpy()
    if missing.any():
        raise FileError(
            f"an earlier pass has not seen the set {names[int(missing.argmax())]}, so the "
            "inputs have changed. Make sure that nothing writes to them, then start over with "
            "--restart."
        )
    return places


def take_readouts(table: pa.Table, places: np.ndarray) -> Tensor:
    """Return the readouts at some places of a table."""
    shape, start, found = shape_of(header_of(table.schema, "encodings")), 0, None
    for chunk in table["encoding"].chunks:
        values = chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), *shape)
        found = np.empty((len(places), *shape), values.dtype) if found is None else found
        here = (places >= start) & (places < start + len(chunk))
        found[here] = values[places[here] - start]
        start += len(chunk)
    return torch.from_numpy(np.empty((0, *shape), np.float32) if found is None else found)


def encode_in_passes(
    model: MultiPassSetEncoder,
    out: Path,
    settings: ReadOptions,
    check: Callable[[StreamingSetEncoder], Summary | None],
    run: RunPass,
) -> Summary:
    """Run all passes of a model, or the rest of them.

    Args:
        model: The model.
        out: The output.
        settings: The options of the run.
        check: Raises an error if the output must not be written, and returns a summary if it is
            already complete, given the encoder of the last pass.
        run: Runs one pass.

    Raises:
        InputError: The options are not possible with several passes.
    """
    for given, option in ((settings["skip_errors"], "--on-error skip"), (_ray(settings), "Ray")):
        if given:
            raise InputError(
                f"{type(model).__name__} needs {model.passes} passes over the files, which is not "
                f"possible with {option}. Omit it, or use an encoder that folds in one pass."
            )
    paths = [out.with_name(f".{out.name}.pass-{n + 1}.arrow") for n in range(model.passes - 1)]
    with computing(model):
        stages = [Stage(model, n, Readouts(paths[:n])) for n in range(model.passes)]
    done = check(stages[-1])
    if done is None:
        summaries = [
            run(stage, path, {**settings, "overwrite": True})
            for stage, path in zip(stages, paths, strict=False)
        ]
        done = run(stages[-1], out, settings)
        totals: dict[str, Any] = {
            name: getattr(done, name) + sum(getattr(each, name) for each in summaries)
            for name in ("seconds", "bytes_read", "spills", "bytes_spilled")
        }
        done = replace(done, **totals)
    for path in paths:
        path.unlink(missing_ok=True)
    return done


def first_pass(model: nn.Module) -> tuple[StreamingSetEncoder, int]:
    """Return the encoder of the first pass of a model, and the number of passes.

    Raises:
        InputError: The model cannot be folded.
    """
    if isinstance(model, MultiPassSetEncoder):
        return Stage(model.eval(), 0, Readouts(())), model.passes
    return prepare_encoder(model), 1


def _ray(settings: ReadOptions) -> bool:
    return settings["engine"] != "local"
