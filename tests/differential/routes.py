"""The ways from elements to an encoding through the library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import setfold
from setfold.core import absorb, begin
from setfold.kernels import extrema, places, ragged, softmax, sums, tiles
from tests.differential.configurations import Configuration

FEW = 3  # rows in a tile, for which ordinary sets have many tiles
TILES = [
    (tiles, "MIN_ROWS"),
    (tiles, "MAX_ROWS"),
    (extrema, "MAX_ROWS"),
    (places, "MIN_ROWS"),
    (places, "TILE_PAIRS"),
    (sums, "PLAIN_ROWS"),
    (softmax, "PLAIN_ROWS"),
    (ragged, "MAX_EXACT_LENGTHS"),
    (absorb, "FEATURE_ROWS"),
    (begin, "FEW"),
]
MODES = {"plain": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
Piece = tuple[Tensor, dict[str, Tensor]]


def run(configuration: Configuration) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The encoding of all sets, and the slots of each set, one tensor (K, h) for each level."""
    route = configuration.route
    with ExitStack() as stack:
        stack.enter_context(MODES[route.mode]())
        if route.small_tiles:
            for module, name in TILES:
                stack.enter_context(patch.object(module, name, FEW))
        if route.way in ("forward", "fold"):
            encoding = (_forward if route.way == "forward" else _fold)(configuration)
            frame = configuration.encoder.initial_state(1).frame
        else:
            state = _state(configuration)
            if route.saved:
                state = _through_a_file(state)
            encoding, frame = configuration.encoder.readout(state), state.frame
        sets = range(len(configuration.sets))
        own = [tuple(s[n if len(s) > 1 else 0].detach().clone() for s in frame) for n in sets]
        return encoding.detach().clone(), own


def _forward(configuration: Configuration) -> Tensor:
    ((elements, more),) = _pieces(configuration, configuration.sets)
    if "index" in more:
        more["batch_size"] = len(configuration.sets)
    return configuration.encoder(elements, **more)


def _fold(configuration: Configuration) -> Tensor:
    chunks = [
        (elements, *more.values()) for elements, more in _pieces(configuration, configuration.sets)
    ]
    chunks = [chunk if len(chunk) > 1 else chunk[0] for chunk in chunks]
    sets = len(configuration.sets) if configuration.route.form == "ragged" else None
    gradient = configuration.route.gradient
    return setfold.fold(configuration.encoder, chunks, batch_size=sets, gradient=gradient)


def _state(configuration: Configuration) -> setfold.SetState:
    encoder, route = configuration.encoder, configuration.route
    state = _begun(configuration)
    every = [torch.cat(both) for both in zip(configuration.sets, configuration.gone, strict=True)]
    pieces = _pieces(configuration, every)
    if route.way == "update":
        for elements, more in pieces:
            state = encoder.update(state, elements, **more)
    else:
        states = [encoder.update(state, elements, **more) for elements, more in pieces]
        while len(states) > 1:  # a random tree, in random order
            left, right = (states.pop(configuration.draw.integers(len(states))) for _ in range(2))
            states.append(left.merge(right))
        state = states[0]
    if route.removes:
        for elements, more in _pieces(configuration, configuration.gone):
            state = encoder.remove(state, elements, **more)
    return state


def _begun(configuration: Configuration) -> setfold.SetState:
    encoder, sets, draw = configuration.encoder, len(configuration.sets), configuration.draw
    seed = int(draw.integers(2**31))
    generator = torch.Generator().manual_seed(seed)
    match configuration.route.slots:
        case "drawn":
            return encoder.initial_state(sets, generator=generator)
        case "more":
            return encoder.initial_state(sets, num_slots=encoder.num_slots + 1)
        case "own":
            shapes = [slots.shape[1:] for slots in encoder.initial_state(1).frame]
            drawn = [torch.randn(sets, *shape, generator=generator) for shape in shapes]
            slots = [slots.to(configuration.dtype) for slots in drawn]
            return encoder.initial_state(sets, slots=slots if len(slots) > 1 else slots[0])
    return encoder.initial_state(sets)


def _through_a_file(state: setfold.SetState) -> setfold.SetState:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        state.save(path)
        return setfold.SetState.load(path)


def _pieces(configuration: Configuration, sets: list[Tensor]) -> Iterator[Piece]:
    """The rows of some sets, split at random into chunks."""
    draw, route = configuration.draw, configuration.route
    places = [torch.from_numpy(draw.integers(0, route.chunks, len(rows))) for rows in sets]
    for number in range(route.chunks):
        chunk = [rows[place == number] for rows, place in zip(sets, places, strict=True)]
        yield (_ragged if route.form == "ragged" else _dense)(configuration, chunk)


def _ragged(configuration: Configuration, sets: list[Tensor]) -> Piece:
    index = torch.arange(len(sets)).repeat_interleave(torch.tensor([len(rows) for rows in sets]))
    order = torch.from_numpy(configuration.draw.permutation(len(index)))
    return torch.cat(sets)[order], {"index": index[order]}


def _dense(configuration: Configuration, sets: list[Tensor]) -> Piece:
    """Padded, with elements at random places."""
    draw, padding = configuration.draw, configuration.route.padding
    lengths = [len(rows) for rows in sets]
    length = max(lengths) + int(draw.integers(0, 3))
    if len({*lengths}) == 1 and draw.integers(2):
        length = lengths[0]
    elements = torch.full((len(sets), length, sets[0].shape[1]), padding).to(configuration.dtype)
    mask = torch.zeros(len(sets), length, dtype=torch.bool)
    for number, rows in enumerate(sets):
        places = torch.from_numpy(draw.permutation(length)[: len(rows)])
        elements[number, places], mask[number, places] = rows, True
    whole = bool(mask.all()) and bool(draw.integers(2))
    return elements, {} if whole else {"mask": mask}
