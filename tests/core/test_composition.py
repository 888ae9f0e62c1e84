from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from tests.small import TIGHT, assert_same_state, draw, make

CANCELLED = ["slot_mean", "slot_deviation", "norm.weight", "norm.bias"]
CANCELLED += [f"{layer}.{kind}" for layer in ("to_query", "to_key") for kind in ("weight", "bias")]


@pytest.fixture(params=[True, False], ids=["grad", "no grad"])
def grad(request):
    with torch.set_grad_enabled(request.param):
        yield request.param


def compose(features=None, head=None, **options):
    """Features, a small encoder and a head."""
    return setfold.Composition(make(**options), features, head).double().eval()


class Conditioned(nn.Module):
    """Features of an element and its set's context of two numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(5, 3)

    def forward(self, elements, context):
        shown = context.unsqueeze(1).expand(-1, elements.shape[1], -1)
        return self.linear(torch.cat([elements, shown], -1)).tanh()


# ---- features and head ---------------------------------------------------------------------


def test_features_come_before_and_the_head_after():
    torch.manual_seed(0)
    features, head = nn.Linear(3, 3), nn.Sequential(nn.Flatten(), nn.Linear(20, 2))
    model, elements = compose(features, head), draw(2, 5, 3)
    expected = head(model.encoder(features(elements)))
    assert_close(model(elements), expected, **TIGHT)


def test_without_features_and_head_it_is_the_encoder():
    model, elements = compose(), draw(2, 5, 3)
    assert torch.equal(model(elements), model.encoder(elements))
    assert model.dim_in == 3


def test_what_is_derived_from_weights_is_kept_until_they_change(monkeypatch):
    calls, prepare = [], setfold.SeedAttention.prepare
    counted = lambda self, frame: calls.append(1) or prepare(self, frame)  # noqa: E731
    monkeypatch.setattr(setfold.SeedAttention, "prepare", counted)
    model, elements = setfold.PMA(3, num_heads=1).eval(), draw(1, 5, 3).float()
    with torch.no_grad():
        before = model(elements)
        assert torch.equal(model(elements), before)
        assert len(calls) == 1
        model.encoder.block.to_query.weight.data.add_(1.0)
        after = model(elements)
    assert len(calls) == 2
    assert not torch.equal(after, before)
    assert_close(model(elements), after)  # with a graph


def test_a_composition_may_hold_a_composition():
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    nested = setfold.Composition(compose(second, nn.Flatten()), first, nn.Tanh())
    flat = compose(nn.Sequential(first, second), nn.Sequential(nn.Flatten(), nn.Tanh()))
    elements, seen = draw(2, 5, 3), draw(2, 5) > 0
    assert_close(nested(elements, seen), flat(elements, seen), **TIGHT)


def test_elements_may_be_images(grad):
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    )
    model, images = compose(features, nn.Flatten()), draw(2, 5, 1, 8, 8)
    expected = model.encoder(torch.stack([features(image) for image in images])).flatten(1)
    assert_close(model(images), expected, **TIGHT)
    state = model.initial_state(2)
    for chunk in images.split([2, 0, 3], 1):
        state = model.update(state, chunk)
    assert_close(model.readout(state), expected, **TIGHT)
    ragged = images.transpose(0, 1).flatten(0, 1)
    found = model(ragged, index=torch.tensor([0, 1] * 5), batch_size=2)
    assert_close(found, expected, **TIGHT)
    seen = torch.tensor([[True] * 4 + [False], [True] * 5])
    assert_close(model(images, seen)[:1], model(images[:1, :4]), **TIGHT)


def test_elements_for_features_need_a_set_dimension_too():
    model = compose(nn.Linear(3, 3))
    with pytest.raises(setfold.InputError, match=r"\(1, n, \.\.\.\).*got \(5, 3\).*unsqueeze\(0\)"):
        model.update(model.initial_state(), draw(5, 3))


class Log(nn.Module):
    def forward(self, elements, context=None):
        return elements.log()  # of zero: minus infinity


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("context", [None, draw(2, 1)], ids=["no context", "context"])
def test_what_the_mask_hides_need_not_suit_the_features(context):
    model, elements = compose(Log()), draw(2, 5, 3).abs() + 0.1
    seen = torch.tensor([[True] * 3 + [False] * 2] * 2)
    expected = model(elements[:, :3], context=context)
    assert_close(model(elements, seen, context=context), expected, **TIGHT)
    found = model.update(model.initial_state(2, context=context), elements, mask=seen)
    assert_close(model.readout(found), expected, **TIGHT)


class Reshaped(nn.Module):
    def forward(self, elements):
        return elements.view(elements.shape[0], -1)  # fails without elements


@pytest.mark.usefixtures("grad")
def test_features_need_not_know_what_to_make_of_nothing(monkeypatch):
    monkeypatch.setattr("setfold.core.absorb.FEATURE_ROWS", 4)
    model, elements = compose(Reshaped()), draw(2, 6, 3, 1)
    for length in (0, 1):
        seen = torch.arange(6).expand(2, 6) < length
        state = model.update(model.initial_state(2), elements, mask=seen)
        expected = model.update(model.initial_state(2), elements[:, :length])
        assert_close(model.readout(state), model.readout(expected), **TIGHT)
        assert_close(model(elements, seen), model(elements[:, :length]), **TIGHT)


def test_a_set_that_a_large_chunk_hides_entirely(monkeypatch):
    monkeypatch.setattr("setfold.core.absorb.FEATURE_ROWS", 4)
    model = compose(Reshaped(), aggregate="max")
    elements, mask = draw(2, 9, 3, 1), torch.tensor([[True], [False]]).expand(2, 9)
    with torch.no_grad():
        state = model.initial_state(2, slots=draw(2, 4, 6, seed=1))  # so it is absorbed set by set
        updated = model.update(state, elements, mask=mask)
    assert updated.count.tolist() == [9, 0]
    assert_same_state(updated[1], state[1])


def test_batch_norm_can_be_trained_on_whole_sets():
    torch.manual_seed(0)
    model = compose(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).train()
    model(draw(2, 5, 3)).pow(2).sum().backward()
    assert model.features[0].weight.grad.abs().max() > 0
    assert int(model.features[1].num_batches_tracked) == 1


# ---- context -------------------------------------------------------------------------------


@pytest.mark.usefixtures("grad")
@pytest.mark.parametrize("sets", [4, 60], ids=["few lengths", "padded lengths"])
def test_context_reaches_the_elements_of_its_own_set(sets):
    model, context = compose(Conditioned()), draw(sets, 2, seed=1)
    elements = draw(sets, sets, 3)
    seen = torch.ones(sets, sets, dtype=torch.bool).tril()  # set i has i + 1 elements
    alone = [model(elements[i : i + 1, : i + 1], context=context[i : i + 1]) for i in range(sets)]
    expected = torch.cat(alone)
    assert (expected - model(elements, seen, context=context.flip(0))).abs().max() > 1e-3
    index = seen.nonzero()[:, 0]
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    rows, index = elements[seen][order], index[order]
    assert_close(model(elements, seen, context=context), expected, **TIGHT)
    ragged = model(rows, index=index, batch_size=sets, context=context)
    assert_close(ragged, expected, **TIGHT)
    frame = model.initial_state().frame[0]
    own = model.initial_state(sets, slots=frame.repeat(sets, 1, 1), context=context)
    assert own.has_own_slots
    assert_close(model.readout(model.update(own, elements, mask=seen)), expected, **TIGHT)
    assert_close(model.readout(model.update(own, rows, index=index)), expected, **TIGHT)


@pytest.mark.parametrize("features", [nn.Tanh(), nn.Sequential(nn.Linear(3, 3))], ids=str)
def test_features_that_take_no_context_are_not_called_with_one(features):
    model, context = compose(features.double()), draw(2, 1)
    with pytest.raises(setfold.InputError, match="do not take a context"):
        model(draw(2, 5, 3), context=context)
    with pytest.raises(setfold.InputError, match="do not take a context"):
        model.update(model.initial_state(2, context=context), draw(2, 5, 3))


def test_context_stays_with_its_set():
    model, context = compose(Conditioned()), draw(2, 2)
    state = model.update(model.initial_state(2, context=context), draw(2, 5, 3))
    again = setfold.SetState.stack([state[1], state[0]])
    assert torch.equal(again.context[0], context.flip(0))
    assert torch.equal(state.merge(state).context[0], context)


def test_states_with_different_contexts_do_not_merge():
    model = compose(Conditioned())
    one, two = (model.initial_state(context=draw(1, 2, seed=i)) for i in range(2))
    for other in (two, model.initial_state()):
        with pytest.raises(setfold.StateMismatchError, match=r"different contexts.*earlier pass"):
            one.merge(other)
    assert len(one.merge(model.initial_state(context=draw(1, 2)))) == 1


def test_gradients_reach_the_context():
    model, context = compose(Conditioned()), draw(2, 2).requires_grad_()
    state = model.initial_state(2, context=context)
    for chunk in draw(2, 6, 3).split(2, 1):
        state = model.update(state, chunk)
    (found,) = torch.autograd.grad(model.readout(state).pow(2).sum(), context)
    (expected,) = torch.autograd.grad(model(draw(2, 6, 3), context=context).pow(2).sum(), context)
    assert expected.abs().max() > 1e-6
    assert_close(found, expected, **TIGHT)


# ---- slots that are added up ---------------------------------------------------------------


def gradients(model):
    """The largest gradient of each weight of the encoder, after a non-linear loss."""
    model(draw(2, 7, 3)).sin().pow(2).sum().backward()
    return {name: float(p.grad.abs().max()) for name, p in model.encoder.named_parameters()}


@pytest.mark.filterwarnings("ignore::setfold.CancelledAttentionWarning")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("aggregate", ["sum", "mean", ["mean", "mass"]], ids=str)
def test_attention_cancels_where_slots_are_added_up(aggregate, reduce):
    found = gradients(compose(head=setfold.SlotPool(reduce), aggregate=aggregate))
    assert max(found[name] for name in CANCELLED) < 1e-12
    assert found["to_value.weight"] > 1e-3


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_attention_does_not_cancel_where_slots_stay_apart(aggregate):
    found = gradients(compose(head=nn.Flatten(), aggregate=aggregate))
    assert (
        min(found[name] for name in ("slot_deviation", "to_query.weight", "to_key.weight")) > 1e-5
    )


@pytest.mark.parametrize("aggregate", ["weighted_mean", "max", "min", ["mean", "max"]], ids=str)
def test_attention_does_not_cancel_in_other_aggregates(aggregate):
    found = gradients(compose(head=setfold.SlotPool(), aggregate=aggregate))
    assert (
        min(found[name] for name in ("slot_deviation", "to_query.weight", "to_key.weight")) > 1e-5
    )


@pytest.mark.filterwarnings("ignore::setfold.CancelledAttentionWarning")
def test_what_is_left_is_a_plain_mean():
    model, elements = compose(head=setfold.SlotPool("sum")), draw(2, 7, 3)
    assert_close(model(elements), model.encoder.to_value(elements).mean(1), **TIGHT)


HEADS = {
    "alone": setfold.SlotPool,
    "first": lambda: nn.Sequential(setfold.SlotPool("sum"), nn.Linear(5, 2)),
    "nested": lambda: nn.Sequential(nn.Sequential(setfold.SlotPool()), nn.ReLU()),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("aggregate", ["sum", "mean", ["sum", "mean"], ["mean", "mass"]], ids=str)
def test_a_composition_that_cancels_warns(aggregate, head):
    with pytest.warns(setfold.CancelledAttentionWarning, match="nn.Flatten") as caught:
        setfold.Composition(make(aggregate=aggregate), head=head())
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("aggregate", "head"),
    [
        ("weighted_mean", setfold.SlotPool),
        ("max", setfold.SlotPool),
        ("min", setfold.SlotPool),
        (["mean", "max"], setfold.SlotPool),
        ("mean", nn.Flatten),
        ("mean", lambda: nn.Sequential(nn.Tanh(), setfold.SlotPool())),
        ("mean", lambda: None),
    ],
    ids=["weighted_mean", "max", "min", "mean+max", "apart", "not first", "no head"],
)
def test_a_composition_that_does_not_cancel_is_silent(aggregate, head):
    setfold.Composition(make(aggregate=aggregate), head=head())  # a warning would be an error


def test_one_slot_warns():
    with pytest.warns(setfold.CancelledAttentionWarning, match="one slot") as caught:
        setfold.SlotSetEncoder(3, 1, 6, 5)
    assert caught[0].filename == __file__


def test_slot_pool_adds_up_or_averages_slots():
    encoding = draw(2, 4, 3)
    assert_close(setfold.SlotPool("sum")(encoding), encoding.sum(1), **TIGHT)
    assert_close(setfold.SlotPool()(encoding), encoding.mean(1), **TIGHT)
    with pytest.raises(setfold.InputError, match="'mean', 'sum'; got 'max'"):
        setfold.SlotPool("max")


# ---- memory --------------------------------------------------------------------------------


@pytest.fixture
def seen_rows(monkeypatch):
    """The number of elements in every call of the features, with room for ten at a time."""
    monkeypatch.setattr("setfold.core.absorb.FEATURE_ROWS", 10)
    return []


def watched(features, seen_rows):
    def note(module, given, found):
        seen_rows.append(found.numel() // 3)

    features.register_forward_hook(note)
    return features


@pytest.mark.parametrize("way", ["dense", "masked", "context", "ragged", "forward"])
def test_without_a_graph_elements_go_through_features_in_pieces(seen_rows, way):
    torch.manual_seed(0)
    features = Conditioned() if way == "context" else nn.Linear(3, 3)
    model, elements = compose(watched(features, seen_rows)), draw(2, 23, 3)
    start = {"context": draw(2, 2)} if way == "context" else {}
    given = {"elements": elements}
    if way == "masked":
        given["mask"] = draw(2, 23) > 0
    if way == "ragged":
        given = {"elements": elements.flatten(0, 1), "index": torch.arange(46) % 2}
    if way == "forward":
        expected = model(elements)
    else:
        expected = model.readout(model.update(model.initial_state(2, **start), **given))
    present = int(given["mask"].sum()) if way == "masked" else 46
    assert seen_rows == [present]
    seen_rows.clear()
    with torch.no_grad():
        if way == "forward":
            found = model(elements)
        else:
            found = model.readout(model.update(model.initial_state(2, **start), **given))
    assert sum(seen_rows) == present
    assert max(seen_rows) <= 10
    assert_close(found, expected, **TIGHT)


# ---- weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoder",
    [
        setfold.GatedAttentionPool(4, 5, num_branches=2),
        setfold.AttentionPool(4, 2, 6, num_heads=3),
        setfold.PMA(4, 2, 2),
    ],
    ids=lambda encoder: type(encoder).__name__,
)
def test_weights_of_a_composition_are_those_of_its_features(encoder):
    model = setfold.Composition(encoder, nn.Linear(3, 4), nn.Flatten()).double()
    elements = draw(2, 30, 3)
    state = model.initial_state(2)
    for chunk in elements.split(7, 1):
        state = model.update(state, chunk)
    weights = torch.cat([model.weights(state, chunk) for chunk in elements.split(11, 1)], 1)
    assert_close(weights.sum(1), torch.ones(2, 2, dtype=torch.float64), **TIGHT)
    features = model.features(elements)
    alone = encoder.double()
    expected = alone.weights(alone.update(alone.initial_state(2), features), features)
    assert_close(weights, expected, **TIGHT)


def test_weights_are_what_the_readout_is_made_of():
    encoder, elements = setfold.GatedAttentionPool(3, 5).double(), draw(2, 30, 3)
    state = encoder.update(encoder.initial_state(2), elements)
    expected = encoder.weights(state, elements).mT @ elements
    assert_close(encoder.readout(state), expected, **TIGHT)


def test_an_encoder_without_weights_says_so():
    pool = setfold.Pool(3)
    with pytest.raises(setfold.InputError, match="Pool has no weights"):
        pool.weights(pool.initial_state(), draw(1, 2, 3).float())
