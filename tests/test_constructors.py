"""Whatever is passed, every constructor gives a model or an InputError."""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import setfold

HUGE = 10**30


def slots(**changes):
    return setfold.SlotSetEncoder(
        **{"dim_in": 3, "num_slots": 4, "dim_slot": 6, "dim_out": 5} | changes
    )


NO_SIZE = [True, 2.0, "2", None, -1, 0, HUGE, [2], math.nan, torch.tensor(2), np.float32(2)]
NO_MODULE = [3, "relu", nn.ReLU, torch.relu, [nn.ReLU()]]
NO_ENCODER = [None, 3, "mean", nn.Linear(3, 3), setfold.Pool, setfold.FSPool(3), [setfold.Pool(3)]]
NOT = {  # by kind of argument, values that it must not take
    "size": NO_SIZE,
    "size or none": [value for value in NO_SIZE if value is not None],
    "size or zero": [value for value in NO_SIZE if value != 0 or value is True],
    "flag": [0, 1, None, "yes", 2.0, []],
    "choice": ["nope", 1, None, True, ["mean"], ("max", "mean"), ""],
    "aggregate": ["median", [], ["sum", "sum"], None, 3, {"sum"}, [["sum"]], True, ["sum", 1]],
    "positive": [0, -1, math.nan, math.inf, "a", None, True, [1.0]],
    "number": [math.nan, math.inf, "a", None, True, [1.0]],
    "share": [math.nan, 1, -0.5, "a", None, True, [0.5]],
    "integer": [1.5, "a", None, True, [1], HUGE],
    "text": [3, None, "", ["a"], True],
    "texts": [3, None, "ab", [], [1], ["a", "a"], {"a"}],
    "labels": [3, None, "ab", [], ["a"], ["a", 1], ["a", "a"], [1.5, 2.5]],
    "two numbers": [3, None, "ab", [], [1.0], [1.0, math.nan], [1.0, None]],
    "indices": [3, None, "ab", [3], [-1], [0, 0], [0.0], [True]],
    "table columns": [3, None, "ab", [], [nn.ReLU()], [setfold.NumberColumn("x")] * 2],
    "module": [*NO_MODULE, None],
    "module or none": NO_MODULE,
    "encoder": NO_ENCODER,
    "sizes": [[], 3, "ab", [0], [True], None, [2.5], [4, None], [HUGE]],
    "layers": [3, None, "ab", [nn.Linear(3, 3)], {1: 2}],
    "levels": [3, None, [], "ab", [nn.Linear(3, 3)], slots(), [slots(), slots()]],
    "numbers": [
        None,
        "1",
        [],
        [0],
        [0, "1"],
        [0, math.nan],
        [0, math.inf],
        True,
        [0, True],
        [HUGE**99] * 2,
    ],
    "shape": [0, "ab", None, [], [2], [2, 0], [2, True], [2, 2.5], [2, None], [2**20, 2**20]],
    "points": [
        *(3, None, "ab", [], [[]], [1.0], [[math.nan]], [[1.0], [1.0, 2.0]], [["a"]], [[None]]),
        *(torch.zeros(2), torch.zeros(2, 2).to_sparse(), torch.full((1, 1), math.inf)),
    ],
    "columns": [3, "ab", [], [0, 0], [0, 3], [-1, 0], [0, 1.0], [0, True], [0, None], {0, 1}],
    "places": [None, 3, "grid", torch.zeros(2, 2), setfold.Grid, nn.Linear(2, 2)],
    "grid": [None, 3, "grid", torch.zeros(2, 2), setfold.Grid, setfold.Places([[0.0, 0.0]])],
    "width": [0, -1, math.nan, math.inf, "a", None, True, [1.0], [1.0, 0, 1, 1], ["a"] * 4, []],
    "reach": [0, -1, 12.5, math.nan, math.inf, "a", None, True, [1.0]],
    "values": ["nope", [], ["offsets", "offsets"], 3, {"offsets"}, [["offsets"]], True],
    "encoders": [3, None, [], "ab", [nn.Linear(3, 3)], {"a.b": setfold.Pool(3)}, setfold.Pool(3)],
}


class Built(NamedTuple):
    """A valid call of a constructor, and the kind of each of its arguments."""

    kind: type
    valid: dict
    arguments: dict


def pool():
    return setfold.Pool(3)


def subtract():
    return setfold.EquivariantLayer(3, 3)


