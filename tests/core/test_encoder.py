from __future__ import annotations

import copy
import gc
import re
import weakref
from types import MethodType

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from tests.small import AGGREGATES, TIGHT, assert_same_state, draw, make

SETS = torch.tensor([1, 0, 1, 1, 0])
SEEN = torch.tensor([[True, True, False, True, False], [False, True, True, False, False]])


@pytest.fixture(params=[True, False], ids=["grad", "no grad"])
def grad(request):
    with torch.set_grad_enabled(request.param):
        yield request.param


@pytest.fixture(params=["update", "remove"])
def verb(request):
    return request.param


def models():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(6, 2)
    cosine = {"similarity": "cosine", "aggregate": ["mean", "max"]}
    found = {
        "slot set": make(),
        "cosine": make(**cosine),
        "learned": make(slots="learned", attention="softmax", aggregate="weighted_mean"),
        "hierarchy": setfold.HierarchicalSlotSetEncoder(
            [make(), setfold.SlotSetEncoder(5, 2, 6, 3, **cosine)]
        ),
        "pool": setfold.Pool(3, ["sum", "max"]),
        "deep sets": setfold.DeepSets(features, 3, ["mean", "min"], head),
        "composition": setfold.Composition(make(), features, nn.Flatten()),
    }
    return {name: model.double().eval() for name, model in found.items()}


# ---- forward -------------------------------------------------------------------------------


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("name", models())
def test_forward_is_initial_state_update_and_readout(name):
    model, elements = models()[name], draw(2, 5, 3)
    state = model.update(model.initial_state(2), elements)
    assert_close(model(elements), model.readout(state), **TIGHT)
    state = model.update(model.initial_state(2), elements, mask=SEEN)
    assert_close(model(elements, SEEN), model.readout(state), **TIGHT)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("index", [SETS, SETS.int()], ids=["int64", "int32"])
@pytest.mark.parametrize("name", models())
def test_ragged_forward_is_each_set_alone(name, index):
    model, elements = models()[name], draw(5, 3)
    together = model(elements, index=index, batch_size=3)
    for number in range(3):
        alone = model(elements[index == number].unsqueeze(0))
        assert_close(together[number : number + 1], alone, **TIGHT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 1}, r"0\.\.0 for 1 sets; found 1"),
        ({"batch_size": 2, "mask": SEEN}, "not both"),
        ({"batch_size": 2, "context": draw(3, 4)}, r"context must be \(2, ...\)"),
    ],
    ids=["too few", "mask", "context"],
)
def test_ragged_forward_says_what_it_expected(given, message):
    with pytest.raises(setfold.InputError, match=message):
        make()(draw(5, 3), index=SETS, **given)


@pytest.mark.parametrize("rows", [5, 2, 0])
@pytest.mark.parametrize("name", models())
def test_the_number_of_sets_defaults_to_the_largest_index_plus_one(name, rows):
    model, elements, index = models()[name], draw(5, 3)[:rows], SETS[:rows]
    sets = int(index.max()) + 1 if rows else 0
    assert_close(model(elements, index=index), model(elements, index=index, batch_size=sets))


def test_a_negative_index_is_refused():
    with pytest.raises(setfold.InputError, match="found -1"):
        make()(draw(2, 3), index=torch.tensor([0, -1]))


def test_forward_wants_one_context_for_each_set():
    with pytest.raises(setfold.InputError, match=r"context must be \(2, ...\)"):
        make()(draw(2, 5, 3), context=draw(3, 4))


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        (draw(5, 3), r"\(B, n, 3\); got \(5, 3\).*unsqueeze\(0\)"),
        (draw(3), r"got \(3,\)"),
        (torch.tensor(1.0), r"got \(\)"),
        (draw(2, 5, 3).numpy(), "tensor; got ndarray"),
        ([[[1.0, 2.0, 3.0]]], "tensor; got list"),
    ],
    ids=["2-d", "1-d", "0-d", "numpy", "list"],
)
def test_forward_says_what_it_expected(elements, message):
    with pytest.raises(setfold.InputError, match=message):
        make()(elements)


# ---- bad input -----------------------------------------------------------------------------

