"""One step: elements arrive at machines or are taken back, and everything is read out.

The server keeps nothing about a visitor. The browser holds the states and sends them along: they
are small, of fixed size, and all that a machine needs to continue. So memory is bounded however
many visitors there are, and the page shows what a state is good for.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo.live.parts import SHOWN, Part, View
from setfold import SetState
from setfold.core.statistic import is_finite
from setfold.errors import InputError
from setfold.laws.wrong_way import ChunkAverage

MACHINES = 2  # at most
KEYS = {"part", "example", "machines", "actions", "seen"}


# ---- states as text ----------------------------------------------------------------------------


def to_text(state: SetState) -> dict[str, Any]:
    """Return the state of one set for the browser: its numbers, and its count."""
    numbers = [part.flatten() for parts in state.statistics.values() for part in parts]
    content = torch.cat(numbers).numpy().astype("<f8").tobytes()
    return {"count": int(state.count), "numbers": b64encode(content).decode()}


def from_text(part: Part, text: Any) -> SetState:
    """Return the state that `to_text` wrote.

    Raises:
        InputError: It is something else.
    """
    empty = part.encoder.initial_state(1)
    try:
        count, numbers = (
            text["count"],
            np.frombuffer(b64decode(text["numbers"], validate=True), "<f8"),
        )
        sizes = [p.numel() for parts in empty.statistics.values() for p in parts]
        if type(count) is not int or not 0 <= count < 2**48 or numbers.size != sum(sizes):
            raise ValueError("another size")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("a state is not one that this page has received.") from error
    pieces = iter(torch.from_numpy(numbers.astype(np.float64)).split(sizes))
    statistics = {
        name: tuple(next(pieces).view_as(p) for p in parts)
        for name, parts in empty.statistics.items()
    }
    if not is_finite(statistics):
        raise InputError("a state is not one that this page has received.")
    return empty.with_statistics(statistics, torch.tensor([count]))


# ---- the step ----------------------------------------------------------------------------------


@torch.no_grad()
def step(part: Part, request: dict[str, Any]) -> dict[str, Any]:
    """Apply what a visitor has done, and return what the page shows then.

    Args:
        part: the model and its sets.
        request: `example`, a number; `machines`, their states, empty ones if None; `actions`, a
            list of {"machine": 0, "add": [...]} or {"machine": 0, "remove": [...]} with numbers of
            elements, or {"merge": true} or {"split": true}; `seen`, all elements that are there then, in the order of
            their arrival. The last one serves the comparisons; the machines do not need it.

    Raises:
        InputError: The request is something else.
    """
    if not {*request} <= KEYS:
        raise InputError(f"expected {', '.join(sorted(KEYS))}; got {[*request]!r:.200}.")
    number = _number(request.get("example"), len(part.examples), "example")
    elements = part.examples[number]
    states = _act(part, elements, _machines(part, request), request.get("actions", []))
    seen = elements[_numbers(request.get("seen", []), elements, "seen")]
    merged = states[0]
    for state in states[1:]:
        merged = merged.merge(state)
    encoder = part.encoder
    encoding = encoder.readout(merged)
    at_once = encoder(seen.unsqueeze(0)) if len(seen) else encoder.readout(encoder.initial_state(1))
    wrong = ChunkAverage(encoder, part.chunk)(seen.unsqueeze(0)) if len(seen) else at_once
    whole = encoder(elements.unsqueeze(0))
    alone = [encoder.readout(state) for state in states] if len(states) > 1 else []
    return {
        "machines": [to_text(state) for state in states],
        "view": part.show(encoding, number),
        "alone": [part.show(each, number) for each in alone],
        "wrong": part.show(wrong, number),
        "encoding": some_slots(encoding, whole),
        "distance": [apart(encoding, whole), apart(wrong, whole)],
        "difference": [apart(encoding, at_once), apart(wrong, at_once)],
    }


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the length of the difference of two encodings, relative to that of the second one."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def some_slots(encoding: Tensor, whole: Tensor) -> list[list[float]]:
    """Return the numbers of some slots, each after the number of the slot: (SHOWN, 1 + width).

    Args:
        encoding: (1, K, width).
        whole: the encoding of the whole set, by which the slots are chosen: the largest ones.
    """
    places = whole[0].sum(-1).topk(SHOWN).indices.sort().values
    return [[place, *encoding[0, place].tolist()] for place in places.tolist()]


def _machines(part: Part, request: dict[str, Any]) -> list[SetState]:
    given = request.get("machines")
    if not isinstance(given, list) or not 1 <= len(given) <= MACHINES:
        raise InputError(f"expected the states of 1 to {MACHINES} machines.")
    return [
        part.encoder.initial_state(1) if text is None else from_text(part, text) for text in given
    ]


def _act(part: Part, elements: Tensor, states: list[SetState], actions: Any) -> list[SetState]:
    """Return the states after some actions."""
    if not isinstance(actions, list) or not all(isinstance(one, dict) for one in actions):
        raise InputError("expected a list of actions.")
    for action in actions:
        if action.get("merge"):
            merged = states[0]
            for state in states[1:]:
                merged = merged.merge(state)
            states = [merged]
            continue
        if action.get("split") and len(states) < MACHINES:
            states.append(part.encoder.initial_state(1))
            continue
        machine = _number(action.get("machine"), len(states), "machine")
        for verb, change in (("add", part.encoder.update), ("remove", part.encoder.remove)):
            if verb in action:
                some = elements[_numbers(action[verb], elements, verb)].unsqueeze(0)
                states[machine] = change(states[machine], some)
    return states


def _number(given: Any, below: int, name: str) -> int:
    if type(given) is not int or not 0 <= given < below:
        raise InputError(f"{name} must be a number from 0 to {below - 1}; got {given!r:.60}.")
    return given


def _numbers(given: Any, elements: Sequence[Any] | Tensor, name: str) -> Tensor:
    if not isinstance(given, list) or len(given) > len(elements):
        raise InputError(f"{name} must be a list of elements.")
    found = torch.tensor([_number(each, len(elements), name) for each in given], dtype=torch.long)
    if len(found.unique()) != len(found):
        raise InputError(f"{name} names an element twice.")
    return found


def describe(part: Part, name: str) -> dict[str, Any]:
    """Return what the page needs to know about a part."""
    fields = part.encoder.initial_state(1).fields.values()
    return {
        **part.about,
        "name": name,
        "examples": part.names,
        "elements": part.examples.shape[1],
        "chunk": part.chunk,
        "state_bytes": part.encoder.state_nbytes,
        "removable": all(field.statistic.removable for field in fields),
    }


def example(part: Part, number: int) -> View:
    """Return the elements of a set, for the page."""
    return {"name": part.names[number], "elements": np.round(part.examples[number].numpy(), 4)}
