"""An exported folder as a program would serve it, and the same calls with setfold."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import torch

OPTIONS = onnxruntime.SessionOptions()
OPTIONS.intra_op_num_threads = 1
PACKAGED = {"torch": lambda path: torch.export.load(path).module()}
PACKAGED["aoti"] = torch._inductor.aoti_load_package


class Served:
    """The graphs of a folder, as functions of arrays by name."""

    def __init__(self, folder):
        self.manifest = json.loads((folder / "export.json").read_text())
        self.names = [part["name"] for part in self.manifest["state"]]
        self.graphs = {n: self._load(folder, n) for n in self.manifest["graphs"]}

    def _load(self, folder, name):
        described = self.manifest["graphs"][name]
        path, form = folder / described["file"], self.manifest["format"]
        if form == "onnx":
            session = onnxruntime.InferenceSession(path, OPTIONS)
            return lambda feeds: session.run(None, feeds)
        program, order = PACKAGED[form](path), [p["name"] for p in described["inputs"]]

        def run(feeds):
            found = program(*(torch.from_numpy(feeds[name]) for name in order))
            return [t.numpy() for t in (found if isinstance(found, list | tuple) else [found])]

        return run

    def empty(self, batch):
        return {
            part["name"]: np.full(
                [batch, *part["shape"][1:]], float(part["empty"]), dtype=part["dtype"]
            )
            for part in self.manifest["state"]
        }

    def forward(self, elements, mask):
        return self.graphs["forward"]({"elements": elements, "mask": mask})[0]

    def readout(self, state):
        return self.graphs["readout"](state)[0]

    def update(self, state, elements, mask):
        return self._named("update", {**state, "elements": elements, "mask": mask})

    def update_rows(self, state, elements, index):
        return self._named("update_rows", {**state, "elements": elements, "index": index})

    def merge(self, state, other):
        return self._named("merge", state | {f"other.{n}": part for n, part in other.items()})

    def _named(self, graph, feeds):
        return dict(zip(self.names, self.graphs[graph](feeds), strict=True))


def arrays_of(state):
    """A state of setfold, as arrays."""
    named = state.tensors().items()
    return {n: t.numpy() for n, t in named if not n.startswith(("slots.", "context."))}


def distance(found, expected):
    """The largest difference, relative to the largest number expected; types and shapes are equal."""
    expected = np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    finite = np.isfinite(expected)
    assert np.array_equal(found[~finite], expected[~finite], equal_nan=True)
    apart, sizes = np.abs(found[finite] - expected[finite]), np.abs(expected[finite])
    return float(apart.max(initial=0) / max(1, sizes.max(initial=0)))


def state_distance(found, state):
    expected = arrays_of(state)
    assert found.keys() == expected.keys()
    return max(distance(found[name], expected[name]) for name in expected)