GOOD = draw(2, 5, 3)
META = torch.device("meta")
BAD = {
    "2-d": ({"elements": draw(5, 3)}, r"\(2, n, 3\); got \(5, 3\).*unsqueeze\(0\)"),
    "4-d": ({"elements": draw(2, 5, 3, 1)}, r"\(2, n, 3\).*got \(2, 5, 3, 1\)"),
    "width": ({"elements": draw(2, 5, 4)}, r"\(2, n, 3\).*got \(2, 5, 4\)"),
    "empty width": ({"elements": draw(2, 5, 0)}, r"\(2, n, 3\).*got \(2, 5, 0\)"),
    "sets": ({"elements": draw(3, 5, 3)}, r"got \(3, 5, 3\).*initial_state\(3\)"),
    "float32": ({"elements": GOOD.float()}, r"torch.float32.*cast.*\.to\(torch.float64\)"),
    "empty float32": ({"elements": GOOD[:, :0].float()}, r"cast.*\.to\(torch.float64\)"),
    "integers": ({"elements": GOOD.long()}, "torch.int64"),
    "bools": ({"elements": GOOD > 0}, "torch.bool"),
    "complex": ({"elements": GOOD + 0j}, "torch.complex128"),
    "numpy": ({"elements": GOOD.numpy()}, "elements must be a tensor; got ndarray"),
    "list": ({"elements": GOOD.tolist()}, "elements must be a tensor; got list"),
    "none": ({"elements": None}, "elements must be a tensor; got NoneType"),
    "meta": ({"elements": GOOD.to(META)}, r"elements are on meta, .*cpu.*\.to\("),
    "mask dtype": ({"mask": SEEN.long()}, r"mask must be bool \(2, 5\).*got torch.int64 \(2, 5\)"),
    "mask shape": ({"mask": SEEN[:, :4]}, r"mask must be bool \(2, 5\).*got torch.bool \(2, 4\)"),
    "mask width": ({"mask": SEEN.unsqueeze(-1)}, r"got torch.bool \(2, 5, 1\)"),
    "mask meta": ({"mask": SEEN.to(META)}, "mask is on meta, elements on cpu"),
    "mask numpy": ({"mask": SEEN.numpy()}, "mask.*(tensor|ndarray)"),
    "mask list": ({"mask": SEEN.tolist()}, "mask.*(tensor|list)"),
    "index high": ({"elements": GOOD[0], "index": SETS + 1}, r"0\.\.1 for 2 sets; found 2"),
    "index low": ({"elements": GOOD[0], "index": SETS - 1}, r"0\.\.1 for 2 sets; found -1"),
    "index dtype": ({"elements": GOOD[0], "index": SETS.double()}, "int64.*got torch.float64"),
    "index short": ({"elements": GOOD[0], "index": SETS[1:]}, r"\(5,\).*got torch.int64 \(4,\)"),
    "index 2-d": ({"elements": GOOD[0], "index": SETS[None]}, r"got torch.int64 \(1, 5\)"),
    "index meta": ({"elements": GOOD[0], "index": SETS.to(META)}, "index is on meta"),
    "index list": ({"elements": GOOD[0], "index": SETS.tolist()}, "index.*(tensor|list)"),
    "index and mask": ({"elements": GOOD[0], "index": SETS, "mask": SEEN}, "not both"),
    "ragged 3-d": ({"index": SETS}, r"with an index, elements must be \(N, 3\); got \(2, 5, 3\)"),
    "ragged width": ({"elements": draw(5, 2), "index": SETS}, r"\(N, 3\); got \(5, 2\)"),
    "ragged float32": ({"elements": GOOD[0].float(), "index": SETS}, "cast"),
}


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_was_expected_and_what_came(name, verb):
    given, message = BAD[name]
    encoder = make()
    state = encoder.update(encoder.initial_state(2), GOOD)
    before = copy.deepcopy(state)
    with pytest.raises(setfold.InputError, match=message):
        getattr(encoder, verb)(state, **{"elements": GOOD, **given})
    assert_same_state(state, before)


@pytest.mark.usefixtures("grad")
def test_float64_elements_are_not_for_a_float32_encoder():
    encoder = make().float()
    with pytest.raises(setfold.InputError, match=r"float64.*float32: cast.*\.to\(torch\.float32\)"):
        encoder.update(encoder.initial_state(2), GOOD)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("state", [None, GOOD, "state"], ids=["none", "tensor", "word"])
