"""ROOT files of particle physics."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pyarrow as pa

from setfold.files.readers.column import Column, ColumnReader
from setfold.files.readers.reader import required

TREES = ("TTree", "ROOT::RNTuple", "TNtuple", "TNtupleD")


class RootReader(ColumnReader):
    """ROOT: the branches of the only tree, or tree/branch if there are several; lists are jagged."""

    suffixes: ClassVar = (".root",)

    def _find(self) -> dict[str, Column]:
        uproot = required("uproot", "root")
        self._awkward = required("awkward", "root")
        self._file = uproot.open(self.path, object_cache=None, array_cache=None)
        names = self._file.keys(cycle=False, filter_classname=lambda name: name in TREES)
        columns: dict[str, Column] = {}
        for name in dict.fromkeys(names):  # each once; without a cycle, the latest is meant
            tree = self._file[name]
            for key in tree.keys():
                column = self._column(tree[key], tree.num_entries, _grain(tree, tree[key]))
                if column is not None:
                    columns[key if len(set(names)) == 1 else f"{name}/{key}"] = column
        return columns

    def _column(self, branch: Any, length: int, grain: int) -> Column | None:
        """A branch as a column; None if it holds what Arrow has no type for."""

        def take(start: int, stop: int) -> pa.Array:
            array = branch.array(entry_start=start, entry_stop=stop, library="ak")
            return self._awkward.to_arrow(array, extensionarray=False)

        try:
            kind = take(0, 0).type
        except Exception:  # objects of any class, of which uproot can read only some
            return None
        return Column(kind, length, take, grain)

    def close(self) -> None:
        self._file.close()


def _grain(tree: Any, branch: Any) -> int:
    """How many entries are compressed together, at most."""
    if hasattr(tree, "cluster_summaries"):
        return max((cluster.num_entries for cluster in tree.cluster_summaries), default=1)
    return max((end - start for start, end in pairwise(branch.entry_offsets)), default=1)
