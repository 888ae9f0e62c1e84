"""Fold a stream with numpy and onnxruntime alone: no torch, no setfold.

setfold export model.safetensors --onnx exported
python docs/examples/onnx_stream.py exported
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(sys.argv[1])
manifest = json.loads((folder / "export.json").read_text())
parts, width = manifest["state"], manifest["graphs"]["update"]["inputs"][0]["shape"][2]
graphs = {
    name: onnxruntime.InferenceSession(folder / graph["file"])
    for name, graph in manifest["graphs"].items()
}


def empty(sets):
    """The state of sets without elements."""
    shapes = ([sets, *part["shape"][1:]] for part in parts)
    values = ((float(part["empty"]), part["dtype"]) for part in parts)
    return {p["name"]: np.full(s, *v) for p, s, v in zip(parts, shapes, values, strict=True)}


def run(graph, state, **inputs):
    """The state that a graph makes of a state and elements, or of two states."""
    found = graphs[graph].run(None, state | inputs)
    return {part["name"]: new for part, new in zip(parts, found, strict=True)}


elements = np.random.default_rng(0).normal(size=(2, 1000, width)).astype("float32")
mask = np.ones((2, 1000), bool)  # False for padding
state = empty(2)
for first in range(0, 600, 100):  # chunks that arrive one after the other
    chunk = slice(first, first + 100)
    state = run("update", state, elements=elements[:, chunk], mask=mask[:, chunk])
rows, index = elements[:, 600:].reshape(-1, width), np.repeat([0, 1], 400)
other = run("update_rows", empty(2), elements=rows, index=index)  # what another machine has seen
state = run("merge", state, **{f"other.{name}": part for name, part in other.items()})
(streamed,) = graphs["readout"].run(None, state)
(whole,) = graphs["forward"].run(None, {"elements": elements, "mask": mask})
print(state["count"], streamed.shape, f"differ by at most {abs(streamed - whole).max():.0e}")