def test_what_is_no_state_is_refused(state):
    encoder = make()
    for use in (lambda: encoder.update(state, GOOD), lambda: encoder.readout(state)):
        with pytest.raises(setfold.SetfoldError, match="state"):
            use()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": -1}, "integer of at least 0; got -1"),
        ({"num_slots": 0}, "num_slots must be .*1.*; got 0"),
        ({"slots": draw(4, 5)}, r"\(K, 6\) or \(2, K, 6\); got \(1, 4, 5\)"),
        ({"slots": draw(3, 4, 6)}, r"\(K, 6\) or \(2, K, 6\); got \(3, 4, 6\)"),
        ({"slots": [draw(4, 6), draw(4, 6)]}, "slots for 1 levels; got 2"),
        ({"slots": draw(4, 6), "num_slots": 4}, "not both"),
        ({"slots": draw(4, 6).float()}, "float32"),
        ({"slots": draw(4, 6).to(META)}, "meta"),
        ({"slots": [[0.0] * 6]}, "list"),
        ({"context": draw(3, 4)}, r"context must be \(2, ...\), one per set; got \(3, 4\)"),
        ({"context": [1.0, 2.0]}, "float"),
    ],
    ids=[
        *("batch_size", "num_slots", "width of slots", "sets of slots", "levels", "slots and K"),
        *("slots dtype", "slots device", "slots list", "context shape", "context list"),
    ],
)
def test_initial_state_says_what_it_expected(given, message):
    with pytest.raises(setfold.InputError, match=message):
        make().initial_state(**{"batch_size": 2, **given})


def test_what_has_no_slots_draws_none():
    for given in ({"num_slots": 2}, {"generator": torch.Generator()}):
        with pytest.raises(setfold.InputError, match="Pool has no slots"):
            setfold.Pool(3).initial_state(**given)
        with pytest.raises(setfold.InputError, match='slots="random"'):
            make(slots="learned").initial_state(**given)


# ---- NaN, infinity, overflow ---------------------------------------------------------------


def pool(aggregate):
    return setfold.Pool(3, aggregate).double()


POOLINGS = {f"slots, {a}": lambda a=a: make(aggregate=a) for a in AGGREGATES}
POOLINGS |= {f"pool, {a}": lambda a=a: pool(a) for a in AGGREGATES if a != "weighted_mean"}


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("build", POOLINGS.values(), ids=POOLINGS)
def test_what_is_not_finite_is_named_and_changes_nothing(build, bad):
    model, elements = build(), GOOD.clone()
    state = model.update(model.initial_state(2), GOOD)
    before = copy.deepcopy(state)
    elements[1, 2, 0] = bad
    for given, place in (
        ({"elements": elements}, "[1, 2, 0]"),
        ({"elements": elements, "mask": SEEN}, "[1, 2, 0]"),
        ({"elements": elements[1], "index": SETS}, "[2, 0]"),
        ({"elements": elements.repeat(1, 2000, 1)}, "[1, 2, 0]"),
    ):
        message = re.escape(f"elements{place} is {bad}")
        with pytest.raises(setfold.NonFiniteError, match=message):
            model.update(state, **given)
        with pytest.raises(setfold.NonFiniteError, match=message):
            model(**given, batch_size=2)
        assert_same_state(state, before)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("name", models())
def test_nan_under_the_mask_is_fine(name):
    model = models()[name]
    hidden = GOOD.masked_fill(~SEEN.unsqueeze(-1), torch.nan)
    assert_close(model(hidden, SEEN), model(GOOD, SEEN), **TIGHT)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("ragged", [False, True])
def test_an_infinity_that_the_features_hide_still_raises(ragged):
    model = setfold.Composition(setfold.Composition(make(), nn.Tanh()))
    elements = GOOD.clone()
    elements[0, 3, 1] = torch.inf
    given = {"elements": elements[0], "index": SETS} if ragged else {"elements": elements}
    with pytest.raises(setfold.NonFiniteError, match=r"3, 1\] is inf"):
        model.update(model.initial_state(2), **given)
    with pytest.raises(setfold.NonFiniteError, match=r"3, 1\] is inf"):
        model(**given, batch_size=2)


class Exponential(nn.Module):
    def forward(self, elements):
        return elements.exp()


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("aggregate", ["sum", "mean", "max"])
def test_features_that_make_an_infinity_raise(aggregate):
    model = setfold.DeepSets(Exponential(), 3, aggregate).double()
    with pytest.raises(setfold.NonFiniteError, match="feature network"):
        model.update(model.initial_state(2), 1000 * GOOD.abs())


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("build", [make, pool])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_finite_elements_whose_sum_overflows_raise(aggregate, build):
    model, huge = build(aggregate=aggregate), torch.full((1, 9, 3), 1e308, dtype=torch.float64)
    with pytest.raises(setfold.NonFiniteError, match="too large"):
        model.update(model.initial_state(), huge)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("build", [make, pool])
def test_finite_chunks_whose_sum_overflows_raise(build):
    model, huge = build(aggregate="sum"), torch.full((1, 1, 3), 1.7e308, dtype=torch.float64)
    states = [model.initial_state()]
    with pytest.raises(setfold.NonFiniteError):
        states.extend(model.update(states[-1], huge) for _ in range(20))
    assert len(states) > 1
    assert all(part.isfinite().all() for part in states[-1].statistics["sum"])