FLAG, SIZE, AGGREGATE, MODULE = "flag", "size", "aggregate", "module or none"
HEADS = {"dim": SIZE, "num_heads": SIZE, "layer_norm": FLAG}
LAYERS = HEADS | {
    "dim_in": SIZE,
    "num_layers": SIZE,
    "num_seeds": SIZE,
    "num_decoder_layers": "size or zero",
    "head": MODULE,
}
CONSTRUCTORS = [
    Built(
        setfold.SlotSetEncoder,
        {"dim_in": 3, "num_slots": 4, "dim_slot": 6, "dim_out": 5},
        {"dim_in": SIZE, "num_slots": SIZE, "dim_slot": SIZE, "dim_out": SIZE, "bias": FLAG}
        | {
            "aggregate": AGGREGATE,
            "slots": "choice",
            "attention": "choice",
            "similarity": "choice",
            "dim_key": "size or none",
        },
    ),
    Built(
        setfold.HierarchicalSlotSetEncoder,
        {"levels": [slots()]},
        {"levels": "levels", "activation": MODULE, "residual": FLAG},
    ),
    Built(setfold.NormalizedReLU, {}, {}),
    Built(setfold.Pool, {"dim_in": 3}, {"dim_in": SIZE, "aggregate": AGGREGATE}),
    Built(
        setfold.DeepSets,
        {"features": nn.Linear(3, 4), "dim_features": 4},
        {"features": MODULE, "dim_features": SIZE, "aggregate": AGGREGATE, "head": MODULE},
    ),
    Built(
        setfold.Composition,
        {"encoder": pool()},
        {"encoder": "encoder", "features": MODULE, "head": MODULE},
    ),
    Built(setfold.SlotPool, {}, {"reduce": "choice"}),
    Built(
        setfold.AttentionPool,
        {"dim_in": 3, "num_queries": 2, "dim_out": 4},
        {"dim_in": SIZE, "num_queries": SIZE, "dim_out": SIZE, "num_heads": SIZE, "bias": FLAG},
    ),
    Built(
        setfold.GatedAttentionPool,
        {"dim_in": 3, "dim_hidden": 4},
        {"dim_in": SIZE, "dim_hidden": SIZE, "num_branches": SIZE, "gated": FLAG, "bias": FLAG},
    ),
    Built(setfold.Concat, {"encoders": [pool()]}, {"encoders": "encoders"}),
    Built(setfold.MAB, {"dim": 4, "num_heads": 2}, HEADS),
    Built(setfold.SAB, {"dim": 4, "num_heads": 2}, HEADS),
    Built(
        setfold.ISAB, {"dim": 4, "num_inducing": 2, "num_heads": 2}, HEADS | {"num_inducing": SIZE}
    ),
    Built(setfold.PMA, {"dim": 4}, HEADS | {"num_seeds": SIZE}),
    Built(
        setfold.SeedAttention,
        {"dim": 4, "num_seeds": 2, "num_heads": 2},
        HEADS | {"num_seeds": SIZE},
    ),
    Built(
        setfold.ConstantMemoryEncoder,
        {"dim_in": 3, "dim": 4},
        HEADS
        | {"dim_in": SIZE, "num_latents": SIZE, "num_block_latents": SIZE, "num_blocks": SIZE},
    ),
    Built(setfold.SetTransformer, {"dim_in": 3, "dim": 4}, LAYERS | {"num_inducing": SIZE}),
    Built(setfold.FullSetTransformer, {"dim_in": 3, "dim": 4}, LAYERS),
    Built(
        setfold.EquivariantLayer,
        {"dim_in": 3, "dim_out": 4},
        {"dim_in": SIZE, "dim_out": SIZE, "subtract": "choice", "shared": FLAG}
        | {"activation": MODULE},
    ),
    Built(
        setfold.EquivariantDeepSets,
        {"dim_in": 3, "dims": [4]},
        {"dim_in": SIZE, "dims": "sizes", "subtract": "choice", "shared": FLAG, "head": MODULE}
        | {"aggregate": AGGREGATE, "activation": MODULE},
    ),
    Built(
        setfold.SlotAttention,
        {"dim_in": 3, "num_slots": 4, "dim": 4},
        {"dim_in": SIZE, "num_slots": SIZE, "dim": SIZE, "num_iterations": SIZE}
        | {"dim_hidden": SIZE},
    ),
    Built(setfold.Moments, {"dim_in": 3}, {"dim_in": SIZE}),
    Built(setfold.Covariance, {"dim_in": 3}, {"dim_in": SIZE}),
    Built(setfold.SummaryStatistics, {"dim_in": 3}, {"dim_in": SIZE}),
    Built(setfold.Standardize, {"dim": 3}, {"dim": SIZE}),
    Built(
        setfold.ResidualHead,
        {"dim": 3, "dim_linear": 2, "dim_out": 2},
        {"dim": SIZE, "dim_linear": SIZE, "dim_out": SIZE, "hidden": SIZE, "dropout": "share"},
    ),
    Built(
        setfold.GridHead,
        {"dim_linear": 2, "channels": 3, "shape": (2, 2), "dim_out": 2},
        {
            "dim_linear": SIZE,
            "channels": SIZE,
            "shape": "sizes",
            "dim_out": SIZE,
            "hidden": SIZE,
            "dropout": "share",
        },
    ),
    Built(
        setfold.NumberColumn,
        {"name": "x"},
        {"name": "text", "center": "number", "scale": "positive", "log": FLAG, "missing": FLAG},
    ),
    Built(
        setfold.VectorColumn,
        {"name": "x", "center": [0.0, 1.0], "scale": [1.0, 2.0]},
        {"name": "text", "center": "two numbers", "scale": "two numbers"},
    ),
    Built(
        setfold.CategoryColumn,
        {"name": "x", "values": ["a", "b"]},
        {"name": "text", "values": "texts", "dim": SIZE},
    ),
    Built(setfold.TimeColumn, {"name": "x"}, {"name": "text", "origin": "integer", "age": FLAG}),
    Built(setfold.Columns, {"columns": [setfold.NumberColumn("x")]}, {"columns": "table columns"}),
    Built(
        setfold.RelativeLayer,
        {"dim": 3, "center": [0], "latest": [1]},
        {"dim": SIZE, "center": "indices", "latest": "indices"},
    ),
    Built(
        setfold.Classes,
        {"name": "kind", "labels": ["a", "b"]},
        {"name": "text", "labels": "labels"},
    ),
    Built(
        setfold.Quantity,
        {"name": "age", "center": 1.0, "scale": 2.0},
        {"name": "text", "center": "number", "scale": "positive"},
    ),
    Built(setfold.SetNorm, {"dim": 3}, {"dim": SIZE, "over": "choice", "epsilon": "positive"}),
    Built(setfold.FSPool, {"dim_in": 3}, {"dim_in": SIZE, "num_pieces": SIZE}),
    Built(
        setfold.JanossyPool,
        {"function": nn.Flatten(), "dim_in": 3, "num_samples": 5},
        {"function": "module", "dim_in": SIZE, "arity": "size or none"}
        | {"num_samples": "size or none"},
    ),
    Built(
        setfold.Layer, {"pool": pool(), "look": nn.ReLU()}, {"pool": "encoder", "look": "module"}
    ),
    Built(
        setfold.Grid,
        {"low": (0, 0), "high": (1, 1), "shape": (2, 2)},
        {"low": "numbers", "high": "numbers", "shape": "shape", "learned": FLAG},
    ),
    Built(setfold.Places, {"points": [[0.0, 0.0]]}, {"points": "points", "learned": FLAG}),
    Built(setfold.SlotGrid, {"shape": (2, 2)}, {"shape": "sizes"}),
    Built(
        setfold.Zoom,
        {"places": setfold.Grid((0, 0), (1, 1), (4, 4)), "dim_in": 3, "shape": (2, 2)},
        {"places": "grid", "dim_in": SIZE, "shape": "sizes", "position": "columns"},
    ),
    Built(setfold.UnitBox, {"dim_in": 3}, {"dim_in": SIZE, "position": "columns"}),
    Built(
        setfold.PlacedSlotEncoder,
        {"dim_in": 3, "places": setfold.Grid((0, 0), (1, 1), (2, 2))},
        {"dim_in": SIZE, "places": "places", "width": "width", "values": "values"}
        | {"aggregate": AGGREGATE, "attention": "choice", "position": "columns"}
        | {"reach": "reach", "outside": "choice", "learn_width": FLAG},
    ),
    Built(
        setfold.LayeredSetEncoder,
        {"layers": [subtract()], "pool": pool()},
        {"layers": "layers", "pool": "encoder", "features": MODULE, "head": MODULE},
    ),
]


def test_every_public_module_and_argument_is_here():
    public = {getattr(setfold, name) for name in setfold.__all__}
    modules = {k for k in public if inspect.isclass(k) and issubclass(k, nn.Module)}
    assert {built.kind for built in CONSTRUCTORS} == {
        k for k in modules if not inspect.isabstract(k)
    }
    for built in CONSTRUCTORS:
        assert set(built.arguments) == set(inspect.signature(built.kind).parameters)


@pytest.mark.parametrize("built", CONSTRUCTORS, ids=lambda built: built.kind.__name__)
def test_constructors_take_what_is_valid_and_refuse_the_rest(built):
    built.kind(**built.valid)
    for name, kind in built.arguments.items():
        for value in NOT[kind]:
            with pytest.raises(setfold.InputError):
                pytest.fail(f"took {name}={value!r}: {built.kind(**built.valid | {name: value})}")
