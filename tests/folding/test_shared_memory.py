"""Arrays that their owner writes to between a forward and its backward pass.

Autograd notices when torch writes to a tensor that a graph keeps, but not when numpy does. The
gradients must be those of the forward pass, or the backward pass must raise.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import setfold
from tests.core.test_whole import ENCODERS
from tests.folding.test_gradients import model_of
from tests.small import assert_alike, draw, gradients, moved

LENGTHS = [9, 5000]  # below and above the size from which on gradients are recomputed
STREAMING = {
    "mean": lambda: model_of("mean"),
    "max": lambda: model_of("max"),
    "values": lambda: setfold.SlotSetEncoder(3, 4, 6, 1, ["sum", "weighted_mean"], "learned"),
    "softmax": lambda: setfold.SlotSetEncoder(
        3, 4, 6, 5, "weighted_mean", "learned", attention="softmax"
    ),
    "cosine": lambda: setfold.SlotSetEncoder(3, 4, 6, 5, slots="learned", similarity="cosine"),
    "attention": lambda: setfold.AttentionPool(3, 2, 4),
    "features": lambda: setfold.DeepSets(nn.Linear(3, 4), 4, "sum"),
    "moments": lambda: setfold.Composition(setfold.Moments(3), head=nn.Linear(3, 2)),
}


def built(recipe):
    torch.manual_seed(0)
    return moved(recipe())


def wanted_of(model):
    return list(model.parameters())


@pytest.mark.parametrize("gradient", ["autograd", "unbiased", "subset"])
@pytest.mark.parametrize("name", STREAMING)
def test_a_stream_may_use_one_array_again_and_again(name, gradient):
    model, elements = built(STREAMING[name]), draw(1, 12, 3)
    buffer = np.empty((1, 4, 3))

    def reused():
        for chunk in elements.split(4, 1):
            buffer[:] = chunk
            yield buffer
        buffer[:] = 7

    options = {"gradient": gradient, "samples": 3}  # all of them
    found = gradients(setfold.fold(model, reused(), **options), wanted_of(model))
    assert_alike(found, gradients(model(elements), wanted_of(model)))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("gradient", ["exact", "autograd", "subset"])
def test_arrays_may_change_after_a_fold_whose_graph_keeps_them(name, length, gradient):
    model, array = built(STREAMING[name]), draw(2, length, 3).numpy()
    mask = np.arange(length) < np.array([[length], [length // 2]])
    expected = gradients(model(torch.tensor(array), torch.tensor(mask)), wanted_of(model))
    encoding = setfold.fold(model, [(array, mask)], gradient=gradient)
    array[:], mask[:] = 7, True
    assert_alike(gradients(encoding, wanted_of(model)), expected)


def views_of(length):
    """Elements, mask and index that share their memory with arrays, and the arrays."""
    arrays = [
        draw(2, length, 3).numpy(),
        np.arange(length) < np.array([[length], [length // 2]]),
        np.arange(2 * length) % 2,
    ]
    return [torch.from_numpy(array) for array in arrays], arrays


def given_in(form, tensors):
    elements, mask, index = tensors
    if form == "ragged":
        return {"elements": elements.flatten(0, 1), "index": index}
    return {"elements": elements} | ({"mask": mask} if form == "masked" else {})


FORMS = ("dense", "masked", "ragged")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", STREAMING)
def test_views_of_arrays_that_are_absorbed_with_a_graph(name, length, form):
    model = built(STREAMING[name])
    copies = given_in(form, [tensor.clone() for tensor in views_of(length)[0]])
    expected = model.readout(model.update(model.initial_state(2), **copies))
    tensors, arrays = views_of(length)
    encoding = model.readout(model.update(model.initial_state(2), **given_in(form, tensors)))
    for array in arrays:
        array[:] = 1
    wanted = wanted_of(model)
    assert_alike(gradients(encoding, wanted), gradients(expected, wanted))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_views_of_arrays_that_are_encoded_whole(name, form):
    encoder = built(ENCODERS[name])
    options = {"batch_size": 2} if form == "ragged" else {}
    copies = given_in(form, [tensor.clone() for tensor in views_of(9)[0]])
    expected, (tensors, arrays) = encoder(**copies, **options), views_of(9)
    encoding = encoder(**given_in(form, tensors), **options)
    for array in arrays:
        array[:] = 1
    wanted = wanted_of(encoder)
    if wanted:
        assert_alike(gradients(encoding, wanted), gradients(expected, wanted))


@pytest.mark.parametrize("length", [3, 300])
def test_one_small_set_that_is_a_view_of_an_array(length):
    encoder, array = model_of("mean"), draw(1, length, 3).numpy()
    expected = gradients(encoder(torch.tensor(array)), wanted_of(encoder))
    encoding = encoder(torch.from_numpy(array))
    array[:] = 7
    assert_alike(gradients(encoding, wanted_of(encoder)), expected)


MADE = {
    "from numpy": lambda tensor: (torch.from_numpy(array := tensor.numpy().copy()), array),
    "to numpy": lambda tensor: (made := tensor.clone(), made.numpy()),
    "from a buffer": lambda tensor: (
        torch.frombuffer(buffer := bytearray(tensor.numpy().tobytes()), dtype=tensor.dtype).view(
            tensor.shape
        ),
        np.frombuffer(buffer, tensor.numpy().dtype).reshape(tensor.shape),
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_views_of_arrays_in_a_list_are_known_by_their_bytes(make):
    """An exact fold keeps no graph of several chunks: it reads them again, and compares."""
    encoder = model_of("mean")
    views, arrays = zip(*(make(draw(1, 4, 3, seed=seed)) for seed in range(3)), strict=True)
    expected = gradients(encoder(torch.cat(views, 1)), wanted_of(encoder))
    assert_alike(gradients(setfold.fold(encoder, views), wanted_of(encoder)), expected)
    encoding = setfold.fold(encoder, views)
    arrays[1][0, 2, 1] += 1
    with pytest.raises(setfold.InputError, match="chunk 1 has changed"):
        encoding.sum().backward()


def test_memory_of_torch_is_not_copied():
    encoder, elements = model_of("mean"), draw(1, 5000, 3)
    kept = []

    def note(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        encoder.readout(encoder.update(encoder.initial_state(), elements))
    assert elements.data_ptr() in kept


def test_a_chunk_that_is_made_an_array_after_the_fold_may_have_changed():
    encoder, chunks = model_of("mean"), [draw(1, 4, 3, seed=seed) for seed in range(3)]
    encoding = setfold.fold(encoder, chunks)
    chunks[1].numpy()[:] = 7
    with pytest.raises(setfold.InputError, match=r"chunk 1 was made an array.*of a copy"):
        encoding.sum().backward()


@pytest.mark.parametrize(
    "form", [list, lambda chunks: lambda: iter(chunks)], ids=["list", "stream"]
)
def test_folding_does_not_share_the_memory_of_chunks(form):
    encoder, rows, index = model_of("mean"), draw(12, 3), torch.arange(12) % 2
    chunks = [(rows.clone(), index.clone()) for _ in range(2)]
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            setfold.fold(encoder, form(chunks), batch_size=2)
    assert all(part.untyped_storage().resizable() for chunk in chunks for part in chunk)
