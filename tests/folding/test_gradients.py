"""Exact gradients of a fold: those of the whole set, however it is cut, and whatever is done with them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import setfold
from setfold.core.readout import AGGREGATES as READINGS
from setfold.core.statistic import Field, Max, Sum
from setfold.folding import source
from tests import memory
from tests.laws.test_laws import sizes
from tests.small import assert_alike, draw, gradients, make
from tests.strategies import MODELS, cases


def model_of(aggregate="mean", features=None, head=None, **options):
    """features (3 -> 3) -> slots -> head, in float64 and evaluation mode."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(3, 3), nn.Tanh()) if features is None else features
    encoder = setfold.SlotSetEncoder(3, 4, 6, 5, aggregate=aggregate, **options)
    return setfold.Composition(encoder, features, head).double().eval()


def deep_sets(*layers, aggregate="sum", head=None):
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(3, 4), *layers)
    return setfold.DeepSets(features, 4, aggregate, head=head).double()


# ---- the law ---------------------------------------------------------------------------------


def situation(case, form, asked):
    """Elements, how a fold is given them, and how a whole encoder is."""
    batch, length, width = case.elements.shape
    if form != "ragged":
        elements = case.elements.clone().requires_grad_(asked)
        pieces = elements.split(list(case.lengths), 1)
        if form == "masked":
            masks = case.mask.split(list(case.lengths), 1)
            pieces = list(zip(pieces, masks, strict=True))
        chunks = [pieces[i] for i in case.chunk_order]
        return elements, chunks, {}, {"mask": case.mask} if form == "masked" else {}
    order = torch.randperm(batch * length, generator=torch.Generator().manual_seed(case.seed))
    rows = case.elements.reshape(-1, width)[order].requires_grad_(asked)
    index = torch.arange(batch).repeat_interleave(length)[order]
    lengths = list(case.lengths) * batch
    chunks = list(zip(rows.split(lengths), index.split(lengths), strict=True))
    sets = {"batch_size": batch + 1}  # one of them is empty
    return rows, chunks, sets, {"index": index, **sets}


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(
    data=st.data(),
    case=cases(ties=False),
    form=st.sampled_from(["dense", "masked", "ragged"]),
    at_once=st.booleans(),
    asked=st.booleans(),
    tiny=st.booleans(),
)
def test_exact_gradients_are_those_of_the_whole_set(kind, data, case, form, at_once, asked, tiny):
    streams = issubclass(kind, setfold.StreamingSetEncoder)
    model = data.draw(MODELS[kind]).double().train(streams and data.draw(st.booleans()))
    elements, chunks, told, whole = situation(case, form, asked)
    wanted = [*([elements] if asked else []), *model.parameters()]

    torch.manual_seed(case.seed)  # of the slots, which training draws
    expected = model(elements, **whole)
    torch.manual_seed(case.seed)
    with sizes(tiny), pytest.MonkeyPatch.context() as patch:
        if at_once:  # one tensor, which is cut by itself
            patch.setattr(source, "TILE_BYTES", 100)
            patch.setattr(source, "COSTLY_ROWS", 3)
            found = setfold.fold(model, elements, **whole)
        else:
            found = setfold.fold(model, chunks, **told)
        assert_alike([found], [expected])
        if wanted:
            assert_alike(gradients(found, wanted), gradients(expected, wanted))


@pytest.mark.parametrize("aggregate", [*READINGS, list(READINGS)], ids=str)
def test_every_aggregate_with_features_and_a_head(aggregate):
    width = 4 * (26 if isinstance(aggregate, list) else 1 if aggregate == "mass" else 5)
    model = model_of(aggregate, head=nn.Sequential(nn.Flatten(), nn.Linear(width, 2)))
    elements, wanted = draw(2, 23, 3), list(model.parameters())
    expected = gradients(model(elements), wanted)
    assert sum(bool(g.any()) for g in expected) >= 9
    found = setfold.fold(model, elements.split([1, 0, 9, 12, 1], 1))
    assert_alike(gradients(found, wanted), expected)


def test_only_some_chunks_want_gradients():
    encoder, chunks = make(), [draw(1, n, 3, seed=n) for n in (2, 3, 4)]
    chunks[1].requires_grad_()
    (expected,) = gradients(encoder(torch.cat(chunks, 1)), [chunks[1]])
    assert_alike(gradients(setfold.fold(encoder, chunks), [chunks[1]]), [expected])


