"""The laws of a fold, each a few lines that can be broken.

A law takes a model and a case, a random situation, and yields pairs of tensors that must agree.
All states of one law begin from one empty state, so that slots drawn at random are the same.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setfold.checks.elsewhere import fold_in_another_process
from setfold.state import SetState
from setfold.statistic import STATISTICS

Model = Any  # anything with the verbs of a StreamingSetEncoder, or just a forward
Pair = tuple[Tensor, Tensor]  # what came, what was expected


@dataclass(frozen=True)
class Case:
    """One situation to hold a law to.

    Attributes:
        elements: (B, n, d).
        lengths: how the elements are cut into chunks; zeros are empty chunks.
        chunk_order: in which order the chunks come.
        permutation: (n,), an order of the elements.
        mask: (B, n), True where present.
        seed: for what a law draws itself.
    """

    elements: Tensor
    lengths: tuple[int, ...]
    chunk_order: tuple[int, ...]
    permutation: Tensor
    mask: Tensor
    seed: int = 0

    @cached_property
    def chunks(self) -> list[Tensor]:
        """The elements in chunks, in the order in which they come."""
        pieces = self.elements.split(list(self.lengths), 1)
        return [pieces[i] for i in self.chunk_order]

    @property
    def batch_size(self) -> int:
        return self.elements.shape[0]

    def describe(self) -> str:
        """The case in words."""
        batch, length, width = self.elements.shape
        sets = "1 set" if batch == 1 else f"{batch} sets"
        chunks = f"in chunks of {list(self.lengths)}"
        return f"{sets} of {length} x {width} elements {chunks}, seed {self.seed}"


@dataclass(frozen=True)
class Law:
    """A law: its name, what it says, and how to put it to the test.

    Attributes:
        name: a word or three.
        statement: one sentence.
        pairs: what must agree, in one case.
        obstacle: why the law does not apply to a model, or None.
        once: whether it costs so much that one case must do.
        slack: a factor on the tolerance, where rounding is passed on through a whole network.
    """

    name: str
    statement: str
    pairs: Callable[[Model, Case], Iterator[Pair]]
    obstacle: Callable[[Model], str | None]
    once: bool = False
    slack: float = 1.0

    def error(self, model: Model, case: Case) -> float:
        """The largest difference, relative to the largest number expected."""
        return max((difference(*pair) for pair in self.pairs(model, case)), default=0.0)


LAWS: list[Law] = []


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number expected; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if found.numel() == 0 or torch.equal(found, expected):
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    same = found == expected  # infinities of the same sign agree
    gap = torch.where(same, 0, (found - expected).abs()).max()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max() if finite.numel() else torch.ones(())
    error = float(gap / scale.clamp_min(torch.finfo(torch.float64).tiny))
    return error if error == error else float("inf")


def streams(model: Model) -> str | None:
    """Why a model is no fold, or None."""
    missing = [verb for verb in ("initial_state", "update", "readout") if not hasattr(model, verb)]
    return f"has no {', '.join(missing)}: all elements must be there at once" if missing else None


def takes(argument: str) -> Callable[[Model], str | None]:
    """An obstacle: `update`, or the forward of a model that is no fold, must take an argument."""

    def obstacle(model: Model) -> str | None:
        no_fold = streams(model)
        verb = model.forward if no_fold else model.update
        if argument in inspect.signature(verb).parameters:
            return None
        return no_fold or f"update takes no {argument}"

    return obstacle


def law(
    name: str,
    statement: str,
    obstacle: Callable[[Model], str | None] = streams,
    once: bool = False,
    slack: float = 1.0,
) -> Callable[[Callable[[Model, Case], Iterator[Pair]]], Law]:
    """Make a law of a generator of pairs, and list it."""

    def make(pairs: Callable[[Model, Case], Iterator[Pair]]) -> Law:
        LAWS.append(made := Law(name, statement, pairs, obstacle, once, slack))
        return made

    return make


def _begun_like(model: Model, state: Any) -> Any:
    """An empty state of one set with the slots of another state."""
    frame = getattr(state, "frame", ())
    return model.initial_state(1, slots=frame) if frame else model.initial_state(1)


def folded(model: Model, empty: SetState, chunks: Sequence[Tensor]) -> SetState:
    """Absorb chunks one after the other."""
    return reduce(model.update, chunks, empty)


def whole(model: Model, empty: SetState, case: Case) -> Tensor:
    """The encoding of the whole set in one go: what every fold must give."""
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
    yield model.readout(a.merge(b).merge(c)), whole(model, empty, case)


@law("commutativity", "a + b = b + a.")
def commutativity(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    a, b = (model.update(empty, half) for half in case.elements.tensor_split(2, 1))
    yield model.readout(a.merge(b)), model.readout(b.merge(a))


@law("any partition", "Chunks of any sizes in any order give what the whole set gives.")
def partition(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    expected = whole(model, empty, case)
    yield model.readout(folded(model, empty, case.chunks)), expected
    states = [model.update(empty, chunk) for chunk in case.chunks]
    yield model.readout(reduce(lambda a, b: a.merge(b), states)), expected


@law("forward", "Calling the encoder is beginning, absorbing and reading out.")
def forward(model: Model, case: Case) -> Iterator[Pair]:
    def seeded(function: Callable[[], Tensor]) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # slots that are drawn must be drawn alike
            torch.manual_seed(case.seed)
            return function()

    verbs = seeded(lambda: whole(model, model.initial_state(case.batch_size), case))
    yield seeded(lambda: model(case.elements)), verbs


@law("permutation", "The order of the elements does not matter.", obstacle=lambda model: None)
def permutation(model: Model, case: Case) -> Iterator[Pair]:
    shuffled = case.elements[:, case.permutation]
    if streams(model):
        yield model(shuffled), model(case.elements)
        return
    empty = model.initial_state(case.batch_size)
    yield model.readout(model.update(empty, shuffled)), whole(model, empty, case)


def _slots_apart(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    return None if getattr(model, "slot_axis", None) is not None else "keeps no slots apart"


@law("slot equivariance", "Permuting the slots permutes the encoding.", obstacle=_slots_apart)
def slot_equivariance(model: Model, case: Case) -> Iterator[Pair]:
    frame = model.initial_state(case.batch_size).frame
    expected = whole(model, model.initial_state(case.batch_size, slots=frame), case)
    draw = torch.Generator().manual_seed(case.seed)
    for level, slots in enumerate(frame):
        order = torch.randperm(slots.shape[1], generator=draw).to(slots.device)
        moved = [s[:, order] if i == level else s for i, s in enumerate(frame)]
        found = whole(model, model.initial_state(case.batch_size, slots=moved), case)
        last = level == len(frame) - 1  # the slots of a lower level are a set to the next one
        yield found, expected.index_select(model.slot_axis, order) if last else expected


@law("mask", "A masked element is an absent one, whatever it holds.", obstacle=takes("mask"))
def mask_is_absence(model: Model, case: Case) -> Iterator[Pair]:
    # a model that is no fold promises less: finite padding must do
    padding = 7.0 if streams(model) else torch.nan
    padded = case.elements.masked_fill(~case.mask.unsqueeze(-1), padding)
    for number in range(case.batch_size):
        one = slice(number, number + 1)
        present = case.elements[one][:, case.mask[number]]
        if streams(model):
            if present.shape[1]:  # not every such model knows what to make of an empty set
                yield model(padded[one], mask=case.mask[one]), model(present)
            continue
        empty = model.initial_state(1)
        expected = model.readout(model.update(empty, present))
        found = model.update(empty, padded[one], mask=case.mask[one])
        yield model.readout(found), expected


def _ragged(model: Model) -> str | None:
    return streams(model) or takes("index")(model)


@law("ragged", "A ragged batch is what its sets are one by one.", obstacle=_ragged)
def ragged_is_dense(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    draw = torch.Generator().manual_seed(case.seed)
    sets = torch.arange(case.batch_size, device=case.elements.device)
    index = sets[:, None].expand(case.mask.shape)[case.mask]
    rows = case.elements[case.mask]
    order = torch.randperm(len(rows), generator=draw).to(rows.device)
    found = model.readout(model.update(empty, rows[order], index=index[order]))
    for number in range(case.batch_size):
        one = case.elements[number, case.mask[number]].unsqueeze(0)
        alone = model.update(_begun_like(model, empty), one)
        yield found[number : number + 1], model.readout(alone)


def _removes(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    if not hasattr(model, "remove"):
        return "has no remove"
    names = {a.statistic for a in getattr(model, "aggregates", ())}
    kept = sorted(name for name in names if not STATISTICS[name].removable)
    return f"a {' or '.join(kept)} cannot forget" if kept else None


@law("removal", "Removing what was added undoes it.", obstacle=_removes)
def remove_undoes_update(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    half, rest = case.elements.tensor_split(2, 1)
    before = model.update(empty, half)
    back = model.remove(model.update(before, rest), rest)
    yield model.readout(back), model.readout(before)
    yield model.readout(model.remove(back, half)), model.readout(empty)


@law("inputs unchanged", "Neither update nor merge changes what it is given.")
def inputs_unchanged(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    elements = case.elements.clone()
    state = model.update(empty, elements)
    expected = model.readout(state).clone()
    other = model.update(state, elements)
    state.merge(other)
    yield model.readout(state), expected
    yield elements, case.elements
    elements.zero_()  # a state must not live off the caller's memory either
    yield model.readout(state), expected


@law("readout repeatable", "Reading out changes nothing, and gives the same again.")
def readout_repeatable(model: Model, case: Case) -> Iterator[Pair]:
    state = model.update(model.initial_state(case.batch_size), case.elements)
    first = model.readout(state).clone()
    yield model.readout(state), first
    again = model.update(state, case.elements[:, :0])
    yield model.readout(again), first


@law("update after merge", "A merged state absorbs on.")
def update_after_merge(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    first, second, third = case.elements.tensor_split(3, 1)
    merged = model.update(empty, first).merge(model.update(empty, second))
    yield model.readout(model.update(merged, third)), whole(model, empty, case)


def _saves(model: Model) -> str | None:
    if streams(model):
        return streams(model)
    return None if hasattr(model.initial_state(1), "save") else "its states have no save"


@law("save and load", "A state that was written and read is as before.", obstacle=_saves)
def save_and_load(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    a, b = (model.update(empty, half) for half in case.elements.tensor_split(2, 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        a.save(path)
        again = type(a).load(path)
    yield model.readout(again), model.readout(a)
    yield model.readout(again.merge(b)), model.readout(a.merge(b))


@law("two processes", "States made in different processes merge.", obstacle=_saves, once=True)
def two_processes(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    here, there = case.elements.tensor_split(2, 1)
    state = fold_in_another_process(model, there, getattr(empty, "frame", ()))
    yield model.readout(model.update(empty, here).merge(state)), whole(model, empty, case)


@law("equal gradients", "Every partition has the gradients of the whole set.", slack=10)
def equal_gradients(model: Model, case: Case) -> Iterator[Pair]:
    def gradients(chunked: bool) -> list[Tensor]:
        elements = case.elements.clone().requires_grad_()
        with torch.enable_grad():
            empty = model.initial_state(case.batch_size, **same_slots)
            pieces = elements.split(list(case.lengths), 1) if chunked else (elements,)
            encoding = model.readout(folded(model, empty, pieces))
            draw = torch.Generator().manual_seed(case.seed)
            weight = torch.randn(encoding.shape, generator=draw).to(encoding)
            loss = (weight * encoding).sum() / max(1, case.elements.shape[1])
        wanted = [elements, *(p for p in model.parameters() if p.requires_grad)]
        if not loss.requires_grad:  # nothing was seen, so nothing depends on anything
            return [torch.zeros_like(w) for w in wanted]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [torch.zeros_like(w) if f is None else f for w, f in zip(wanted, found, strict=True)]

    with torch.enable_grad():
        frame = getattr(model.initial_state(case.batch_size), "frame", ())
    same_slots = {"slots": [slots.detach() for slots in frame]} if frame else {}
    found, expected = gradients(chunked=True), gradients(chunked=False)
    scale = max((float(e.abs().max()) for e in expected if e.numel()), default=0.0)
    unit = case.elements.new_tensor(
        [scale]
    )  # gradients that are noise beside the others may differ
    for f, e in zip(found, expected, strict=True):
        yield torch.cat([f.flatten(), unit]), torch.cat([e.flatten(), unit])


@law("empty set", "An empty set has an encoding: finite, and zero before any head.")
def empty_set(model: Model, case: Case) -> Iterator[Pair]:
    empty = model.initial_state(case.batch_size)
    encoding = model.readout(empty)
    yield model.readout(model.update(empty, case.elements[:, :0])), encoding
    yield encoding.isfinite(), torch.ones_like(encoding, dtype=torch.bool)
    if getattr(model, "head", None) is None:
        yield encoding, torch.zeros_like(encoding)
