"""The laws of a fold.

A law takes a model and a case (random inputs), and yields pairs of tensors that must agree. All
states of a law begin from the same empty state, so that they have the same random slots.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.primitives import SetEncoder
from setfold.core.state import SetState
from setfold.folding.api import fold
from setfold.folding.replay import replayable_fold
from setfold.folding.source import Source
from setfold.laws.elsewhere import fold_in_another_process
from setfold.laws.law import LAWS as LAWS  # complete after this module is imported
from setfold.laws.law import Case, Model, Pair, folds, law, streams, takes


def _empty_like(model: Model, state: Any) -> Any:
    """The empty state of one set, with the slots of another state."""
    frame = getattr(state, "frame", ())
    return model.initial_state(1, slots=frame) if frame else model.initial_state(1)


def fold_chunks(model: Model, empty: SetState, chunks: Sequence[Tensor]) -> SetState:
    """The state after all chunks, one by one."""
    return reduce(model.update, chunks, empty)


def encode_whole(model: Model, empty: SetState, case: Case) -> Tensor:
    """The encoding of the whole sets in one update, which every fold must equal."""
    return model.readout(model.update(empty, case.elements))


@law("identity", "Merging with the empty state changes nothing, on either side.")
def identity(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    state = model.update(empty, case.elements)
    expected = model.readout(state)
    yield model.readout(state.merge(empty)), expected
    yield model.readout(empty.merge(state)), expected


@law("associativity", "(a + b) + c = a + (b + c).")
def associativity(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    thirds = case.elements.tensor_split(3, 1)
    a, b, c = (model.update(empty, third) for third in thirds)
    yield model.readout(a.merge(b).merge(c)), model.readout(a.merge(b.merge(c)))
    yield model.readout(a.merge(b).merge(c)), encode_whole(model, empty, case)


@law("commutativity", "a + b = b + a.")
def commutativity(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    a, b = (model.update(empty, half) for half in case.elements.tensor_split(2, 1))
    yield model.readout(a.merge(b)), model.readout(b.merge(a))


@law(
    "any partition", "Chunks of any size, in any order, give the encoding of the whole set.", folds
)
def partition(model: Model, case: Case) -> Iterator[Pair]:
    if streams(model):
        yield fold(model, case.chunks), model(case.elements)
        return
    empty = model.initial_state(case.batch_size)
    expected = encode_whole(model, empty, case)
    yield model.readout(fold_chunks(model, empty, case.chunks)), expected
    states = [model.update(empty, chunk) for chunk in case.chunks]
    yield model.readout(reduce(lambda a, b: a.merge(b), states)), expected


@law("forward", "Calling the encoder equals initial_state, update and readout.")
def forward(model: Model, case: Case) -> Iterator[Pair]:
    def seeded(function: Callable[[], Tensor]) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # random slots must be equal
            torch.manual_seed(case.seed)
            return function()

    expected = seeded(lambda: encode_whole(model, model.initial_state(case.batch_size), case))
    found = seeded(lambda: model(case.elements))
    yield found, expected
    if isinstance(model, StreamingSetEncoder) and getattr(model, "head", None) is None:
        same = torch.tensor(found.dtype == expected.dtype == case.elements.dtype)
        yield same, torch.ones_like(same)


@law("permutation", "The order of the elements does not matter.", obstacle=lambda model: None)
def permutation(model: Model, case: Case) -> Iterator[Pair]:
    shuffled = case.elements[:, case.permutation]
    if streams(model):
        yield model(shuffled), model(case.elements)
        return
    empty = model.initial_state(case.batch_size)
    yield model.readout(model.update(empty, shuffled)), encode_whole(model, empty, case)


def _separates_slots(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    return (
        None if getattr(model, "slot_axis", None) is not None else "its encoding has no slot axis"
    )


@law("slot equivariance", "Permuting the slots permutes the encoding.", obstacle=_separates_slots)
def slot_equivariance(model: Model, case: Case) -> Iterator[Pair]:
    frame = model.initial_state(case.batch_size).frame
    expected = encode_whole(model, model.initial_state(case.batch_size, slots=frame), case)
    draw = torch.Generator().manual_seed(case.seed)
    for level, slots in enumerate(frame):
        order = torch.randperm(slots.shape[1], generator=draw).to(slots.device)
        moved = [s[:, order] if i == level else s for i, s in enumerate(frame)]
        found = encode_whole(model, model.initial_state(case.batch_size, slots=moved), case)
        last = level == len(frame) - 1  # the slots of a lower level are a set for the next level
        yield found, expected.index_select(model.slot_axis, order) if last else expected


@law("mask", "A masked element has no effect, for any value.", obstacle=takes("mask"))
def mask_is_absence(model: Model, case: Case) -> Iterator[Pair]:
    # models of other libraries need finite padding
    accepts_nan = isinstance(model, SetEncoder) or not streams(model)
    padding = torch.nan if accepts_nan else 7.0
    padded = case.elements.masked_fill(~case.mask.unsqueeze(-1), padding)
    for number in range(case.batch_size):
        one = slice(number, number + 1)
        present = case.elements[one][:, case.mask[number]]
        if streams(model):
            if present.shape[1]:  # models without states need not support empty sets
                yield model(padded[one], mask=case.mask[one]), model(present)
            continue
        empty = model.initial_state(1)
        expected = model.readout(model.update(empty, present))
        found = model.update(empty, padded[one], mask=case.mask[one])
        yield model.readout(found), expected
    if not streams(model):  # a batch in which one set is hidden entirely
        empty = model.initial_state(case.batch_size)
        mask = case.mask.clone()
        mask[0] = False
        state = model.update(empty, padded, mask=mask)
        yield model.readout(state)[:1], model.readout(empty)[:1]
        again = model.update(state, case.elements)
        once = model.update(empty, case.elements)
        yield model.readout(again)[:1], model.readout(once)[:1]


@law("ragged", "A ragged batch equals its sets one by one.", obstacle=takes("index"))
def ragged_is_dense(model: Model, case: Case) -> Iterator[Pair]:
    draw = torch.Generator().manual_seed(case.seed)
    sets = torch.arange(case.batch_size, device=case.elements.device)
    index = sets[:, None].expand(case.mask.shape)[case.mask]
    rows = case.elements[case.mask]
    order = torch.randperm(len(rows), generator=draw).to(rows.device)
    alone = [e[m].unsqueeze(0) for e, m in zip(case.elements, case.mask, strict=True)]
    if streams(model):
        found = model(rows[order], index=index[order], batch_size=case.batch_size)
        expected = [model(one) for one in alone]
    else:
        empty = model.initial_state(case.batch_size)
        found = model.readout(model.update(empty, rows[order], index=index[order]))
        expected = [model.readout(model.update(_empty_like(model, empty), one)) for one in alone]
    for number, one in enumerate(expected):
        yield found[number : number + 1], one


def _removes(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    if not hasattr(model, "remove"):
        return "has no method remove"
    fields = getattr(model.initial_state(1), "fields", {})
    kept = sorted({repr(f.statistic) for f in fields.values() if not f.statistic.removable})
    return f"it keeps statistics that cannot remove elements: {', '.join(kept)}" if kept else None


@law("removal", "Removing elements that were added restores the state.", obstacle=_removes)
def remove_undoes_update(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    half, rest = case.elements.tensor_split(2, 1)
    before = model.update(empty, half)
    back = model.remove(model.update(before, rest), rest)
    yield model.readout(back), model.readout(before)
    yield model.readout(model.remove(back, half)), model.readout(empty)


@law("inputs unchanged", "update and merge do not modify their arguments.")
def inputs_unchanged(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    elements = case.elements.clone()
    state = model.update(empty, elements)
    expected = model.readout(state).clone()
    other = model.update(state, elements)
    state.merge(other)
    yield model.readout(state), expected
    yield elements, case.elements
    elements.zero_()  # a state must not share memory with the elements
    yield model.readout(state), expected


@law("readout repeatable", "readout does not modify the state, and is repeatable.")
def readout_repeatable(model: Model, case: Case) -> Iterator[Pair]:
    state = model.update(model.initial_state(case.batch_size), case.elements)
    first = model.readout(state).clone()
    yield model.readout(state), first
    again = model.update(state, case.elements[:, :0])
    yield model.readout(again), first


@law("update after merge", "A merged state accepts more chunks.")
def update_after_merge(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    first, second, third = case.elements.tensor_split(3, 1)
    merged = model.update(empty, first).merge(model.update(empty, second))
    yield model.readout(model.update(merged, third)), encode_whole(model, empty, case)


def _saves(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    return None if hasattr(model.initial_state(1), "save") else "its states have no method save"


@law("save and load", "A state is the same after saving and loading.", obstacle=_saves)
def save_and_load(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    a, b = (model.update(empty, half) for half in case.elements.tensor_split(2, 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        a.save(path)
        loaded = type(a).load(path)
    yield model.readout(loaded), model.readout(a)
    yield model.readout(loaded.merge(b)), model.readout(a.merge(b))


@law("two processes", "States from different processes merge.", obstacle=_saves, once=True)
def two_processes(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    here, there = case.elements.tensor_split(2, 1)
    state = fold_in_another_process(model, there, getattr(empty, "frame", ()))
    yield model.readout(model.update(empty, here).merge(state)), encode_whole(model, empty, case)


@law(
    "weights change later",
    "Changing the weights does not change states computed before.",
)
def weights_change_later(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    state = model.update(empty, case.elements)
    expected = model.readout(state).clone()
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        try:
            for parameter in parameters:
                parameter.data.add_(1)  # invisible to autograd's version counter
            kept = state.merge(empty)
            if hasattr(state, "save"):
                state.save(path)
        finally:
            for parameter, values in zip(parameters, before, strict=True):
                parameter.data.copy_(values)
        yield model.readout(state), expected
        yield model.readout(kept), expected
        if hasattr(state, "save"):
            yield model.readout(type(state).load(path)), expected


@law("NaN and infinity", "NaN or infinity raises an error, and the state is unchanged.")
def not_finite(model: Model, case: Case) -> Iterator[Pair]:
    state = model.update(model.initial_state(case.batch_size), case.elements)
    expected = model.readout(state).clone()
    width = case.elements.shape[2]
    for bad in (torch.nan, torch.inf, -torch.inf):
        for column in range(width):
            elements = case.elements.clone()
            elements[-1, -1, column] = bad
            raised = case.elements.new_zeros(())
            try:
                model.update(state, elements)
            except ValueError:  # NonFiniteError is a ValueError
                raised += 1
            yield raised, torch.ones_like(raised)
    yield model.readout(state), expected


@law("equal gradients", "Every partition has the gradients of the whole set.", folds, slack=10)
def equal_gradients(model: Model, case: Case) -> Iterator[Pair]:
    def encode(elements: Tensor, way: str) -> Tensor:
        pieces = (elements,) if way == "whole" else elements.split(list(case.lengths), 1)
        if streams(model):
            return model(elements) if way == "whole" else fold(model, pieces)
        empty = model.initial_state(case.batch_size, **same_slots)
        if way == "replayed":  # like `fold`, but with the same slots for every way
            source = Source(pieces, like=None, again=True, draws=False)
            return model.readout(replayable_fold(lambda sets: (model, empty), source)[1])
        return model.readout(fold_chunks(model, empty, pieces))

    def gradients(way: str) -> list[Tensor]:
        elements = case.elements.clone().requires_grad_()
        with torch.enable_grad():
            encoding = encode(elements, way)
            draw = torch.Generator().manual_seed(case.seed)
            weight = torch.randn(encoding.shape, generator=draw).to(encoding)
            loss = (weight * encoding).sum() / max(1, case.elements.shape[1])
        wanted = [elements, *(p for p in model.parameters() if p.requires_grad)]
        if not loss.requires_grad:  # there are no elements
            return [torch.zeros_like(w) for w in wanted]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        of_elements, *others = (
            torch.zeros_like(w) if f is None else f for w, f in zip(wanted, found, strict=True)
        )
        # the gradient of a maximum goes to any of the elements that are equal
        equal = (elements.unsqueeze(1) == elements.unsqueeze(2)).all(-1)  # (B, n, n)
        return [equal.to(of_elements.dtype) @ of_elements, *others]

    frame = () if streams(model) else getattr(model.initial_state(case.batch_size), "frame", ())
    same_slots = {"slots": [slots.detach() for slots in frame]} if frame else {}
    expected = gradients("whole")
    scale = max((float(e.abs().max()) for e in expected if e.numel()), default=0.0)
    unit = case.elements.new_tensor([scale])  # errors are relative to the largest gradient
    ways = ["chunked"]
    if isinstance(model, StreamingSetEncoder):
        ways.append("replayed")  # exact gradients in the memory of one chunk
    for way in ways:
        for f, e in zip(gradients(way), expected, strict=True):
            yield torch.cat([f.flatten(), unit]), torch.cat([e.flatten(), unit])


def _encodes_empty_sets(model: Model) -> str | None:
    return None if isinstance(model, SetEncoder) else streams(model)


@law(
    "empty set",
    "The encoding of an empty set is finite, and zero before any head.",
    obstacle=_encodes_empty_sets,
)
def empty_set(model: Model, case: Case) -> Iterator[Pair]:
    nothing = case.elements[:, :0]
    if streams(model):
        encoding = model(nothing)
    else:
        empty = model.initial_state(case.batch_size)
        encoding = model.readout(empty)
        yield model.readout(model.update(empty, nothing)), encoding
    yield encoding.isfinite(), torch.ones_like(encoding, dtype=torch.bool)
    if getattr(model, "head", None) is None:
        yield encoding, torch.zeros_like(encoding)
