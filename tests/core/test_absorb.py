"""Elements that are not finite raise at once, wherever they are; streams of small chunks."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.core import absorb
from setfold.core.statistic import Field, Max, Min, Sum
from tests.small import AGGREGATES, TIGHT, assert_same_state, draw, make, moved

BAD = [torch.nan, torch.inf, -torch.inf]
LARGE = (
    12_000  # elements of three numbers: more than any size for which chunks are treated as small
)


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, 5, **options)


def features():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())  # which hides infinities


# Small ones of every kind that streams; what is exported and missing here fails a test.
ENCODERS = {
    **{f"slots, {a}": lambda a=a: slot_set(aggregate=a) for a in AGGREGATES},
    "slots, softmax": lambda: slot_set(attention="softmax", aggregate=["mass", "mean"]),
    "slots, cosine": lambda: slot_set(similarity="cosine", slots="learned"),
    "few outputs": lambda: setfold.SlotSetEncoder(3, 4, 6, 1),
    "one slot": lambda: setfold.SlotSetEncoder(3, 1, 6, 5, aggregate=["mean", "max"]),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set(5)]),
    **{f"pool, {a}": lambda a=a: setfold.Pool(3, a) for a in ("sum", "max", "min")},
    "pool, all": lambda: setfold.Pool(3, ["sum", "mean", "max", "min"]),
    "moments": lambda: setfold.Moments(3),
    "covariance": lambda: setfold.Covariance(3),
    "statistics": lambda: setfold.SummaryStatistics(3),
    "deep sets": lambda: setfold.DeepSets(features(), 3, ["mean", "max"]),
    "composition": lambda: setfold.Composition(slot_set(), features(), nn.Flatten()),
    "attention": lambda: setfold.AttentionPool(3, num_queries=2, dim_out=4, num_heads=2),
    "gated attention": lambda: setfold.GatedAttentionPool(3, dim_hidden=5, num_branches=2),
    "seeds": lambda: setfold.SeedAttention(3, num_seeds=2, num_heads=3),
    "pma": lambda: setfold.PMA(3, num_seeds=2, num_heads=1),
    "latents": lambda: setfold.ConstantMemoryEncoder(3, 4, 2, 3, num_heads=2),
    "concat": lambda: setfold.Concat([setfold.Pool(3, "max"), setfold.Pool(3, "min")]),
    "places": lambda: setfold.PlacedSlotEncoder(3, setfold.Grid((-2, -2), (2, 2), (9, 9))),
    "places, several": lambda: setfold.PlacedSlotEncoder(
        3, setfold.Grid(-2, 2, 30), aggregate=["max", "min", "variance"]
    ),
    "concat, slots": lambda: setfold.Concat([setfold.Pool(3, "max"), slot_set()]),
    "concat, features": lambda: setfold.Concat([setfold.DeepSets(features(), 3, "max")]),
}


@pytest.fixture(autouse=True)
def _one_slot_may_be_used():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", setfold.CancelledAttentionWarning)
        yield


def built(name):
    torch.manual_seed(0)
    return ENCODERS[name]().double().eval()


def test_every_exported_streaming_encoder_is_here():
    exported = {getattr(setfold, name) for name in setfold.__all__}
    kinds = {
        kind
        for kind in exported
        if isinstance(kind, type)
        and issubclass(kind, setfold.StreamingSetEncoder)
        and kind is not setfold.StreamingSetEncoder
    }
    assert kinds == {type(build()) for build in ENCODERS.values()}


# ---- NaN and infinity ----------------------------------------------------------------------------


def situations(elements):
    """One chunk (2, n, d) as dense, masked and ragged; the last element of the last set is shown."""
    batch, length, width = elements.shape
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[:, ::2] = False
    mask[-1, -1] = True
    index = torch.arange(batch).repeat_interleave(length)
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    rows = elements.reshape(-1, width)[order]
    return {
        "dense": {"elements": elements},
        "masked": {"elements": elements, "mask": mask},
        "ragged": {"elements": rows, "index": index[order]},
    }


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("length", [1, 5, LARGE])
@pytest.mark.parametrize("name", ENCODERS)
def test_numbers_that_are_not_finite_raise_and_change_nothing(name, length, grad):
    encoder = built(name)
    with torch.set_grad_enabled(grad):
        state = encoder.update(encoder.initial_state(2), draw(2, 5, 3))
        before = copy.deepcopy(state)
        for bad in BAD:
            for column in range(3):
                elements = draw(2, length, 3, seed=1)
                elements[-1, -1, column] = bad
                for given in situations(elements).values():
                    with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                        encoder.update(state, **given)
                    with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                        encoder(**given, batch_size=2)
                with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                    encoder(elements[-1:])  # one set alone
                with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                    setfold.fold(encoder, [draw(2, 2, 3), elements])
                assert_same_state(state, before)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("length", [5, LARGE])
def test_elements_that_are_removed_must_be_finite_too(length, bad):
    encoder = built("slots, mean")
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(2), draw(2, length, 3))
    before = copy.deepcopy(state)
    elements = draw(2, length, 3)
    elements[1, 2, 1] = bad
    with pytest.raises(setfold.NonFiniteError, match=r"elements\[1, 2, 1\]"):
        encoder.remove(state, elements)
    assert_same_state(state, before)


class SumAndMax(setfold.StreamingSetEncoder):
    """A sum of column 0 and a maximum of column 1: neither shows everything."""

    def __init__(self, extremum):
        super().__init__()
        self.dim_in = 2
        self.extremum = extremum
        self.register_buffer("like", torch.empty(0))

    def fields(self, frame):
        return {"sum": Field(Sum(), (1,)), "extremum": Field(self.extremum, (1,))}

    def absorb(self, elements, mask, prepared):
        return {
            "sum": Sum().absorb(elements[..., :1], mask),
            "extremum": self.extremum.absorb(elements[..., 1:], mask),
        }

    def finish(self, statistics, count, prepared):
        ((total,), (extremum,)) = statistics["sum"], statistics["extremum"]
        if isinstance(count, torch.Tensor):
            extremum = extremum.masked_fill((count == 0).unsqueeze(1), 0)
        return torch.cat([total, extremum], 1).to(self.like.dtype)


@pytest.mark.parametrize("length", [1, 7, 40_000])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("extremum", [Max(), Min()], ids=str)
def test_what_a_maximum_of_one_column_hides_raises(extremum, bad, length):
    encoder = SumAndMax(extremum).double()
    state = encoder.update(encoder.initial_state(2), draw(2, 3, 2))
    before = copy.deepcopy(state)
    for column in range(2):
        elements = draw(2, length, 2)
        elements[1, -1, column] = bad
        for given in situations(elements).values():
            for _ in range(2):  # the encoder is probed once
                with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                    encoder.update(state, **given)
                with pytest.raises(setfold.NonFiniteError, match=f"is {bad}"):
                    encoder(**given, batch_size=2)
    assert_same_state(state, before)


@pytest.mark.parametrize("extremum", [Max(), Min()], ids=str)
def test_an_encoder_with_a_maximum_of_one_column_obeys_all_laws(extremum):
    assert setfold.check(SumAndMax(extremum), processes=False).passed


class IgnoresAColumn(setfold.Pool):
    """A sum of all columns but the last."""

    def absorb(self, elements, mask, prepared):
        return super().absorb(elements * torch.tensor([1.0, 1.0, 0.0]), mask, prepared)


class DropsAColumn(setfold.Pool):
    def absorb(self, elements, mask, prepared):
        shown = torch.cat([elements[..., :2], elements[..., :1]], -1)
        return super().absorb(shown, mask, prepared)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [IgnoresAColumn, DropsAColumn])
@pytest.mark.parametrize("length", [5, 40_000])
def test_a_column_that_is_not_used_raises_too(kind, bad, length):
    encoder, elements = kind(3, "sum"), torch.ones(1, length, 3)
    elements[0, -1, 2] = bad
    with pytest.raises(setfold.NonFiniteError, match=r", 2\] is"):
        encoder.update(encoder.initial_state(), elements)
    with pytest.raises(setfold.NonFiniteError, match=r", 2\] is"):
        encoder(elements)


class OneNumber(setfold.StreamingSetEncoder):
    """The sum of all numbers: a field without dimensions."""

    dim_in = 2

    def fields(self, frame):
        return {"sum": Field(Sum(), ())}

    def absorb(self, elements, mask, prepared):
        return {"sum": Sum().absorb(elements.sum(-1), mask)}

    def finish(self, statistics, count, prepared):
        return statistics["sum"][0]


@pytest.mark.parametrize("length", [7, 40_000])
def test_a_field_may_be_one_number(length):
    encoder, elements = OneNumber(), draw(2, length, 2)
    assert_close(encoder(elements), elements.sum((1, 2)), **TIGHT)
    state = encoder.update(encoder.initial_state(2), elements)
    assert_close(encoder.readout(state), elements.sum((1, 2)), **TIGHT)
    elements[1, 2, 1] = torch.nan
    with pytest.raises(setfold.NonFiniteError, match=r"elements\[1, 2, 1\]"):
        encoder(elements)


class Logarithm(nn.Module):
    def forward(self, elements):
        return elements.log()


@pytest.mark.parametrize("aggregate", ["max", "min", "mean"])
@pytest.mark.parametrize("row", [0, 69_999])
def test_nan_of_features_is_noticed_in_every_piece_of_a_large_chunk(aggregate, row):
    pool = setfold.Pool(3, aggregate)
    model = setfold.Composition(pool, features=Logarithm()).eval()
    elements = 1 + torch.rand(1, 70_000, 3)
    elements[0, row, 1] = -1
    with torch.no_grad(), pytest.raises(setfold.NonFiniteError, match="the field"):
        model(elements)


PROBED = {
    "slots, mean": True,
    "slots, weighted_mean": True,
    "pool, sum": True,
    "moments": True,
    "pool, max": False,
    "pool, min": False,
    "deep sets": False,
    "composition": False,
    "concat, features": False,
}


@pytest.mark.parametrize("name", PROBED)
def test_probing_finds_what_statistics_show(name):
    encoder = built(name)
    frame = encoder.initial_state().frame
    for _ in range(2):
        assert absorb.shows_non_finite(encoder, frame) is PROBED[name]


@pytest.mark.parametrize("name", ENCODERS)
def test_probing_is_right(name):
    """If it is said that nothing hides, then statistics show every number that is not finite."""
    encoder = built(name)
    frame = encoder.initial_state().frame
    if not absorb.shows_non_finite(encoder, frame):
        return
    prepared, fields = encoder.prepare(frame), encoder.fields(frame)
    for bad in BAD:
        for column in range(3):
            for scale in (1e-3, 1.0, 1e3):
                elements = scale * draw(1, 3, 3)
                elements[0, 1, column] = bad
                found = encoder.absorb(elements, None, prepared)
                assert absorb.find_non_finite(fields, found).tolist() == [True]


def test_probing_leaves_random_numbers_and_modes_alone():
    encoder = built("slots, mean").train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    frame = tuple(torch.zeros(1, 4, 6).double() for _ in range(1))
    absorb.shows_non_finite(encoder, frame)
    assert torch.equal(torch.rand(3), expected)
    assert encoder.training


def test_wide_elements_are_checked_without_probing():
    width = absorb.PROBED_COLUMNS + 1
    pool = setfold.Pool(width, "sum")
    assert not absorb.shows_non_finite(pool, ())
    elements = torch.zeros(1, 40, width)
    elements[0, 3, width - 1] = torch.nan
    with pytest.raises(setfold.NonFiniteError, match=rf"elements\[0, 3, {width - 1}\] is nan"):
        pool(elements)


# ---- long streams of small chunks ------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_a_long_stream_of_single_elements_is_the_whole_set(name):
    encoder, elements = built(name), draw(2, 400, 3)
    with torch.no_grad():
        state = encoder.initial_state(2)
        for element in elements.split(1, 1):
            state = encoder.update(state, element)
        assert_close(encoder.readout(state), encoder(elements), **TIGHT)
    assert state.count.tolist() == [400, 400]


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_caller_may_overwrite_its_chunk(name, length):
    encoder, chunk = built(name), draw(2, length, 3)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(2), chunk)
        expected = copy.deepcopy(state)
        chunk.fill_(7)
        assert_same_state(state, expected)
        assert_close(encoder.readout(state), encoder(draw(2, length, 3)), **TIGHT)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_state_stays_as_it_was_when_it_is_updated(name):
    encoder = built(name)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(1), draw(1, 4, 3))
        before = copy.deepcopy(state)
        encoder.update(state, draw(1, 2, 3))
        encoder.update(state, draw(1, 2, 3), mask=torch.ones(1, 2, dtype=torch.bool))
        encoder.update(state, draw(2, 3), index=torch.zeros(2, dtype=torch.long))
    assert_same_state(state, before)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
@pytest.mark.parametrize("dim_out", [1, 5])
def test_weights_that_change_later_do_not_change_a_state(aggregate, similarity, dim_out):
    torch.manual_seed(0)
    options = {"similarity": similarity, "dim_key": 5}
    encoder = setfold.SlotSetEncoder(3, 4, 6, dim_out, aggregate, **options).double()
    with torch.no_grad():
        state = encoder.eval().update(encoder.initial_state(), draw(1, 3, 3))
    before = copy.deepcopy(state)
    for parameter in encoder.parameters():
        parameter.data.add_(1).mul_(-2)
    assert_same_state(state, before)


def test_huge_numbers_do_not_spoil_a_state():
    encoder = make().float()
    huge = torch.full((1, 2, 3), 1e35)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(), draw(1, 3, 3).float())
        state = encoder.update(state, huge)
        total = state.statistics["sum"][0].sum(1)[0]  # over slots, weights sum to 1
    expected = torch.tensor([2e35, 2e35, 2e35, 5.0]).double()
    assert_close(total, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_do_not_overflow(dtype):
    pool = setfold.Pool(3, "mean").to(dtype)
    with torch.no_grad():
        state = pool.initial_state()
        for _ in range(300):
            state = pool.update(state, torch.full((1, 1, 3), 1024.0, dtype=dtype))
        assert_close(pool.readout(state), torch.full((1, 3), 1024.0, dtype=dtype))


def test_slot_sums_in_half_precision_do_not_overflow():
    encoder = make(aggregate="mean").half()
    with torch.no_grad():
        state = encoder.initial_state()
        for _ in range(300):
            state = encoder.update(state, torch.full((1, 1, 3), 1024.0, dtype=torch.float16))
        assert state.statistics["sum"][0].isfinite().all()


def test_threads_may_use_one_state():
    encoder, chunks = make(aggregate=["mean", "max"]), draw(8, 1, 3, 3)
    with torch.no_grad():
        begun = encoder.initial_state()
    found = [None] * len(chunks)

    @torch.no_grad()
    def work(number):
        state = begun
        for _ in range(50):
            state = encoder.update(state, chunks[number])
        found[number] = encoder.readout(state)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(chunks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, chunk in enumerate(chunks):
        assert_close(found[number], encoder(chunk.repeat(1, 50, 1)), **TIGHT)


# ---- one small chunk ----------------------------------------------------------------------------

SMALL = {
    "sum": {"aggregate": "sum"},
    "mean": {},
    "weighted mean and mass": {"aggregate": ["weighted_mean", "mass"]},
    "softmax": {"attention": "softmax"},
    "without bias": {"bias": False},
    "learned": {"slots": "learned"},
}


@pytest.mark.parametrize("options", SMALL.values(), ids=SMALL)
@torch.no_grad()
def test_small_chunks_give_the_state_that_a_batch_gives(options, monkeypatch):
    encoder, taken = moved(slot_set(**options)), []
    original = setfold.SlotSetEncoder.absorb_small

    def noted(self, elements, prepared):
        taken.append(elements.shape[1])
        return original(self, elements, prepared)

    monkeypatch.setattr(setfold.SlotSetEncoder, "absorb_small", noted)
    one, pair = encoder.initial_state(), encoder.initial_state(2)
    for seed, length in enumerate((1, 2, 65, 512, 513)):
        elements = draw(1, length, 3, seed=seed)
        one = encoder.update(one, elements)
        pair = encoder.update(pair, elements.expand(2, -1, -1))
    assert taken == [1, 2, 65, 512]
    assert_same_state(one, pair[0])


@torch.no_grad()
def test_a_state_with_one_slot_takes_small_chunks():
    encoder = moved(slot_set())
    state = encoder.initial_state(num_slots=1)
    for seed in range(3):
        state = encoder.update(state, draw(1, 2, 3, seed=seed))
    expected = torch.cat([draw(1, 2, 3, seed=seed) for seed in range(3)], 1).sum(1)
    assert_close(state.statistics["sum"][0][:, 0, :-1], expected, **TIGHT)
    assert_close(state.statistics["sum"][0][:, 0, -1], torch.tensor([6.0]).double(), **TIGHT)


@pytest.mark.parametrize("bad", BAD)
@torch.no_grad()
def test_a_small_chunk_that_is_not_finite_is_named(bad):
    encoder = moved(slot_set())
    state = encoder.update(encoder.initial_state(), draw(1, 5, 3))
    before, elements = copy.deepcopy(state), draw(1, 5, 3)
    elements[0, 2, 1] = bad
    with pytest.raises(setfold.NonFiniteError, match=r"elements\[0, 2, 1\]"):
        encoder.update(state, elements)
    assert_same_state(state, before)


@pytest.mark.parametrize("method", ["absorb", "prepare", "featurize"])
@torch.no_grad()
def test_small_chunks_respect_what_a_subclass_overrides(method):
    def absorb(self, elements, mask, prepared):
        return setfold.SlotSetEncoder.absorb(self, 2 * elements, mask, prepared)

    def prepare(self, frame):
        return setfold.SlotSetEncoder.prepare(self, (2 * frame[0] ** 3,))

    def featurize(self, elements, mask, context):
        return elements + 1

    override = {"absorb": absorb, "prepare": prepare, "featurize": featurize}[method]
    own = {"__module__": "setfold.changed"}  # of setfold's encoders the prepared part is kept
    changed = type("Changed", (setfold.SlotSetEncoder,), {method: override, **own})
    encoder = moved(changed(3, 4, 6, 5))
    state = encoder.initial_state()
    for part in draw(1, 6, 3).split(2, 1):
        state = encoder.update(state, part)
    batch = encoder(draw(1, 6, 3).expand(2, -1, -1))  # takes no shortcut
    assert_close(encoder.readout(state), batch[:1], **TIGHT)


# ---- ragged chunks -------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["mean", "weighted_mean", "max"])
@pytest.mark.parametrize("begin", ["empty", "emptied", "one set", "all sets"])
def test_ragged_rows_are_joined_to_what_a_state_holds(begin, aggregate):
    """In float32, for which there are compiled kernels; empty states take a shortcut."""
    encoder = slot_set(aggregate=aggregate).eval()
    first, rows, index = torch.randn(4, 2, 3), torch.randn(9, 3), torch.arange(9) % 3  # not 3
    with torch.no_grad():
        state = encoder.initial_state(4)
        if begin == "emptied" and aggregate == "mean":
            state = encoder.remove(encoder.update(state, first), first)
        mask = torch.zeros(4, 2, dtype=torch.bool)
        if begin in ("one set", "all sets"):
            mask[1 if begin == "one set" else slice(None)] = True
            state = encoder.update(state, first, mask=mask)
        held = copy.deepcopy(state)
        found = encoder.update(state, rows, index=index)
        assert_same_state(state, held)
        for number in range(4):
            elements = torch.cat([first[number, mask[number]], rows[index == number]])
            expected = encoder.update(encoder.initial_state(), elements.unsqueeze(0))
            assert int(found.count[number]) == len(elements)
            assert_close(encoder.readout(found[number]), encoder.readout(expected))


# ---- gradients of ragged batches ---------------------------------------------------------------


def nodes_behind(tensor):
    """All nodes of the graph of a tensor."""
    found, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize(
    "encoder",
    [
        setfold.Pool(3, "max"),
        setfold.AttentionPool(3, 2, 4),
        setfold.DeepSets(nn.Linear(3, 4), 4),
        setfold.SetTransformer(3, 4, num_inducing=2),
        setfold.FullSetTransformer(3, 4),
    ],
    ids=lambda encoder: type(encoder).__name__,
)
def test_no_step_of_a_backward_pass_is_as_large_as_all_sets_for_each_length(encoder):
    def steps(lengths):
        index = torch.arange(lengths).repeat_interleave(torch.arange(lengths) + 1)
        elements = torch.randn(len(index), 3, requires_grad=True)
        nodes = nodes_behind(encoder(elements, index=index))
        return sum("Index" in node.name() for node in nodes)

    assert steps(2) == steps(20)