@pytest.mark.usefixtures("grad")
def test_large_elements_are_fine_for_a_maximum():
    pool, huge = setfold.Pool(3, "max").double(), torch.full((1, 9, 3), 1e308, dtype=torch.float64)
    assert pool(huge).tolist() == [[1e308] * 3]


# ---- removal -------------------------------------------------------------------------------


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("more", [draw(2, 8, 3), draw(2, 3, 3)], ids=["from both", "from one"])
def test_no_more_can_be_removed_than_there_is(more):
    encoder = make()
    state = encoder.update(encoder.initial_state(2), GOOD, mask=SEEN)  # 3 and 2 elements
    before = copy.deepcopy(state)
    with pytest.raises(setfold.InputError, match="cannot remove more elements than a set holds"):
        encoder.remove(state, more)
    assert_same_state(state, before)


def test_the_set_that_holds_too_little_is_named_with_what_would_be_left():
    encoder = make()
    state = encoder.update(encoder.initial_state(2), GOOD, mask=SEEN)
    with pytest.raises(setfold.InputError, match=r"set 0 .* -5|set 1 .* -6"):
        encoder.remove(state, draw(2, 8, 3))


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("aggregate", ["max", "min", ["mean", "max"]], ids=str)
def test_nothing_can_be_removed_from_a_maximum(aggregate):
    encoder = make(aggregate=aggregate)
    state = encoder.update(encoder.initial_state(2), GOOD)
    before = copy.deepcopy(state)
    with pytest.raises(
        setfold.NotRemovableError,
        match=r"M(ax|in) cannot remove elements: .* the next one is not .*sums and means",
    ):
        encoder.remove(state, GOOD)
    assert_same_state(state, before)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("aggregate", ["sum", "max", "min"])
def test_removing_nothing_changes_nothing(aggregate):
    encoder = make(aggregate=aggregate)
    empty = encoder.initial_state(2)
    try:
        state = encoder.remove(empty, GOOD[:, :0])
    except setfold.NotRemovableError:
        return
    expected = encoder.readout(encoder.update(empty, GOOD))
    assert_close(encoder.readout(encoder.update(state, GOOD)), expected, **TIGHT)


# ---- nothing -------------------------------------------------------------------------------


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("name", models())
def test_empty_chunks_change_nothing(name):
    model = models()[name]
    for state in (model.initial_state(2), model.update(model.initial_state(2), GOOD)):
        nobody = torch.zeros_like(SEEN)
        for after in (
            model.update(state, GOOD[:, :0]),
            model.update(state, GOOD, mask=nobody),
            model.update(state, GOOD[0, :0], index=SETS[:0]),
        ):
            assert_same_state(after, state)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("name", models())
def test_no_sets_at_all_have_an_encoding_of_no_rows(name):
    model = models()[name]
    state = model.initial_state(0)
    for after in (
        model.update(state, GOOD[:0]),
        model.update(state, GOOD[:0], mask=SEEN[:0]),
        model.update(state, GOOD[0, :0], index=SETS[:0]),
        state.merge(state),
    ):
        assert model.readout(after).shape == (0, *model(GOOD).shape[1:])


# ---- inference mode ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 5000])
@pytest.mark.parametrize("name", models())
def test_states_of_inference_mode_can_be_read_with_gradients(name, length):
    model, elements = models()[name], draw(2, length, 3)
    with torch.inference_mode():
        state = model.update(model.initial_state(2), elements)
        expected = model.readout(state).clone()
    assert_close(model.readout(state), expected, **TIGHT)


@pytest.mark.parametrize("length", [5, 5000])
@pytest.mark.parametrize("name", models())
def test_states_of_inference_mode_can_be_updated_with_gradients(name, length):
    model, elements = models()[name], draw(2, length, 3)
    with torch.inference_mode():
        state = model.update(model.initial_state(2), elements)
    more = GOOD.clone().requires_grad_()
    later = model.readout(model.update(state, more).merge(state))
    later.sum().backward()
    assert more.grad.isfinite().all()
    assert_close(later, model(torch.cat([elements, elements, GOOD], 1)), **TIGHT)


# ---- subclasses ----------------------------------------------------------------------------


def doubled(elements):
    return 2 * elements


