"""Every encoder, in every format, against torch: takes minutes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import setfold
from setfold.laws.gallery import DIM_IN, EXHIBITS
from tests.exporting.served import Served, arrays_of, distance, state_distance

pytestmark = pytest.mark.skipif(
    "SETFOLD_STRESS" not in os.environ, reason="takes minutes; set SETFOLD_STRESS=1 to run"
)
RIGHT = {exhibit.name: exhibit.make for exhibit in EXHIBITS if not exhibit.wrong}
TOLERANCE = 1e-5
WHOLE = 1e-4  # of models that need whole sets, whose sums in float32 are not cut into pieces
LENGTHS = (0, 1, 2, 500)
LARGE = 200_000
QUADRATIC = ("FullSetTransformer, SAB",)


def batch(sets, length):
    """Elements with NaN in the padding, and a mask that hides one set if there are several."""
    elements, mask = torch.randn(sets, length, DIM_IN) * 2 + 1, torch.rand(sets, length) < 0.7
    mask[1:2] = False
    return torch.where(mask.unsqueeze(2), elements, torch.nan), mask


@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("name", RIGHT)
def test_graphs_are_equal_to_torch(name, format, tmp_path):
    check(RIGHT[name]().eval(), name, format, tmp_path)


@pytest.mark.parametrize("name", ["Concat, max + slots + softmax", "SetNorm → Pool"])
def test_packages_are_equal_to_torch(name, tmp_path):
    if not shutil.which("g++"):
        pytest.skip("there is no compiler")
    check(RIGHT[name]().eval(), name, "aoti", tmp_path)


def check(model, name, format, tmp_path):
    if name.startswith("JanossyPool"):
        with pytest.raises(setfold.InputError, match="depends on the values"):
            setfold.export(model, tmp_path / "out", format)
        return
    setfold.export(model, tmp_path / "out", format, dim_in=DIM_IN)
    served, worst = Served(tmp_path / "out"), {}

    def note(graph, apart):
        worst[graph] = max(worst.get(graph, 0), apart)

    with torch.no_grad():
        for sets, length in [*((s, n) for s in (1, 3) for n in LENGTHS), (1, LARGE)]:
            if length == LARGE and name in QUADRATIC:
                continue
            elements, mask = batch(sets, length)
            given = elements.numpy(), mask.numpy()
            note("forward", distance(served.forward(*given), model(elements, mask)))
            if isinstance(model, setfold.StreamingSetEncoder):
                check_fold(model, served, elements, mask, note)
    print(f"\n{format:<6}{name:<38}", *(f"{k} {v:.0e}" for k, v in worst.items()))
    folds = isinstance(model, setfold.StreamingSetEncoder)
    assert max(worst.values()) <= (TOLERANCE if folds else WHOLE)


def check_fold(model, served, elements, mask, note):
    sets = len(elements)
    begun = model.update(model.initial_state(sets), torch.randn(sets, 4, DIM_IN))
    state, given = model.update(begun, elements, mask=mask), (elements.numpy(), mask.numpy())
    note("update", state_distance(served.update(arrays_of(begun), *given), state))
    rows, index = torch.randn(mask.numel(), DIM_IN), torch.randint(sets, (mask.numel(),))
    index[: len(index) // 2] = 0  # one set is larger
    ragged = served.update_rows(arrays_of(begun), rows.numpy(), index.numpy())
    note("update_rows", state_distance(ragged, model.update(begun, rows, index=index)))
    joined = served.merge(arrays_of(begun), arrays_of(state))
    note("merge", state_distance(joined, begun.merge(state)))
    for one in (state, model.initial_state(sets)):
        note("readout", distance(served.readout(arrays_of(one)), model.readout(one)))