class Own(setfold.StreamingSetEncoder):
    """Weights that `absorb` and `finish` look at themselves, without any `prepare`."""

    dim_in = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(draw(3, 3))

    def fields(self, frame):
        return {"sum": Field(Sum(), (3,)), "max": Field(Max(), (3,))}

    def absorb(self, elements, mask, prepared):
        made = (elements @ self.weight).tanh()
        return {"sum": Sum().absorb(made, mask), "max": Max().absorb(made, mask)}

    def finish(self, statistics, count, prepared):
        return statistics["sum"][0] * statistics["max"][0] @ self.weight


def test_an_encoder_of_ones_own_may_use_its_weights_anywhere():
    encoder, elements = Own(), draw(2, 20, 3).requires_grad_()
    wanted = [elements, encoder.weight]
    made = (elements @ encoder.weight).tanh()
    literal = made.sum(1) * made.max(1).values @ encoder.weight
    found = setfold.fold(encoder, elements.split(6, 1))
    assert_alike([found], [literal])
    assert_alike(gradients(found, wanted), gradients(literal, wanted))


class Inner(nn.Module):
    """Elements that are sets themselves, (N, m, 3) -> (N, 20)."""

    def __init__(self):
        super().__init__()
        self.encoder = setfold.SlotSetEncoder(3, 4, 6, 5)

    def forward(self, rows):
        return self.encoder(rows).flatten(1).tanh()


class Within(Own):
    """What `Own` is, of what a whole encoder makes of each row."""

    def __init__(self):
        super().__init__()
        self.inner = setfold.SlotSetEncoder(3, 4, 6, 3)

    def fields(self, frame):
        return {"sum": Field(Sum(), (3,))}

    def absorb(self, elements, mask, prepared):
        inner = self.inner(elements.flatten(0, 1).unsqueeze(1)).sum(1).tanh()
        return {"sum": Sum().absorb(inner.unflatten(0, elements.shape[:2]), mask)}

    def finish(self, statistics, count, prepared):
        return statistics["sum"][0] @ self.weight


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("aggregate", ["mean", "max", None], ids=str)
def test_encoders_within_an_encoder(aggregate, tiny):
    torch.manual_seed(0)
    outer = setfold.SlotSetEncoder(20, 4, 6, 5, aggregate=aggregate or "mean")
    model = setfold.Composition(outer, Inner()) if aggregate else Within()
    model, elements = model.double().eval(), draw(2, 7, 6, 3) if aggregate else draw(2, 7, 3)
    wanted = list(model.parameters())
    expected = gradients(model(elements), wanted)
    with sizes(tiny):
        assert_alike(gradients(setfold.fold(model, elements.split(3, 1)), wanted), expected)


def test_weights_that_features_and_encoder_share_count_once():
    model, elements = model_of(), draw(2, 20, 3)
    model.features = nn.Sequential(model.encoder.to_key, nn.Linear(5, 3).double())
    wanted = list(model.parameters())
    expected = gradients(model(elements), wanted)
    assert_alike(gradients(setfold.fold(model, elements.split(6, 1)), wanted), expected)


# ---- chunks that come in another order, or cut elsewhere -------------------------------------