CHANGED = {
    "featurize": lambda base: {
        "featurize": lambda self, elements, mask, context: doubled(elements),
    },
    "absorb": lambda base: {
        "absorb": lambda self, elements, mask, prepared: base.absorb(
            self, doubled(elements), mask, prepared
        ),
    },
    "finish": lambda base: {
        "finish": lambda self, statistics, count, prepared: doubled(
            base.finish(self, statistics, count, prepared)
        ),
    },
    "prepare": lambda base: {
        "prepare": lambda self, frame: base.prepare(self, tuple(map(doubled, frame))),
    },
    "draw_frame": lambda base: {
        "draw_frame": lambda self, num_slots, generator: tuple(
            map(doubled, base.draw_frame(self, num_slots, generator))
        ),
    },
}
EXTENDED = {
    "slots": (setfold.SlotSetEncoder, (3, 4, 6, 5)),
    "slots, max": (setfold.SlotSetEncoder, (3, 4, 6, 5, ["max", "weighted_mean"])),
    "few outputs": (setfold.SlotSetEncoder, (3, 4, 6, 1)),
    "pool": (setfold.Pool, (3, ["sum", "max"])),
    "moments": (setfold.Moments, (3,)),
    "attention": (setfold.AttentionPool, (3, 2, 4)),
    "gated": (setfold.GatedAttentionPool, (3, 4)),
    "seeds": (setfold.PMA, (3, 2, 1)),
}


def assert_every_way_agrees(model):
    """Forward, verbs and folds give the same."""
    index = torch.tensor([0, 0, 0, 0, 0])
    for elements in (draw(1, 5, 3), draw(2, 5, 3), draw(1, 6000, 3)):
        sets = len(elements)
        state = model.update(model.initial_state(sets), elements)
        expected = model.readout(state)
        assert_close(model(elements), expected, **TIGHT)
        mask = torch.ones(elements.shape[:2], dtype=torch.bool)
        assert_close(model(elements, mask), expected, **TIGHT)
        assert_close(setfold.fold(model, elements.split(2000, 1)), expected, **TIGHT)
        one = model(elements[0, :5], index=index, batch_size=1)
        assert_close(one, model(elements[:1, :5]), **TIGHT)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("name", EXTENDED)
def test_what_a_subclass_changes_counts_in_forward_too(name, changed):
    """Shortcuts must not go around a method that a subclass has changed."""
    base, arguments = EXTENDED[name]
    kind = type("Changed", (base,), CHANGED[changed](base))
    torch.manual_seed(0)
    assert_every_way_agrees(kind(*arguments).double().eval())


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("used", [False, True], ids=["new", "used before"])
@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("name", EXTENDED)
def test_what_an_instance_changes_counts_everywhere(name, changed, used, monkeypatch):
    """Nor may they go around a method that was replaced in one encoder."""
    base, arguments = EXTENDED[name]
    torch.manual_seed(0)
    model = base(*arguments).double().eval()
    expected = [model(draw(sets, 5, 3)) for sets in (1, 2)] if used else None
    kind = type("Changed", (base,), CHANGED[changed](base))
    torch.manual_seed(0)
    subclass = kind(*arguments).double().eval()
    with monkeypatch.context() as patch:
        ((method, function),) = CHANGED[changed](base).items()
        patch.setattr(model, method, MethodType(function, model))
        assert_every_way_agrees(model)
        for elements in (draw(1, 5, 3), draw(2, 5, 3)):
            assert_close(model(elements), subclass(elements), **TIGHT)
    if used:  # and not any more when it is put back
        assert_every_way_agrees(model)
        for sets, before in zip((1, 2), expected, strict=True):
            assert_close(model(draw(sets, 5, 3)), before, **TIGHT)


def test_shortcuts_do_not_keep_classes_alive():
    kind = type("Own", (setfold.SlotSetEncoder,), {})
    alive = weakref.ref(kind)
    with torch.no_grad():
        encoder = kind(3, 4, 6, 5).eval()
        encoder(torch.ones(1, 5, 3))
        encoder.update(encoder.initial_state(), torch.ones(1, 5, 3))
    del kind, encoder
    gc.collect()
    assert alive() is None


class Summed(setfold.Pool):
    """An encoder with a shortcut that does not look at what it returns."""

    def encode_small(self, elements, prepared):
        return elements.mean(1)


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_shortcuts_of_others_are_checked(bad, monkeypatch):
    monkeypatch.setattr(Summed, "first_weight", torch.ones(1))
    elements = torch.ones(1, 5, 3)
    assert torch.equal(Summed(3)(elements), torch.ones(1, 3))
    elements[0, 1, 2] = bad
    with pytest.raises(setfold.NonFiniteError, match=r"elements\[0, 1, 2\]"):
        Summed(3)(elements)
