"""ROOT files, as used in particle physics."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pyarrow as pa

from setfold.errors import InputError
from setfold.files.readers.column import Column, ColumnReader
from setfold.files.readers.reader import import_optional, split_tree, suggest

TREES = ("TTree", "ROOT::RNTuple", "TNtuple", "TNtupleD")

MAX_BASKET = 1 << 27  # bytes; ROOT writes baskets of at most some megabytes


class RootReader(ColumnReader):
    """ROOT: each branch is a column, named tree/branch if there are several trees.

    A path such as file.root:Events means one tree of a file.
    """

    suffixes: ClassVar = (".root",)

    def _find(self) -> dict[str, Column]:
        uproot = import_optional("uproot", "root")
        self._awkward = import_optional("awkward", "root")
        file, tree = split_tree(self.path)
        self._file = uproot.open(file, object_cache=None, array_cache=None)
        found = self._file.keys(cycle=False, filter_classname=lambda name: name in TREES)
        names = list(dict.fromkeys(found))  # each name once; the latest cycle
        if tree is not None and tree not in names:
            raise InputError(f"{file} has no tree {tree!r}.{suggest(tree, names)}")
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
            kind = take(0, 0).type
        except Exception:  # uproot cannot read objects of every class
            return None
        return Column(kind, length, take, chunk_rows, missing=lambda: missing)

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


def _missing_storage(branch: Any) -> str:
    """Return why a branch is not stored in its file; empty if it is. uproot would not notice."""
    if not hasattr(branch, "member") or not branch.member("fFileName", none_if_missing=True):
        return ""
    return f"its content is in {branch.member('fFileName')}, which is not opened. Merge the files."
