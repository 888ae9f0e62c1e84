"""ROOT files, as used in particle physics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import InputError
from setfold.files.readers.column import Column, ColumnReader
from setfold.files.readers.reader import import_optional, split_tree, suggest
from setfold.preprocessing.columns import is_jagged

TREES = ("TTree", "ROOT::RNTuple", "TNtuple", "TNtupleD")

EVENTS = "Events"  # the tree of NanoAOD, beside Runs, LuminosityBlocks and others
LOOKED_AT = 1 << 10  # entries, for whether branches belong to one collection
MAX_BASKET = 1 << 27  # bytes; ROOT writes baskets of at most some megabytes


class RootReader(ColumnReader):
    """ROOT: each branch is a column, and each entry of a tree is a set if branches are jagged.

    A path such as file.root:Runs means one tree of a file. Otherwise, of several trees, the one
    named Events is read; without it, all are, and columns are named tree/branch.
    """

    suffixes: ClassVar = (".root",)
    holds_sets: ClassVar = True

    def _find(self) -> dict[str, Column]:
        self._uproot = uproot = import_optional("uproot", "root")
        self._awkward = import_optional("awkward", "root")
        file, tree = split_tree(self.path)
        self._file = uproot.open(file, object_cache=None, array_cache=None)
        found = self._file.keys(cycle=False, filter_classname=lambda name: name in TREES)
        names = list(dict.fromkeys(found))  # each name once; the latest cycle
        if tree is not None and tree not in names:
            raise InputError(f"{file} has no tree {tree!r}.{suggest(tree, names)}")
        if tree is None and EVENTS in names:
            tree = EVENTS
        if tree is not None:
            names = [tree]
        columns: dict[str, Column] = {}
        for name in names:
            branches = self._file[name]
            for key in branches.keys():
                chunk_rows = _chunk_rows(branches, branches[key])
                column = self._column(branches[key], branches.num_entries, chunk_rows)
                if column is not None:
                    columns[key if len(names) == 1 else f"{name}/{key}"] = column
        return columns

    def _column(self, branch: Any, length: int, chunk_rows: int) -> Column | None:
        """Return a branch as a column; None if Arrow has no type for it."""
        missing = _missing_storage(branch)

        def take(start: int, stop: int) -> pa.Array:
            if missing and start < stop:
                raise ValueError(missing)
            _check_baskets(branch, start, stop)
            array = branch.array(entry_start=start, entry_stop=stop, library="ak")
            return self._awkward.to_arrow(array, extensionarray=False)

        try:
            kind = self._plain_type(branch) or take(0, 0).type
        except Exception:  # uproot cannot read objects of every class
            return None
        chunk_bytes = _chunk_bytes(branch, chunk_rows) if is_jagged(kind) else 0
        return Column(kind, length, take, chunk_rows, chunk_bytes, missing=lambda: missing)

    def _plain_type(self, branch: Any) -> pa.DataType | None:
        """Return the type of a branch of numbers; None if that takes an attempt to read it."""
        found: Any = getattr(branch, "interpretation", None)
        jagged = type(found) is self._uproot.AsJagged
        found = found.content if jagged else found
        if type(found) is not self._uproot.AsDtype or found.to_dtype.names:
            return None
        dtype, shape = found.to_dtype.base, found.to_dtype.shape
        kind = pa.from_numpy_dtype(dtype.newbyteorder("="))
        for size in reversed(shape):
            kind = pa.list_(pa.field("item", kind, nullable=False), size)
        return pa.large_list(pa.field("item", kind, nullable=False)) if jagged else kind

    def block_bytes(self, columns: Sequence[str]) -> int:
        jagged = sum(self.columns[name].chunk_bytes for name in columns)
        return max(super().block_bytes(columns), jagged)

    def check(self, columns: Sequence[str]) -> None:
        super().check(columns)
        jagged = [name for name in columns if is_jagged(self.columns[name].type)]
        if len({self.columns[name].length for name in jagged}) == 1:
            try:
                lengths = {name: self._lengths(name) for name in jagged}
            except Exception:  # of the library; raised or listed when the rows are read
                return
            self._check_collections(lengths)

    def _lengths(self, name: str) -> np.ndarray:
        """Return the lengths of the first lists of a branch."""
        column = self.columns[name]
        lists = column.take(0, min(LOOKED_AT, column.length))
        return pc.list_value_length(lists).to_numpy(zero_copy_only=False)

    def _check_collections(self, found: Mapping[str, np.ndarray]) -> None:
        """Raise InputError if jagged branches belong to several collections, such as Jet and Muon.

        Args:
            found: The lengths of their lists.
        """
        groups: list[tuple[np.ndarray, list[str]]] = []
        for name, lengths in found.items():
            known = next((names for own, names in groups if (own == lengths).all()), None)
            if known is None:
                groups.append((lengths, [name]))
            else:
                known.append(name)
        if len(groups) < 2:
            return
        (first, one), (second, other) = groups[:2]
        entry = int((first != second).argmax())
        raise InputError(
            f"the branches of {self.path} are of {len(groups)} collections: entry {entry} has "
            f"{first[entry]} of {one[0]!r} and {second[entry]} of {other[0]!r}. Select those of one "
            f"collection, such as --features {','.join(one)}."
        )

    def close(self) -> None:
        self._file.close()


def _check_baskets(branch: Any, start: int, stop: int) -> None:
    """Raise ValueError if a basket of some entries declares a size that uproot must not allocate."""
    if not hasattr(branch, "basket_key"):  # RNTuple
        return
    ends = list(branch.entry_offsets)
    for number in range(min(branch.num_baskets, len(ends) - 1)):
        if ends[number] >= max(stop, 1) or ends[number + 1] <= start or branch.embedded_baskets:
            continue
        size = branch.basket_key(number).data_uncompressed_bytes
        if size > MAX_BASKET:
            raise ValueError(f"a basket has {size:,} bytes; at most {MAX_BASKET:,} are supported")


def _chunk_rows(tree: Any, branch: Any) -> int:
    """Return the maximum number of entries that are compressed together."""
    if hasattr(tree, "cluster_summaries"):
        return max((cluster.num_entries for cluster in tree.cluster_summaries), default=1)
    return max((end - start for start, end in pairwise(branch.entry_offsets)), default=1)


def _chunk_bytes(branch: Any, chunk_rows: int) -> int:
    """Estimate the bytes of the entries that are compressed together."""
    if not hasattr(branch, "uncompressed_bytes"):  # RNTuple
        return 0
    return branch.uncompressed_bytes * chunk_rows // max(branch.num_entries, 1)


def _missing_storage(branch: Any) -> str:
    """Return why a branch is not stored in its file; empty if it is. uproot would not notice."""
    if not hasattr(branch, "member") or not branch.member("fFileName", none_if_missing=True):
        return ""
    return f"its content is in {branch.member('fFileName')}, which is not opened. Merge the files."
