"""What the kernels cannot do is left to torch; what is wrong is reported by torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from setfold.kernels import extrema, softmax, sums
from setfold.kernels.scores import FoldedScores
from setfold.native import build, dispatch, library
from tests.native.cases import assert_close, make_case, sums_of

needs_kernels = pytest.mark.skipif(not library.available(), reason=library.describe())


class Subclass(torch.Tensor):
    pass


@pytest.mark.usefixtures("isa")
def test_unusual_tensors_are_refused():
    elements, _, matrix = make_case((2, 9, 3, 4))
    mask = torch.ones(2, 9, dtype=torch.bool)
    values, upstream = torch.randn(4, 5), torch.ones(2, 4, 4)
    unusual = [
        (elements.double(), mask, matrix),
        (elements, mask, matrix.double()),
        (elements.half(), mask, matrix.half()),
        (elements.to("meta"), mask.to("meta"), matrix.to("meta")),
        (elements.to_sparse(), mask, matrix),
        (elements.as_subclass(Subclass), mask, matrix),
        (elements, mask.as_subclass(Subclass), matrix),
        (elements, mask.int(), matrix),
        (elements, mask.to("meta"), matrix),
        (torch._neg_view(elements), mask, matrix),
        (elements.transpose(1, 2).contiguous().transpose(1, 2), mask, matrix),
        (elements[:, ::2], mask[:, ::2], matrix),
        (elements, mask.t().contiguous().t(), matrix),
    ]
    misfits = [
        (elements[..., :2], mask, matrix),
        (elements[0], mask, matrix),
        (elements, mask[:, :5], matrix),
        (elements, mask[:1], matrix),
        (elements, mask, matrix[0]),
        (elements, mask, matrix[:3]),
        (elements, mask, matrix[:, :0]),
    ]
    for case in [*unusual, *misfits]:
        assert dispatch.sums(*case, "sigmoid") is None
        assert dispatch.softmax(*case) is None
        assert dispatch.gradients(*case, "sigmoid", upstream) is None
        assert dispatch.extrema(*case, "sigmoid", values, True, True) is None
    assert dispatch.extrema(elements, mask, matrix, "sigmoid", values[:3], True, True) is None
    rows, index = elements[0], torch.zeros(9, dtype=torch.long)
    for case in [(rows.double(), index), (rows[:, :2], index), (rows, index[:4]), (rows[0], index)]:
        assert dispatch.ragged_sums(*case, 2, matrix, "sigmoid") is None
    assert dispatch.encode(elements[:1, :, :2].contiguous(), matrix, "sigmoid", values, 1) is None
    assert dispatch.encode(elements[:1], matrix, "sigmoid", values[:3], 1) is None


@pytest.mark.usefixtures("isa")
def test_torch_reports_what_does_not_fit():
    elements, _, matrix = make_case((2, 9, 3, 4))
    scores = FoldedScores(matrix[:-1])
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            sums.slot_sums(elements, None, scores, "sigmoid")
        with pytest.raises(RuntimeError):
            softmax.softmax_sums(elements, None, scores)
        with pytest.raises(RuntimeError):
            extrema.slot_extrema(elements, None, scores, "sigmoid", (torch.ones(2, 3), None), True)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_results_do_not_depend_on_default_dtype_or_device(dtype):
    case = make_case((2, 40, 3, 4))
    values, upstream = torch.randn(4, 5), torch.ones(2, 4, 4)
    index = torch.zeros(40, dtype=torch.long)

    def all_results():
        return [
            dispatch.sums(*case, "sigmoid"),
            *dispatch.softmax(*case),
            *dispatch.gradients(*case, "sigmoid", upstream, None, True),
            *dispatch.extrema(*case, "sigmoid", values, True, True),
            dispatch.ragged_sums(case.elements[0], index, 2, case.matrix, "sigmoid"),
            dispatch.encode(case.elements[:1], case.matrix, "sigmoid", values, 2),
        ]

    expected = all_results()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = all_results()
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.usefixtures("isa")
def test_large_matrices_are_left_to_torch(monkeypatch):
    case = make_case((1, 20, 3, 4))
    monkeypatch.setattr(dispatch, "LARGEST_MATRIX", 15)
    assert dispatch.sums(*case, "sigmoid") is None
    with torch.no_grad():
        found = sums.slot_sums(case.elements, None, FoldedScores(case.matrix), "sigmoid")
    assert_close(found, sums_of(case, "sigmoid"))


def test_no_memory_is_reported():
    with pytest.raises(MemoryError, match="buffers"):
        dispatch.check(dispatch.NO_MEMORY)


# ---- loading ------------------------------------------------------------------------------------

DESCRIBE = """
import sys
from pathlib import Path
from setfold.native import build
if len(sys.argv) > 1:
    build.library_in_place = lambda: Path(sys.argv[1])
from setfold.native import library
print(library.describe(), library.choice.kernels is None)
"""


def describe(*arguments, **variables):
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", DESCRIBE, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@needs_kernels
def test_the_variable_chooses():
    off = describe(SETFOLD_NATIVE="0")
    assert "SETFOLD_NATIVE=0 switches them off" in off.stdout
    assert "True" in off.stdout
    assert "compiled for base" in describe(SETFOLD_NATIVE="base").stdout or "base" not in (
        library.available()
    )
    wrong = describe(SETFOLD_NATIVE="v9")
    assert wrong.returncode != 0
    assert "SETFOLD_NATIVE must be 0 or one of" in wrong.stderr


def test_without_a_library_torch_runs(tmp_path):
    done = describe(tmp_path / "none.so", SETFOLD_NATIVE="")
    assert "not compiled" in done.stdout
    assert "True" in done.stdout


@needs_kernels
@pytest.mark.parametrize("damage", ["garbage", "empty", "header", "half", "last page", "folder"])
def test_a_damaged_library_is_not_loaded(tmp_path, damage):
    whole, path = build.library_in_place().read_bytes(), tmp_path / "kernels.so"
    kept = {"empty": 0, "header": 64, "half": len(whole) // 2, "last page": len(whole) - 4096}
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"not a library" if damage == "garbage" else whole[: kept[damage]])
    done = describe(path, SETFOLD_NATIVE="")
    assert done.returncode == 0, done.stderr
    assert "plain torch" in done.stdout
    assert str(path) in done.stdout


@needs_kernels
def test_a_library_of_other_sources_is_not_loaded(tmp_path):
    digest = build.digest_of(library.SOURCES).encode()
    whole = build.library_in_place().read_bytes()
    assert digest in whole
    stale = tmp_path / "kernels.so"
    stale.write_bytes(whole.replace(digest, digest[::-1]))
    done = describe(stale, SETFOLD_NATIVE="")
    assert "compiled from other sources" in done.stdout
    assert "True" in done.stdout


def test_the_library_is_beside_its_sources():
    assert build.library_in_place().parent == Path(build.__file__).parent / "lib"
