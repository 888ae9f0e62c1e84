"""Chunks as users pass them to `fold`: tensors, arrays, mapped files, pairs, loaders; and errors."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import setfold
from setfold.folding import source
from setfold.folding.api import GRADIENTS
from setfold.folding.source import Tiles, chunk_from
from tests.folding.test_gradients import model_of
from tests.small import assert_alike, draw, gradients, make

MASK = torch.tensor([[True] * 7 + [False] * 3, [False, True] * 5])
INDEX = torch.tensor([0, 2, 2, 0, 0, 2, 0, 2, 2, 0])


def assert_fold(expected, chunks, model=None, **told):
    """A fold gives what is expected of the encoder, gradients and all."""
    model = model or make()
    wanted = list(model.parameters())
    encoding = expected(model)
    found = setfold.fold(model, chunks, **told)
    assert_alike([found], [encoding])
    assert_alike(gradients(found, wanted), gradients(encoding, wanted))


@pytest.fixture(params=[None, 100], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(source, "TILE_BYTES", request.param)


# ---- whole tensors and arrays ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.Tensor.clone], ids=["array", "tensor"])
@pytest.mark.usefixtures("tiles")
def test_whole_sets_with_a_mask_or_an_index(kind):
    elements, rows = draw(2, 10, 3), draw(10, 3)
    assert_fold(lambda m: m(elements), kind(elements))
    assert_fold(lambda m: m(elements, MASK), kind(elements), mask=kind(MASK))
    assert_fold(lambda m: m(elements, MASK), kind(elements), mask=kind(MASK), batch_size=2)
    assert_fold(lambda m: m(elements), kind(elements), batch_size=2)
    ragged = {"index": INDEX, "batch_size": 3}
    assert_fold(lambda m: m(rows, **ragged), kind(rows), index=kind(ragged["index"]), batch_size=3)
    assert_fold(lambda m: m(rows.unsqueeze(0)), kind(rows), batch_size=1)
    one = {"index": kind(torch.zeros(10, dtype=torch.long)), "batch_size": 1}
    assert_fold(lambda m: m(rows.unsqueeze(0)), kind(rows), **one)


@pytest.mark.usefixtures("tiles")
def test_a_tensor_has_its_gradient_in_one_piece():
    encoder, elements = make(aggregate=["mean", "max"]), draw(2, 10, 3).requires_grad_()
    expected = gradients(encoder(elements), [elements])
    assert_alike(gradients(setfold.fold(encoder, elements), [elements]), expected)
    leaf = nn.Parameter(elements.detach())
    assert_alike(gradients(setfold.fold(encoder, leaf), [leaf]), expected)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3)], ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_tensor_without_elements_is_empty_sets(shape, gradient):
    found = setfold.fold(make(), torch.zeros(shape).double(), gradient=gradient)
    assert torch.equal(found, torch.zeros(shape[0], 4, 5).double())


@given(
    batch=st.integers(1, 4),
    length=st.integers(0, 40),
    limit=st.integers(1, 4000),
    rows=st.integers(1, 40),
    costly=st.booleans(),
    axis=st.sampled_from([0, 1]),
    array=st.booleans(),
)
def test_tiles_are_all_of_it_and_small(batch, length, limit, rows, costly, axis, array):
    shape = (length, 3) if axis == 0 else (batch, length, 3)
    whole, beside = draw(*shape), torch.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])
    given = whole.numpy() if array else whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "TILE_BYTES", limit)
        patch.setattr(source, "COSTLY_ROWS", rows)
        found = Tiles(given, beside, axis=axis, costly=costly)
    parts = [(torch.as_tensor(elements), index) for elements, index in found]
    assert len(parts) == len(found) >= 1
    assert torch.equal(torch.cat([p for p, _ in parts], axis), whole)
    assert torch.equal(torch.cat([i for _, i in parts], axis), beside)
    one = whole.select(axis, 0).nbytes if length else 0
    assert all(p.nbytes <= max(limit, one) for p, _ in parts)
    if costly:
        sets = batch if axis else 1
        assert all(p.shape[axis] * sets <= max(rows, sets) for p, _ in parts)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", ">f4", ">f8", "int8", "int64", ">i4", "uint16", "bool"],
)
@pytest.mark.parametrize("like", [torch.float32, torch.float64], ids=str)
def test_arrays_of_numbers_become_like_the_weights(dtype, like):
    array = (10 * draw(2, 10, 3).numpy()).clip(0, 100).astype(dtype)
    expected = torch.from_numpy(array.astype(np.float64)).to(like)
    encoder = make().to(like)
    found = setfold.fold(encoder, array)
    torch.testing.assert_close(found, encoder(expected))
    assert torch.equal(chunk_from(array, expected).elements, expected)


def read_only(array):
    array.flags.writeable = False
    return array


ODD = {
    "read-only": read_only,
    "transposed": lambda a: np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2),
    "strided": lambda a: np.repeat(a, 2, 1)[:, ::2],
    "reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:, :1], a.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.usefixtures("tiles")
def test_arrays_may_lie_in_memory_as_they_like(name):
    array = ODD[name](draw(2, 10, 3).numpy().copy())
    expected = torch.tensor(np.array(array))
    assert_fold(lambda m: m(expected), array)
    assert np.array_equal(array, expected.numpy())


# ---- mapped files ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("view", [lambda a: a, np.asarray, lambda a: a[:, ::-1]], ids=[*"abc"])
@pytest.mark.usefixtures("tiles")
def test_mapped_files(tmp_path, mode, view):
    np.save(tmp_path / "all.npy", draw(2, 5000, 3).numpy())
    mapped = np.load(tmp_path / "all.npy", mmap_mode=mode)
    expected = torch.tensor(np.array(view(mapped)))
    assert_fold(lambda m: m(expected), [view(mapped)[:, :2000], view(mapped)[:, 2000:]])


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_what_was_written_to_a_mapping_is_not_lost(tmp_path, mode):
    np.save(tmp_path / "all.npy", np.zeros((1, 5000, 3)))
    mapped = np.load(tmp_path / "all.npy", mmap_mode=mode)
    mapped[:] = draw(1, 5000, 3).numpy()
    for array in (mapped, np.asarray(mapped), mapped[:, ::2], np.asarray(mapped)[:, 7:]):
        expected = torch.tensor(np.array(array))
        assert_fold(lambda m, e=expected: m(e), array)
    assert np.array_equal(mapped, draw(1, 5000, 3).numpy())


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="no private mappings here")
def test_memory_that_is_nobody_elses_is_left_alone():
    memory = mmap.mmap(-1, 3 * 8 * 5000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.ndarray((1, 5000, 3), buffer=memory)
    array[:] = draw(1, 5000, 3).numpy()
    assert_fold(lambda m: m(draw(1, 5000, 3)), array)
    assert np.array_equal(array, draw(1, 5000, 3).numpy())


# ---- chunks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.Tensor.clone], ids=["array", "tensor"])
@pytest.mark.parametrize("pair", [tuple, list])
def test_chunks_with_masks_or_indices(kind, pair):
    elements, rows, cuts = draw(2, 10, 3), draw(10, 3), [4, 0, 5, 1]
    dense = [
        pair(map(kind, p)) for p in zip(elements.split(cuts, 1), MASK.split(cuts, 1), strict=True)
    ]
    assert_fold(lambda m: m(elements, MASK), dense)
    ragged = [pair(map(kind, p)) for p in zip(rows.split(cuts), INDEX.split(cuts), strict=True)]
    assert_fold(lambda m: m(rows, index=INDEX, batch_size=3), ragged, batch_size=3)
    mixed = [kind(elements), pair((kind(elements), kind(MASK)))]
    assert_fold(
        lambda m: m(elements[:1], MASK[:1]), [pair((x[:1], m[:1])) for x, m in dense], batch_size=1
    )
    both = torch.cat([torch.ones_like(MASK), MASK], 1)
    assert_fold(lambda m: m(torch.cat([elements] * 2, 1), both), mixed)


class Opened:
    """What can be iterated over again and again."""

    def __init__(self, chunks):
        self.chunks = chunks

    def __iter__(self):
        return iter(self.chunks)


FORMS = {
    "list": list,
    "tuple": tuple,
    "arrays": lambda chunks: [c.numpy() for c in chunks],
    "function": lambda chunks: lambda: (c for c in chunks),
    "iterable": Opened,
    "parameters": nn.ParameterList,
    "stacked": lambda chunks: list(torch.stack(chunks)),
    "singles": lambda chunks: [(c,) for c in chunks],
}


@pytest.mark.parametrize("form", FORMS)
def test_chunks_come_in_many_forms(form):
    chunks = [draw(2, 4, 3, seed=i) for i in range(3)]
    assert_fold(lambda m: m(torch.cat(chunks, 1)), FORMS[form](chunks), model_of(["mean", "max"]))
    if form != "parameters":
        rows = [c.flatten(0, 1) for c in chunks]
        assert_fold(lambda m: m(torch.cat(rows).unsqueeze(0)), FORMS[form](rows), batch_size=1)


def test_a_loader_gives_rows_of_one_set_or_sets_of_their_own():
    rows, index = draw(10, 3), INDEX
    one = DataLoader(TensorDataset(rows), batch_size=4)
    assert_fold(lambda m: m(rows.unsqueeze(0)), one, model_of("max"), batch_size=1)
    some = DataLoader(TensorDataset(rows, index), batch_size=4)
    assert_fold(lambda m: m(rows, index=index, batch_size=3), some, batch_size=3)
    single = DataLoader(TensorDataset(rows), batch_size=1)
    assert_fold(lambda m: m(rows.unsqueeze(0)), single, batch_size=1)


def test_a_loader_may_have_workers():
    rows = draw(40, 3)
    loader = DataLoader(TensorDataset(rows), batch_size=8, num_workers=1)
    assert_fold(lambda m: m(rows.unsqueeze(0)), loader, batch_size=1)


# ---- bad arguments ----------------------------------------------------------------------------


X, ROWS = draw(2, 10, 3), draw(10, 3)
BAD = {
    "masked array": (np.ma.masked_equal(np.zeros((1, 4, 3)), 0), {}, "masked array"),
    "objects": (np.array([[[None]]]), {}, "must hold numbers.*object"),
    "words": (np.array([[["a"]]]), {}, "must hold numbers.*<U1"),
    "complex": (np.zeros((1, 2, 3), complex), {}, "must hold numbers.*complex"),
    "long": (np.zeros((1, 2, 3), "longdouble"), {}, "must hold numbers"),
    "a word": ("abc", {}, "chunks are tensors.*got str"),
    "a number": (3, {}, "chunks are tensors.*got int"),
    "nothing": (None, {}, "chunks are tensors.*got NoneType"),
    "a dict": ({"a": X}, {}, "chunks are tensors.*got str"),
    "dicts": ([{"a": X}], {}, "chunks are tensors.*got dict"),
    "a triple": ([(X, MASK, MASK)], {}, "tuple of Tensor and Tensor and Tensor"),
    "an empty pair": ([()], {}, "chunks are tensors"),
    "a pair with None": ([(X, None)], {}, "tuple of Tensor and NoneType"),
    "lists": ([X.tolist()], {}, "chunks are tensors"),
    "scalars": ([torch.tensor(1.0)], {}, "single number"),
    "one scalar": (torch.tensor(1.0), {}, r"got \(\)"),
    "one row": (ROWS[0], {}, r"got \(3,\)"),
    "no batch": (ROWS, {}, "unsqueeze"),
    "other width": (draw(2, 5, 4), {}, r"\(2, n, 3\); got \(2, 5, 4\)"),
    "integers": (torch.zeros(1, 2, 3, dtype=torch.long), {}, "floating point"),
    "precision": (X.float(), {}, "float32, the encoder's weights torch.float64"),
    "NaN": (X * torch.nan, {}, "finite"),
    "mask and chunks": ([X], {"mask": MASK}, "its own mask"),
    "index and chunks": ([ROWS], {"index": INDEX}, "its own mask or index"),
    "mask and index": (X, {"mask": MASK, "index": INDEX}, "not both"),
    "mask of numbers": (X, {"mask": MASK.double()}, "bool"),
    "mask too short": (X, {"mask": MASK[:, 1:]}, r"must be \(2, 10\); got \(2, 9\)"),
    "index too short": (
        ROWS,
        {"index": INDEX[1:], "batch_size": 3},
        r"must be \(10,\); got \(9,\)",
    ),
    "chunk's mask too short": ([(X, MASK[:, 1:])], {}, "mask must be bool"),
    "chunk's mask of numbers": ([(X, MASK.long())], {}, "bool .B, n., or an index"),
    "chunk's index too short": ([(ROWS, INDEX[1:])], {"batch_size": 3}, "index must be int64"),
    "no number of sets": (ROWS, {"index": INDEX}, "batch_size"),
    "no number of sets, chunks": ([(ROWS, INDEX)], {}, "batch_size"),
    "index too large": (ROWS, {"index": INDEX, "batch_size": 2}, "0..1 for 2 sets; found 2"),
    "index negative": (ROWS, {"index": INDEX - 1, "batch_size": 3}, "found -1"),
    "other number of sets": (X, {"batch_size": 3}, "batch_size is 3"),
    "function of nothing": (
        lambda: None,
        {},
        "must return an iterable of chunks; it returned NoneType",
    ),
    "no samples": (X, {"samples": 0}, "samples must be an integer of at least 1; got 0"),
    "half a sample": (X, {"samples": 1.5}, "samples"),
    "other gradient": (X, {"gradient": "foo"}, "exact, unbiased, subset, autograd; got 'foo'"),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise(name, gradient):
    chunks, told, reason = BAD[name]
    with pytest.raises(setfold.InputError, match=reason):
        setfold.fold(make(), chunks, **{"gradient": gradient} | told)
