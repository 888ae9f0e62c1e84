"""Concat: in every way of use it is what its parts are, side by side."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from typer.testing import CliRunner

import setfold
from setfold import cli
from tests.small import TIGHT, assert_alike, assert_compiles_and_exports, draw, gradients, moved

ROOT = Path(__file__).parents[2]
MASK = torch.tensor([[True, False, True, True, False, True, False], [False] * 6 + [True]])
INDEX = torch.tensor([0, 2, 2, 0, 0, 2, 0])


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, 5, **options)


def deep_sets():
    return setfold.DeepSets(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, ["mean", "max"])


def hierarchy():
    return setfold.HierarchicalSlotSetEncoder([slot_set(), setfold.SlotSetEncoder(5, 2, 6, 4)])


CONCATS = {
    "one": lambda: setfold.Concat([slot_set()]),
    "pools": lambda: setfold.Concat([setfold.Pool(3, "max"), setfold.Pool(3, ["sum", "mean"])]),
    "sums": lambda: setfold.Concat([slot_set(), setfold.Pool(3)]),
    "names": lambda: setfold.Concat(
        {
            "max": setfold.Pool(3, "max"),
            "slots": slot_set(aggregate="weighted_mean"),
            "softmax": setfold.AttentionPool(3, num_queries=2, dim_out=4),
            "moments": setfold.Moments(3),
        }
    ),
    "random and learned": lambda: setfold.Concat(
        [slot_set(slots="learned"), setfold.Pool(3), slot_set(aggregate=["max", "mean"])]
    ),
    "features": lambda: setfold.Concat(
        {
            "deep": deep_sets(),
            "raw": setfold.Pool(3, "min"),
            "composed": setfold.Composition(slot_set(4), nn.Linear(3, 4), nn.Flatten()),
        }
    ),
    "nested": lambda: setfold.Concat(
        {
            "inner": setfold.Concat({"a": slot_set(), "b": setfold.Concat([setfold.Pool(3)])}),
            "outer": setfold.PMA(3, 2, 1),
        }
    ),
    "hierarchy": lambda: setfold.Concat([hierarchy(), slot_set()]),
    "gated": lambda: setfold.Concat(
        [setfold.GatedAttentionPool(3, 4, 2), setfold.SeedAttention(3, 2, 1)]
    ),
}


def built(name):
    torch.manual_seed(0)
    return moved(CONCATS[name]())


@pytest.fixture(params=CONCATS)
def concat(request):
    return built(request.param)


def alone(concat, state, **given):
    """The readout of each part, which is given the same elements and its own slots."""
    found, frame = {}, list(state.frame)
    for name, part in concat.parts.items():
        own = [frame.pop(0) for _ in part.slot_dims]
        empty = part.initial_state(len(state), **({"slots": own} if own else {}))
        found[name] = part.readout(part.update(empty, **given))
    assert not frame
    return found


def together(readouts):
    return torch.cat([readout.flatten(1) for readout in readouts.values()], 1)


# ---- the encoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("form", ["dense", "masked", "ragged", "large"])
def test_the_encoding_is_that_of_each_part(concat, form, grad):
    given = {
        "dense": {"elements": draw(2, 7, 3)},
        "masked": {"elements": draw(2, 7, 3), "mask": MASK},
        "ragged": {"elements": draw(7, 3), "index": INDEX},
        "large": {"elements": draw(2, 6000, 3)},
    }[form]
    sets = 3 if form == "ragged" else 2
    with torch.set_grad_enabled(grad):
        empty = concat.initial_state(sets)
        expected = alone(concat, empty, **given)
        state = concat.update(empty, **given)
        found = concat.readouts(state)
        assert list(found) == list(concat.parts)
        for name, readout in found.items():
            assert_close(readout, expected[name], **TIGHT)
        assert_close(concat.readout(state), together(expected), **TIGHT)
        assert_close(concat(**given, batch_size=sets), together(expected), **TIGHT)
        assert concat.readout(state).shape == (sets, concat.dim_readout)


def test_parts_that_are_alone_have_the_same_slots_in_evaluation_mode(concat):
    elements = draw(2, 7, 3)
    expected = [part(elements).flatten(1) for part in concat.parts.values()]
    assert_close(concat(elements), torch.cat(expected, 1), **TIGHT)


def test_a_list_names_its_parts_by_number():
    parts = [setfold.Pool(3), slot_set()]
    concat = setfold.Concat(parts)
    assert list(concat.parts) == ["0", "1"]
    assert list(concat.parts.values()) == parts
    assert list(concat.initial_state().fields) == ["0/sum", "1/sum"]


def test_a_dict_keeps_its_names_and_its_order():
    concat = built("names")
    assert list(concat.parts) == ["max", "slots", "softmax", "moments"]
    fields = list(concat.initial_state().fields)
    assert fields == ["max/max", "slots/sum", "softmax/softmax", "moments/moments"]


def test_module_lists_and_dicts_are_taken():
    parts = [setfold.Pool(3), setfold.Pool(3, "max")]
    expected = setfold.Concat(parts)(draw(1, 4, 3).float())
    assert torch.equal(setfold.Concat(nn.ModuleList(parts))(draw(1, 4, 3).float()), expected)
    named = nn.ModuleDict({"a": parts[0], "b": parts[1]})
    assert torch.equal(setfold.Concat(named)(draw(1, 4, 3).float()), expected)
    assert torch.equal(setfold.Concat(tuple(parts))(draw(1, 4, 3).float()), expected)


def test_nested_fields_have_the_names_of_all_levels():
    fields = list(built("nested").initial_state().fields)
    assert fields == ["inner/a/sum", "inner/b/0/sum", "outer/softmax"]


def test_the_width_of_the_readout():
    assert built("names").dim_readout == 3 + 4 * 5 + 2 * 4 + 2 * 3
    assert built("nested").dim_readout == 4 * 5 + 3 + 2 * 3
    before = torch.random.get_rng_state()
    assert built("random and learned").train().dim_readout == 20 + 3 + 4 * 10
    torch.random.set_rng_state(before)
    concat = built("random and learned").train()
    before = torch.random.get_rng_state()
    assert concat.dim_readout == 63
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_empty_set_is_zeros(concat):
    """A part with a head may encode an empty set by other numbers; there is none here."""
    encoding = concat(draw(2, 0, 3))
    assert torch.equal(encoding, torch.zeros_like(encoding))
    assert torch.equal(concat.readout(concat.initial_state(2)), encoding)


def test_a_part_may_be_used_twice():
    pool = setfold.Pool(3, "max")
    concat = setfold.Concat([pool, pool])
    elements = draw(2, 5, 3).float()
    assert torch.equal(concat(elements), pool(elements).repeat(1, 2))
    assert len(concat.initial_state().fields) == 2


@pytest.mark.parametrize("name", ["names", "nested", "features"])
def test_it_compiles_and_exports(name):
    assert_compiles_and_exports(built(name))


def test_all_laws_hold():
    for name in ("sums", "names", "nested", "features"):
        torch.manual_seed(0)
        options = {"processes": name == "names", "tolerances": {torch.float64: 1e-12}}
        report = setfold.check(CONCATS[name]().eval(), dim_in=3, **options)
        assert report.passed, report


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "masked", "ragged"])
@pytest.mark.parametrize("gradient", ["exact", "unbiased", "autograd"])
def test_gradients_of_a_fold_are_those_of_the_parts(concat, gradient, form):
    elements = draw(2, 7, 3) if form != "ragged" else draw(7, 3)
    elements.requires_grad_()
    wanted = [elements, *concat.parameters()]
    cuts, axis = [3, 0, 4], 0 if form == "ragged" else 1
    chunks, options = list(elements.split(cuts, axis)), {}
    given = {"elements": elements}
    if form == "masked":
        given["mask"] = MASK
        chunks = list(zip(chunks, MASK.split(cuts, 1), strict=True))
    if form == "ragged":
        given["index"] = INDEX
        chunks = list(zip(chunks, INDEX.split(cuts), strict=True))
        options = {"batch_size": 3}
    expected = together(alone(concat, concat.initial_state(3 if options else 2), **given))
    found = setfold.fold(concat, chunks, gradient=gradient, samples=3, **options)
    assert_alike([found], [expected])
    assert_alike(gradients(found, wanted), gradients(expected, wanted))


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "autograd"])
def test_a_replay_of_ragged_chunks_drops_the_same_features(gradient):
    layer = nn.Linear(3, 5)
    with torch.no_grad():
        layer.weight.zero_()
    deep = setfold.DeepSets(nn.Sequential(layer, nn.Dropout(0.5)), 5, "sum")
    concat = setfold.Concat([setfold.Pool(3, "max"), deep]).train()
    index = INDEX.repeat(10)
    chunks = [(draw(70, 3).float(), index), (draw(70, 3).float(), index)]
    found = setfold.fold(concat, chunks, batch_size=3, gradient=gradient, samples=2)[0, 3:]
    (kept,) = torch.autograd.grad(found.sum(), layer.bias)
    assert_close(kept * layer.bias, found)  # linear in the bias


def test_features_of_ragged_chunks_are_computed_once():
    rows = []
    features = nn.Tanh()
    features.register_forward_hook(lambda module, given, found: rows.append(len(found)))
    parts = [setfold.DeepSets(features, 3, "max"), setfold.AttentionPool(3, 2, 4)]
    with torch.no_grad():
        setfold.Concat(parts)(draw(7, 3).float(), index=INDEX, batch_size=3)
    assert sum(rows) == 7


def test_exact_gradients_of_large_chunks_are_those_of_the_parts(concat):
    elements = draw(1, 10_000, 3)
    wanted = list(concat.parameters())
    expected = together({n: p(elements) for n, p in concat.parts.items()})
    found = setfold.fold(concat, elements.split(5000, 1))
    if wanted:
        assert_alike(gradients(found, wanted), gradients(expected, wanted))


def test_each_part_gets_the_gradient_of_its_own_columns():
    concat, elements = built("names"), draw(2, 9, 3)
    encoding = setfold.fold(concat, elements.split(4, 1))
    start = concat.parts["max"].dim_readout
    encoding[:, start : start + 20].square().sum().backward()
    used = {name for name, p in concat.named_parameters() if p.grad is not None and p.grad.any()}
    assert used
    assert all(name.startswith("encoders.slots.") for name in used)


# ---- removal -------------------------------------------------------------------------------------


def test_elements_can_be_removed_if_all_parts_can():
    concat, elements = built("sums"), draw(2, 7, 3)
    whole = concat.update(concat.initial_state(2), elements)
    left = concat.remove(whole, elements[:, 4:])
    expected = concat.update(concat.initial_state(2), elements[:, :4])
    assert_close(concat.readout(left), concat.readout(expected), **TIGHT)
    nothing = concat.remove(left, elements[:, :4])
    assert torch.equal(concat.readout(nothing), concat.readout(concat.initial_state(2)))


@pytest.mark.parametrize("name", ["pools", "names", "nested", "features"])
def test_elements_cannot_be_removed_if_one_part_cannot(name):
    concat, elements = built(name), draw(2, 7, 3)
    state = concat.update(concat.initial_state(2), elements)
    before = copy.deepcopy(state)
    with pytest.raises(setfold.NotRemovableError, match=r"(Max|Softmax) cannot remove elements"):
        concat.remove(state, elements[:, 4:])
    assert_close(concat.readout(state), concat.readout(before), rtol=0, atol=0)


# ---- states and files ----------------------------------------------------------------------------


def test_states_merge(concat):
    elements = draw(2, 7, 3)
    left, right = (concat.update(concat.initial_state(2), e) for e in elements.split([3, 4], 1))
    for merged in (left.merge(right), right.merge(left)):
        assert merged.count.tolist() == [7, 7]
        assert_close(concat.readout(merged), concat(elements), **TIGHT)
    assert_close(concat.readout(concat.update(left, elements[:, 3:])), concat(elements), **TIGHT)


@pytest.mark.parametrize("training", [False, True])
def test_states_are_sliced_and_stacked(concat, training):
    concat.train(training)
    elements = draw(3, 7, 3)
    states = [concat.update(concat.initial_state(), e.unsqueeze(0)) for e in elements]
    stacked = setfold.SetState.stack(states)
    expected = torch.cat([concat.readout(state) for state in states])
    assert_close(concat.readout(stacked), expected, **TIGHT)
    assert_close(concat.readout(stacked[1]), expected[1:2], **TIGHT)
    assert_close(concat.readout(stacked[::2]), expected[::2], **TIGHT)
    more = draw(3, 4, 3, seed=1)
    later = [concat.update(s, m.unsqueeze(0)) for s, m in zip(states, more, strict=True)]
    expected = torch.cat([concat.readout(state) for state in later])
    assert_close(concat.readout(concat.update(stacked, more)), expected, **TIGHT)


def test_states_are_saved_loaded_and_pickled(concat, tmp_path):
    elements = draw(2, 7, 3)
    left, right = (concat.update(concat.initial_state(2), e) for e in elements.split([3, 4], 1))
    left.save(tmp_path / "left")
    for again in (
        setfold.SetState.load(tmp_path / "left"),
        pickle.loads(pickle.dumps(left)),
        copy.deepcopy(left),
        left.detach(),
    ):
        assert again.fields == left.fields
        assert again.statistics.keys() == left.statistics.keys()
        for name, parts in left.statistics.items():
            assert all(map(torch.equal, again.statistics[name], parts))
        assert_close(concat.readout(again), concat.readout(left), **TIGHT)
        assert_close(concat.readout(again.merge(right)), concat(elements), **TIGHT)


def test_models_are_saved_and_loaded(concat, tmp_path):
    elements = draw(2, 7, 3)
    state = concat.update(concat.initial_state(2), elements)
    setfold.save(concat, tmp_path / "model")
    loaded = setfold.load(tmp_path / "model")
    assert list(loaded.parts) == list(concat.parts)
    assert list(map(type, loaded.modules())) == list(map(type, concat.modules()))
    assert torch.equal(loaded(elements), concat(elements))
    assert torch.equal(loaded.readout(state), concat.readout(state))


def test_a_state_of_a_part_or_of_other_names_is_not_one_of_the_whole():
    parts = [slot_set().double().eval(), setfold.Pool(3).double()]
    concat = setfold.Concat(parts).eval()
    other = setfold.Concat({"a": parts[0], "b": parts[1]}).eval()
    turned = setfold.Concat(parts[::-1]).eval()
    state = concat.update(concat.initial_state(), draw(1, 5, 3))
    for model in (other, turned, *parts):
        with pytest.raises(setfold.StateMismatchError):
            model.readout(state)
        with pytest.raises(setfold.StateMismatchError):
            state.merge(model.initial_state())
        with pytest.raises(setfold.StateMismatchError):
            concat.readout(model.initial_state())


# ---- slots ---------------------------------------------------------------------------------------


def test_the_frame_is_that_of_all_parts_in_order():
    concat = built("random and learned")
    frame = concat.initial_state().frame
    learned, _, random = concat.parts.values()
    assert [tuple(slots.shape) for slots in frame] == [(1, 4, 6), (1, 4, 6)]
    assert torch.equal(frame[0], learned.initial_state().frame[0])
    assert torch.equal(frame[1], random.initial_state().frame[0])
    assert [tuple(s.shape) for s in built("hierarchy").initial_state().frame] == [
        (1, 4, 6),
        (1, 2, 6),
        (1, 4, 6),
    ]


def test_num_slots_is_for_parts_that_draw():
    concat = built("random and learned")
    state = concat.initial_state(2, num_slots=7)
    assert [slots.shape[1] for slots in state.frame] == [4, 7]
    state = concat.update(state, draw(2, 5, 3))
    shapes = [tuple(r.shape) for r in concat.readouts(state).values()]
    assert shapes == [(2, 4, 5), (2, 3), (2, 7, 10)]
    assert concat.readout(state).shape == (2, 20 + 3 + 70)
    assert_close(
        concat.readout(state), together(alone(concat, state, elements=draw(2, 5, 3))), **TIGHT
    )


def test_a_generator_draws_for_one_part_after_the_other():
    concat = moved(setfold.Concat([slot_set(), setfold.Pool(3), slot_set()]))
    first, _, second = concat.parts.values()
    found = concat.initial_state(generator=torch.Generator().manual_seed(5)).frame
    generator = torch.Generator().manual_seed(5)
    expected = [part.initial_state(generator=generator).frame[0] for part in (first, second)]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(*found)


def test_slots_may_be_given():
    concat = built("random and learned")
    for slots in ((draw(4, 6), draw(2, 6)), (draw(3, 4, 6), draw(3, 5, 6)), (draw(4, 6),) * 2):
        state = concat.update(concat.initial_state(3, slots=slots), draw(3, 5, 3))
        expected = together(alone(concat, state, elements=draw(3, 5, 3)))
        assert_close(concat.readout(state), expected, **TIGHT)


def test_training_draws_new_slots_for_each_set_of_states():
    concat = built("random and learned").train()
    one, two = concat.initial_state(), concat.initial_state()
    assert torch.equal(one.frame[0], two.frame[0])  # learned
    assert not torch.equal(one.frame[1], two.frame[1])
    with pytest.raises(setfold.StateMismatchError, match="different slots"):
        one.merge(two)


def test_slots_that_differ_by_set():
    concat, elements = built("random and learned").train(), draw(3, 5, 3)
    states = [concat.initial_state() for _ in range(3)]
    state = concat.update(setfold.SetState.stack(states), elements)
    for number, begun in enumerate(states):
        one = concat.update(begun, elements[number : number + 1])
        assert_close(concat.readout(state)[number : number + 1], concat.readout(one), **TIGHT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": draw(4, 6)}, "slots for 2 levels; got 1"),
        ({"slots": (draw(4, 6),) * 3}, "slots for 2 levels; got 3"),
        ({"slots": (draw(4, 6), draw(4, 5))}, r"slots must be \(K, 6\)"),
        ({"slots": (draw(4, 6),) * 2, "num_slots": 3}, "not both"),
        ({"num_slots": 0}, "num_slots must be .*1.*; got 0"),
    ],
)
def test_bad_slots_raise(given, message):
    with pytest.raises(setfold.InputError, match=message):
        built("random and learned").initial_state(**given)


@pytest.mark.parametrize("given", [{"num_slots": 3}, {"generator": torch.Generator()}])
def test_without_random_slots_none_are_drawn(given):
    for concat in (built("pools"), setfold.Concat([slot_set(slots="learned")])):
        with pytest.raises(setfold.InputError, match="leave num_slots and generator out"):
            concat.initial_state(**given)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        ([], "at least one encoder"),
        ({}, "at least one encoder"),
        (3, "list or a dict.*got int"),
        ("ab", "list or a dict.*got str"),
        (setfold.Pool(3), "list or a dict.*got Pool"),
        ([setfold.Pool(3), nn.Linear(3, 3)], "streaming set encoders.*got Linear for '1'"),
        ({"a": setfold.Pool}, "streaming set encoders.*got .* for 'a'"),
        ([setfold.SetTransformer(3, 4)], "streaming set encoders.*got SetTransformer"),
        ([setfold.Pool(3), setfold.Pool(4)], r"dim_in|same width"),
        ({"a/b": setfold.Pool(3)}, "'a/b'"),
        ({"a.b": setfold.Pool(3)}, r"'a\.b'"),
        ({"": setfold.Pool(3)}, "''"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_arguments_raise(encoders, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.Concat(encoders)


@pytest.mark.parametrize("name", ["keys", "items", "values", "training", "type"])
def test_names_of_methods_are_names_of_parts_or_a_clear_error(name):
    try:
        concat = setfold.Concat({name: setfold.Pool(3)})
    except setfold.InputError as error:
        if name not in str(error):
            raise
        return
    assert concat(draw(1, 5, 3).float()).shape == (1, 3)


def test_a_context_raises_with_advice():
    concat = built("features")
    with pytest.raises(setfold.InputError, match=r"Composition\(Concat"):
        concat(draw(2, 5, 3), context=draw(2, 4))
    with pytest.raises(setfold.InputError, match="context"):
        built("pools")(draw(2, 5, 3), context=draw(2, 4))


def test_elements_of_another_width_raise(concat):
    with pytest.raises(setfold.InputError, match=r"got \(2, 5, 4\)"):
        concat(draw(2, 5, 4))


def test_a_part_without_weights_over_slots_has_none():
    concat = built("pools")
    with pytest.raises(setfold.InputError, match="Concat has no weights"):
        concat.weights(concat.initial_state(1), draw(1, 2, 3))


# ---- tables and processes ------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    rows, sets = draw(60, 3).float(), torch.arange(60) % 7
    columns = {"event": sets.numpy(), **{f"x{i}": rows[:, i].numpy() for i in range(3)}}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet", rows, sets


def assert_encodes(path, concat, rows, sets):
    found = pq.read_table(path)
    assert found["set"].to_pylist() == list(range(7))
    for number, encoding in enumerate(found["encoding"].to_pylist()):
        expected = concat(rows[sets == number].unsqueeze(0))[0]
        assert_close(torch.tensor(encoding), expected.detach(), rtol=2e-5, atol=2e-6)


def test_tables_are_encoded_and_states_merged(concat, table, tmp_path):
    concat = concat.float()
    path, rows, sets = table
    out, states = tmp_path / "out.parquet", tmp_path / "states.arrow"
    summary = setfold.encode_sets(concat, path, out, set="event", states=states)
    assert (summary.sets, summary.elements) == (7, 60)
    assert_encodes(out, concat, rows, sets)
    setfold.merge_states([states, states], tmp_path / "both.arrow", again=True)
    setfold.readout_states(tmp_path / "both.arrow", tmp_path / "twice.parquet")
    assert_encodes(tmp_path / "twice.parquet", concat, rows.repeat(2, 1), sets.repeat(2))


def test_the_command_encodes(table, tmp_path):
    path, rows, sets = table
    concat, out = built("names").float(), tmp_path / "out.parquet"
    setfold.save(concat, tmp_path / "model.safetensors")
    words = ["encode", tmp_path / "model.safetensors", path, "--set", "event", "--out", out]
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert_encodes(out, concat, rows, sets)