SHUFFLED = {
    **{name: partial(model_of, name) for name in ("sum", "weighted_mean", "max")},
    "training": lambda: deep_sets(nn.Tanh()),
    "dropout": lambda: deep_sets(nn.Dropout(0.5)),
    "attention": lambda: setfold.AttentionPool(3, 2, 4, 2),
    "gated": lambda: setfold.GatedAttentionPool(3, 4, 2),
    "moments": lambda: setfold.Composition(setfold.Moments(3), nn.Linear(3, 3)),
    "two passes": lambda: setfold.LayeredSetEncoder([setfold.SetNorm(3)], make()),
    "softmax twice": lambda: setfold.SetTransformer(3, 4, 2, 3, num_layers=1),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_shuffled_loader_raises(name):
    torch.manual_seed(0)
    model = SHUFFLED[name]().double()
    model.train(name in ("training", "dropout"))
    loader = DataLoader(TensorDataset(draw(30, 3)), batch_size=4, shuffle=True)
    with pytest.raises(setfold.InputError, match=r"chunk 0 has changed.*shuffle=False"):
        setfold.fold(model, loader, batch_size=1).sum().backward()


@pytest.mark.parametrize("wanting", [True, False])
@pytest.mark.parametrize("name", SHUFFLED)
def test_chunks_that_are_cut_elsewhere_raise(name, wanting):
    torch.manual_seed(0)
    model, elements = SHUFFLED[name]().double(), draw(1, 10, 3).requires_grad_(wanting)
    turns = iter([elements.split(5, 1), *[elements.split(4, 1)] * 4])
    with pytest.raises(setfold.InputError, match="chunk 0 has changed"):
        setfold.fold(model.eval(), lambda: next(turns)).sum().backward()


@pytest.mark.parametrize("name", ["sum", "max", "attention", "softmax twice"])
def test_fewer_or_more_chunks_raise(name):
    torch.manual_seed(0)
    model, chunks = SHUFFLED[name]().double().eval(), list(draw(1, 12, 3).split(4, 1))
    for again in (chunks[:2], [*chunks, chunks[0]], []):
        turns = iter([chunks, *[again] * 4])
        with pytest.raises(
            setfold.InputError, match=r"chunk 3 has changed|3 chunks were read first"
        ):
            setfold.fold(model, lambda turns=turns: next(turns)).sum().backward()


class Dropped(nn.Module):
    """Dropout that remembers what it kept."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, rows):
        made = nn.functional.dropout(rows, 0.4, self.training)
        self.kept.append((made != 0).double() / 0.6)
        return made


@pytest.mark.parametrize("aggregate", ["sum", "max", ["mean", "min"]], ids=str)
def test_dropout_drops_the_same_in_the_replay(aggregate):
    dropped, chunks = Dropped(), [draw(1, n, 3, seed=n) for n in (5, 1, 3, 3)]
    model = deep_sets(dropped, aggregate=aggregate).train()
    found = setfold.fold(model, lambda: iter(chunks))
    linear, kept = model.features[0], torch.cat(dropped.kept)
    assert 0 < int((kept == 0).sum()) < kept.numel()
    literal = model.encoder((linear(torch.cat(chunks, 1)[0]) * kept).unsqueeze(0))
    assert_alike([found], [literal])
    wanted = list(linear.parameters())
    assert_alike(gradients(found, wanted), gradients(literal, wanted))


def test_random_numbers_outside_go_on_as_if_nothing_had_been():
    model, chunks = deep_sets(nn.Dropout(0.5)).train(), [draw(1, 3, 3)] * 3
    torch.manual_seed(1)
    encoding = setfold.fold(model, chunks)
    before = torch.random.get_rng_state()
    encoding.sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    torch.randint(2**62, ())  # the one number that a fold draws
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- what it costs ---------------------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.rows = []

    def forward(self, rows):
        self.rows.append(len(rows))
        return self.linear(rows)


@pytest.mark.parametrize(("aggregate", "again"), [("max", [3, 5]), (["max", "mean"], [2, 3, 4, 5])])
def test_of_a_maximum_only_chunks_that_hold_a_winner_are_run_again(aggregate, again):
    counted = Counted()
    model = setfold.DeepSets(counted, 3, aggregate).double()
    with torch.no_grad():
        counted.linear.weight.copy_(torch.eye(3))
    chunks = [draw(1, n, 3, seed=n).clamp(-1, 1) for n in (2, 3, 4, 5)]
    chunks[1][0, 0, 0] = chunks[3][0, 2, 1] = chunks[1][0, 1, 2] = 9
    encoding = setfold.fold(model, chunks)
    assert counted.rows == [2, 3, 4, 5]
    counted.rows.clear()
    found = gradients(encoding, list(model.parameters()))
    assert counted.rows == again
    expected = gradients(model(torch.cat(chunks, 1)), list(model.parameters()))
    assert_alike(found, expected)


STREAMED = """
layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
encoder = setfold.SlotSetEncoder(16, 4, 8, 8, aggregate={aggregate!r})
model = setfold.Composition(encoder, layers)

def step(length):
    def stream():
        draw = torch.Generator().manual_seed(0)
        for _ in range(length // 1000):
            yield torch.randn(1, 1000, 4, generator=draw)
    setfold.fold(model, stream).sum().backward()
"""


@memory.linux_only
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_exact_gradients_take_the_memory_of_one_chunk(aggregate):
    many = memory.peak(STREAMED.format(aggregate=aggregate), 100_000, small=3000)
    assert many < 30e6  # 4 MB; the graph of all chunks takes 52 MB


MAPPED = """
import numpy, tempfile
folder = tempfile.TemporaryDirectory()
numpy.lib.format.open_memmap(folder.name + "/all.npy", "w+", numpy.float32, (1, 12_500_000, 4))
whole = numpy.load(folder.name + "/all.npy", mmap_mode="r")
encoder = setfold.SlotSetEncoder(4, 4, 8, 8)

def step(length):
    setfold.fold(encoder, whole[:, :length]).sum().backward()
"""


@memory.linux_only
def test_a_file_is_trained_on_without_being_in_memory():
    many = memory.peak(MAPPED, 12_500_000, small=2_200_000)
    assert many < 80e6  # 20 MB; 160 MB if pages are not handed back
