"""Whatever is passed, every verb and function gives the right result or an InputError."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from tests.small import TIGHT, contextual, draw, make
from tests.test_constructors import HUGE, NO_SIZE, pool

# ---- verbs -------------------------------------------------------------------------------------

X, MASK = draw(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
INDEX = torch.tensor([0, 1, 1, 0, 1])
SLOTS = draw(4, 6)
NO_BATCH = [True, 2.0, "2", -1, HUGE, [2], math.nan, torch.tensor(2)]
NO_SLOTS = {
    "a number": 5,
    "NaN": math.nan,
    "a word": "random",
    "a list of numbers": [1.0],
    "none of them": SLOTS[:0],
    "NaN inside": SLOTS * math.nan,
    "infinity inside": SLOTS / 0,
    "integers": SLOTS.long(),
    "complex": SLOTS + 0j,
    "an array": SLOTS.numpy(),
    "sparse": SLOTS.to_sparse(),
    "a set": {1},
}
CALLS = {
    "batch_size": [(lambda v: make().initial_state(v), [*NO_BATCH, None])],
    "batch_size of forward": [
        (lambda v: make()(X[0], index=INDEX, batch_size=v), NO_BATCH),
        (lambda v: make()(X, batch_size=v), [*NO_BATCH, 0, 1, 3]),
        (lambda v: make()(X[:1], batch_size=v), [*NO_BATCH, 0, 2]),  # one small set
        (lambda v: make()(X, MASK, batch_size=v), [*NO_BATCH, 0, 1, 3]),
        (lambda v: setfold.FSPool(3).double()(X, batch_size=v), [*NO_BATCH, 0, 1, 3]),
        (lambda v: setfold.SetTransformer(3, 4).double()(X, MASK, batch_size=v), [*NO_BATCH, 3]),
    ],
    "num_slots": [
        (lambda v: make().initial_state(num_slots=v), [x for x in NO_SIZE if x is not None]),
        (lambda v: make(slots="learned").initial_state(num_slots=v), [3, 4.0, "4", True]),
        (lambda v: make().resize(v), NO_SIZE),
        (lambda v: setattr(setfold.SlotAttention(3, 4, 4), "num_slots", v), NO_SIZE),
        (lambda v: setfold.Pool(3).initial_state(num_slots=v), [2, 2.5, "a", True]),
    ],
    "generator": [
        (lambda v: make().initial_state(generator=v), [0, "seed", True, torch.Generator])
    ],
    "slots": [(lambda v: make().initial_state(slots=v), list(NO_SLOTS.values()))],
    "context": [
        (
            lambda v: contextual().initial_state(2, context=v),
            [5, "abc", {1}, [1.0], X[0], X.numpy()],
        ),
        (lambda v: contextual()(X, context=v), [5, "abc", {1}, [1.0], X[0], X.to_sparse()]),
    ],
    "fold": [
        (lambda v: setfold.fold(make(), X, samples=v), NO_SIZE),
        (lambda v: setfold.fold(make(), [X], batch_size=v), [*NO_BATCH, 0, 1, 3]),
        (lambda v: setfold.fold(make(), X[0], index=INDEX, batch_size=v), [*NO_BATCH, None]),
        (lambda v: setfold.fold(make(), X, gradient=v), [None, 1, "", ["exact"], True]),
        (lambda v: setfold.fold(v, X), [None, 1, "", setfold.Pool, nn.Linear(3, 3), [pool()]]),
        (lambda v: setfold.fold(make(), v), [None, 1, "ab", {1: 2}, [[1.0]], [None]]),
        (lambda v: setfold.fold(make(), X, mask=v), [1, "ab", X, MASK.long(), MASK[0], [MASK]]),
    ],
    "check": [
        (lambda v: setfold.check(v), [None, 1, setfold.Pool, "Pool"]),
        (lambda v: setfold.check(nn.Linear(3, 3), dim_in=v), NO_SIZE),
        (lambda v: setfold.check(pool(), seed=v), [None, 1.5, "a", True]),
        (lambda v: setfold.check(pool(), processes=v), [None, 1, "no"]),
        (
            lambda v: setfold.check(pool(), tolerances=v),
            [1e-5, {"float32": 1e-5}, {torch.float32: "a"}, {torch.float32: -1.0}, {}],
        ),
        (lambda v: setfold.check_all(seed=v), [None, 1.5, "a", True]),
    ],
    "states": [
        (lambda v: setfold.SetState.stack(v), [[]]),
        (lambda v: make().initial_state()[v], ["a", None, 1.5]),
    ],
}


@pytest.mark.parametrize("tracked", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", CALLS)
def test_verbs_refuse_what_is_no_argument(name, tracked):
    for call, values in CALLS[name]:
        for value in values:
            with torch.set_grad_enabled(tracked), pytest.raises(setfold.InputError):
                pytest.fail(f"{name} took {value!r}: {call(value)}")


def test_valid_numbers_of_sets_are_taken():
    expected = make()(X)
    assert_close(make()(X, batch_size=2), expected, **TIGHT)
    assert_close(make()(X[:1], batch_size=1), expected[:1], **TIGHT)
    assert_close(setfold.fold(make(), [X], batch_size=2), expected, **TIGHT)
    assert len(make().initial_state(0)) == 0


# ---- tensors of every kind ---------------------------------------------------------------------


def negated(tensor):
    """The same numbers as a tensor whose negative bit is set."""
    found = torch.imag(torch.conj(torch.complex(tensor, -tensor)))
    assert found.is_neg()
    return found


def in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


SAME = {  # the same numbers in unusual tensors
    "negative bit": negated,
    "not contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x, x], 1)[:, x.shape[1] :],
    "view of complex": lambda x: torch.real(torch.complex(x, x)),
    "parameter": nn.Parameter,
    "inference": in_inference_mode,
    "array": lambda x: torch.from_numpy(x.numpy().copy()),
}
REFUSED = {  # and a part of the message
    "sparse": (lambda x: x.to_sparse(), r"dense.*\.to_dense\(\)"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "nested.*index"),
    "jagged": (
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "nested.*index",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        r"\.dequantize\(\)|no tensor|elements are|floating point",
    ),
    "complex": (lambda x: x + 0j, "floating point.*complex128"),
    "conjugate": (lambda x: torch.complex(x, x).conj(), "floating point.*complex128"),
    "meta": (lambda x: x.to("meta"), "on meta"),
    "integers": (lambda x: x.long(), "floating point.*int64"),
    "bools": (lambda x: x > 0, "floating point.*bool"),
    "eight bits": (lambda x: x.to(torch.float8_e4m3fn), "floating point.*float8"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), r"dense.*\.to_dense\(\)"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), r"masked tensor.*mask \(B, n\)"),
    "a number": (lambda x: torch.tensor(1.0).double(), r"must be \(|single number|got \(\)"),
}
MODELS = {
    "slots": make,
    "relative": lambda: make(aggregate="weighted_mean", attention="softmax"),
    "max": lambda: make(aggregate="max"),
    "pool": lambda: setfold.Pool(3).double(),
    "attention": lambda: setfold.AttentionPool(3, 2, 4).double(),
    "features": lambda: setfold.DeepSets(nn.Linear(3, 4), 4).double(),
    "concat": lambda: setfold.Concat([setfold.Pool(3), make()]).double().eval(),
    "places": lambda: setfold.PlacedSlotEncoder(3, setfold.Grid(-2, 2, 9)).double(),
    "places, max": lambda: setfold.PlacedSlotEncoder(
        3, setfold.Grid((-2, -2), (2, 2), (9, 9)), aggregate=["max", "variance"]
    ).double(),
    "passes": lambda: setfold.SetTransformer(3, 4).double(),
    "whole": lambda: setfold.FSPool(3).double(),
}


def uses(model, elements, sets):
    """Calls with elements (B, n, d): by name, what they return."""
    found = {"forward": lambda: model(elements)}
    if model.passes is not None:
        found["fold"] = lambda: setfold.fold(model, elements)
        found["fold chunks"] = lambda: setfold.fold(model, [elements, X[:sets, :0]])
    if isinstance(model, setfold.StreamingSetEncoder):
        state = model.initial_state(sets)
        found["update"] = lambda: model.readout(model.update(state, elements))
    return found


def masks_and_rows(model, elements):
    """The same with a mask or an index."""
    sets, length = elements.shape[:2]
    rows, index = elements.flatten(0, 1), torch.arange(sets).repeat_interleave(length)
    shown = torch.ones(sets, length, dtype=torch.bool)
    return {
        "mask": lambda: model(elements, shown),
        "expanded mask": lambda: model(elements, shown[:1, :1].expand(sets, length)),
        "index": lambda: model(rows, index=index, batch_size=sets),
        "short index": lambda: model(rows, index=index.int(), batch_size=sets),
    }


@pytest.fixture(autouse=True)
def _no_warnings_of_prototypes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("tracked", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("shape", [(1, 5, 3), (2, 5, 3), (1, 700, 3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_unusual_tensors_of_the_same_numbers_have_the_same_encoding(name, shape, tracked):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.set_grad_enabled(tracked):
        expected = model(draw(*shape))
        for kind, made in SAME.items():
            elements = made(draw(*shape))
            calls = uses(model, elements, shape[0]) | masks_and_rows(model, elements)
            for way, call in calls.items():
                assert_close(call(), expected, **TIGHT, msg=f"{kind}, {way}")
        alike = draw(*shape)[:, :1].expand(shape)  # memory of one element
        expected = model(alike.clone())
        for way, call in (uses(model, alike, shape[0]) | masks_and_rows(model, alike)).items():
            assert_close(call(), expected, **TIGHT, msg=f"expanded, {way}")


@pytest.mark.parametrize("tracked", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_that_are_not_supported_are_refused_with_advice(name, sets, tracked):
    model = MODELS[name]()
    for made, message in REFUSED.values():
        for call in uses(model, made(draw(sets, 5, 3)), sets).values():
            with torch.set_grad_enabled(tracked), pytest.raises(setfold.InputError, match=message):
                call()


@pytest.mark.parametrize("name", MODELS)
def test_masks_and_indices_that_are_not_supported_are_refused(name):
    model = MODELS[name]()
    for mask in (
        *(MASK.to_sparse(), MASK.numpy(), MASK.tolist(), MASK.long(), MASK.double(), True),
        torch.masked.masked_tensor(MASK, MASK),
        torch.nested.nested_tensor(list(MASK)),
        MASK.double().requires_grad_(),
    ):
        with pytest.raises(setfold.InputError, match="mask"):
            model(X, mask)
    for index in (
        *(INDEX.to_sparse(), INDEX.numpy(), INDEX.tolist(), INDEX.double(), INDEX > 0, 0),
        *(INDEX.to("meta"), INDEX.to(torch.uint8), INDEX[None], INDEX - 1, INDEX + 2**40),
    ):
        with pytest.raises(setfold.InputError, match="index"):
            model(X[0], index=index, batch_size=2)


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="torch has no named tensors")
def test_named_tensors_are_refused_with_advice():
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked), pytest.raises(setfold.InputError, match="rename"):
            make()(draw(2, 5, 3).refine_names("B", "n", "d"))
