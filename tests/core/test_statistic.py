"""What a state keeps: laws of joining, the way back by autograd, and the values themselves."""

from __future__ import annotations

from functools import reduce
from itertools import permutations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.testing import assert_close

import setfold
from setfold.core import absorb, persist, statistic
from setfold.core.statistic import CentralMoments, Field, Max, Min, Reduction, Scatter, Softmax, Sum
from tests.small import TIGHT, draw, gradients

WIDTH = 3
CPU = torch.device("cpu")
STATISTICS = {
    "sum": Sum(),
    "max": Max(),
    "min": Min(),
    "softmax": Softmax(),
    "moments": CentralMoments(),
    "scatter": Scatter(),
}
REDUCTIONS = {name: kept for name, kept in STATISTICS.items() if isinstance(kept, Reduction)}
FIELDS = {
    name: Field(kept, (1, WIDTH + 1) if name == "softmax" else (WIDTH,))
    for name, kept in STATISTICS.items()
}


def softmax_of(values):
    """The parts of the softmax statistic, of logits that are the first feature, times 20."""
    logits = 20 * values[..., :1]  # (B, n, 1)
    peak = logits.detach().amax(1)
    padded = torch.cat([values, torch.ones_like(logits)], -1)
    return peak, torch.exp(logits - peak.unsqueeze(1)).transpose(1, 2) @ padded


def empty(name, sets=2):
    return FIELDS[name].identity(sets, CPU)


def parts_of(name, values):
    if values.shape[1] == 0:
        return empty(name, values.shape[0])
    return softmax_of(values) if name == "softmax" else REDUCTIONS[name].absorb(values, None)


def pieces(name, lengths=(4, 1, 7)):
    values = draw(2, sum(lengths), WIDTH).split(lengths, 1)
    return [parts_of(name, value) for value in values]


@pytest.fixture(params=STATISTICS)
def name(request):
    return request.param


# ---- joining -----------------------------------------------------------------------------------


def test_every_order_and_grouping_is_the_statistic_of_all(name):
    join, values = STATISTICS[name].join, draw(2, 12, WIDTH)
    expected = parts_of(name, values)
    for one, two, three in permutations(pieces(name)):
        assert_close(join(join(one, two), three), expected, **TIGHT)
        assert_close(join(one, join(two, three)), expected, **TIGHT)


def test_an_empty_set_adds_exactly_nothing(name):
    join, nothing = STATISTICS[name].join, empty(name)
    for parts in (*pieces(name), nothing):
        for joined in (join(parts, nothing), join(nothing, parts)):
            assert all(map(torch.equal, joined, parts))


def test_some_sets_may_be_empty_and_others_not(name):
    one, two = pieces(name, (5, 6))
    nothing = empty(name)
    mixed = tuple(torch.stack([e[0], p[1]]) for e, p in zip(nothing, two, strict=True))
    joined, both = STATISTICS[name].join(one, mixed), STATISTICS[name].join(one, two)
    for found, alone, together in zip(joined, one, both, strict=True):
        assert torch.equal(found[0], alone[0])
        assert torch.equal(found[1], together[1])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_hidden_is_not_absorbed(name):
    values, mask = draw(3, 8, WIDTH), torch.zeros(3, 8, dtype=torch.bool)
    mask[0, ::3], mask[1] = True, True  # the last set shows nothing
    found = REDUCTIONS[name].absorb(values, mask)
    for number in range(2):
        alone = REDUCTIONS[name].absorb(values[number : number + 1, mask[number]], None)
        assert_close(tuple(part[number : number + 1] for part in found), alone, **TIGHT)
    assert_close(tuple(part[2:] for part in found), empty(name, 1), **TIGHT)


def test_what_is_absorbed_is_what_torch_says():
    values = draw(2, 9, WIDTH)
    expected = {
        "sum": (values.sum(1),),
        "max": (values.amax(1),),
        "min": (values.amin(1),),
        "moments": (
            torch.full((2, WIDTH), 9.0, dtype=torch.float64),
            values.mean(1),
            9 * values.var(1, correction=0),
        ),
        "scatter": (
            torch.full((2,), 9.0, dtype=torch.float64),
            values.mean(1),
            torch.stack([8 * torch.cov(rows.T) for rows in values]),
        ),
    }
    for name, reduction in REDUCTIONS.items():
        assert_close(reduction.absorb(values, None), expected[name], **TIGHT)


def test_only_sums_can_remove_elements(name):
    one, two = pieces(name, (5, 6))
    kept = STATISTICS[name]
    if kept.removable:
        assert_close(kept.remove(kept.join(one, two), two), one, **TIGHT)
    else:
        with pytest.raises(setfold.NotRemovableError, match=f"{type(kept).__name__} cannot remove"):
            kept.remove(one, two)


# ---- the way back ------------------------------------------------------------------------------


def differentiable(name, parts):
    """The parts that gradients flow through: not a count, nor a peak, which is a constant."""
    return parts[1:] if name in ("softmax", "moments", "scatter") else parts


def detached(parts):
    return tuple(part.detach() for part in parts)


def with_leaves(name, parts):
    leaves = tuple(part.clone() for part in detached(parts))
    for leaf in differentiable(name, leaves):
        leaf.requires_grad_()
    return leaves


@pytest.mark.parametrize("lengths", [(4, 1, 7), (5,), (0, 6, 0, 1), (2, 2, 0, 8, 3)], ids=str)
def test_pull_is_autograd_through_join(name, lengths):
    kept = STATISTICS[name]
    leaves = [with_leaves(name, piece) for piece in pieces(name, lengths)]
    joined = reduce(kept.join, leaves)
    slopes = tuple(draw(*part.shape, seed=9) for part in joined)
    expected = torch.autograd.grad(
        differentiable(name, joined),
        [leaf for parts in leaves for leaf in differentiable(name, parts)],
        differentiable(name, slopes),
    )
    found, whole, before = [], detached(joined), empty(name)
    for parts in leaves:
        mine, after = slopes, kept.join(before, detached(parts))
        if kept.picks:  # a piece gets what it was the last to change
            others = reduce(kept.join, map(detached, leaves[len(found) + 1 :]), after)
            won = (after[0] != before[0]) & (others[0] == after[0])
            mine = (slopes[0].where(won, 0),)
        found += differentiable(name, kept.pull(mine, whole, detached(parts)))
        before = after
    assert_close(tuple(found), expected, **TIGHT)


def test_pull_of_all_statistics_is_that_of_each():
    whole = {name: parts_of(name, draw(2, 5, WIDTH)) for name in STATISTICS}
    piece = {name: parts_of(name, draw(2, 5, WIDTH)[:, :2]) for name in STATISTICS}
    grads = {name: tuple(draw(*p.shape, seed=4) for p in ps) for name, ps in whole.items()}
    own = statistic.pull(FIELDS, grads, whole, piece)
    for name, kept in STATISTICS.items():
        expected = kept.pull(grads[name], whole[name], piece[name])
        assert_close(own[name], expected, rtol=0, atol=0)


# ---- numbers of any size -----------------------------------------------------------------------


def test_moments_far_from_zero_join_without_cancellation():
    moments, values = REDUCTIONS["moments"], 1e8 + draw(1, 2000, WIDTH)
    exact = REDUCTIONS["moments"].absorb(values - 1e8, None)
    for size in (1, 10, 700):
        joined = reduce(moments.join, (moments.absorb(v, None) for v in values.split(size, 1)))
        assert_close(joined[1] - 1e8, exact[1], rtol=0, atol=1e-6)
        assert_close(joined[2], exact[2], rtol=1e-7, atol=0)  # squares less squares would lose all


def test_moments_of_one_number_have_no_spread():
    moments = REDUCTIONS["moments"]
    values = torch.full((1, 5, 1), 0.1, dtype=torch.float64)
    joined = reduce(moments.join, (moments.absorb(v, None) for v in values.split(1, 1)))
    assert joined[2].item() == 0


def test_a_softmax_of_peaks_far_apart_is_that_of_the_larger():
    join = STATISTICS["softmax"].join
    low = torch.tensor([[-1e4]]), torch.tensor([[[7.0, 2.0]]])
    high = torch.tensor([[1e4]]), torch.tensor([[[3.0, 1.0]]])
    for joined in (join(low, high), join(high, low)):
        assert all(map(torch.equal, joined, high))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_part_that_is_not_finite_raises(name, wrong):
    for place, part in enumerate(empty(name)):
        parts = [p.clone() for p in pieces(name)[0]]
        parts[place][(1,) + (0,) * (part.dim() - 1)] = wrong
        if wrong == STATISTICS[name].empty[place]:  # an empty set
            absorb.check_result(FIELDS, {name: tuple(parts)})
        else:
            with pytest.raises(setfold.NonFiniteError, match=name):
                absorb.check_result(FIELDS, {name: tuple(parts)})


def test_joining_keeps_nan_of_either_side(name):
    whole, other = pieces(name)[:2]
    for place, part in enumerate(whole):
        spoilt = (*whole[:place], torch.full_like(part, torch.nan), *whole[place + 1 :])
        for pair in ((spoilt, other), (other, spoilt)):
            assert STATISTICS[name].join(*pair)[place].isnan().all()


def test_clear_makes_some_sets_exactly_empty():
    whole = {name: parts_of(name, draw(2, 5, WIDTH)) for name in STATISTICS}
    cleared = statistic.clear(FIELDS, whole, torch.tensor([True, False]))
    for name, parts in cleared.items():
        for part, nothing, before in zip(parts, empty(name), whole[name], strict=True):
            assert torch.equal(part[0], nothing[0].to(part))
            assert torch.equal(part[1], before[1])


def test_statistics_are_equal_if_their_classes_are():
    assert Sum() == Sum()
    assert hash(Sum()) == hash(Sum())
    assert Max() != Min()
    assert Field(Sum(), (3,)) != Field(Sum(), (4,))
    assert {"a": Field(Sum(), (3,))} != {"a": Field(Max(), (3,))}


# ---- a statistic that is not part of setfold -----------------------------------------------------


class LogSumExp(Reduction):
    """log sum_i exp(v_i) in each feature."""

    empty = (-torch.inf,)

    def absorb(self, values, mask):
        if mask is not None:
            values = values.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return (values.double().logsumexp(1),)

    def join(self, left, right):
        return (torch.logaddexp(left[0], right[0]),)

    def pull(self, grads, joined, piece):
        share = torch.exp(piece[0] - joined[0])  # d joined / d piece
        return (grads[0] * torch.where(piece[0] == -torch.inf, 0, share),)


class Product(Reduction):
    """The product of values, which must not be zero; it can remove elements."""

    empty = (1.0,)

    def absorb(self, values, mask):
        if mask is not None:
            values = values.masked_fill(~mask.unsqueeze(-1), 1)
        return (values.double().prod(1),)

    def join(self, left, right):
        return (left[0] * right[0],)

    def remove(self, left, right):
        return (left[0] / right[0],)

    def pull(self, grads, joined, piece):
        return (grads[0] * joined[0] / piece[0],)


class SmoothMax(setfold.StreamingSetEncoder):
    """log sum_i exp(scale * x_i), elementwise, and a product of positive numbers near 1."""

    def __init__(self, dim_in=WIDTH):
        super().__init__()
        self.dim_in = dim_in
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, dim_in))

    def fields(self, frame):
        shape = (self.dim_in,)
        return {"smooth": Field(LogSumExp(), shape), "product": Field(Product(), shape)}

    def absorb(self, elements, mask, prepared):
        values = elements * self.scale
        near_one = 1 + 0.1 * values.tanh()
        return {
            "smooth": LogSumExp().absorb(values, mask),
            "product": Product().absorb(near_one, mask),
        }

    def finish(self, statistics, count, prepared):
        ((smooth,), (product,)) = statistics["smooth"], statistics["product"]
        if isinstance(count, torch.Tensor):
            is_empty = (count == 0).unsqueeze(-1)
            smooth, product = smooth.masked_fill(is_empty, 0), product.masked_fill(is_empty, 0)
        return torch.cat([smooth, product], 1).to(self.scale.dtype)


def by_hand(encoder, elements):
    values = elements * encoder.scale
    return torch.cat([values.logsumexp(1), (1 + 0.1 * values.tanh()).prod(1)], 1)


def test_ones_own_statistic_obeys_all_laws():
    report = setfold.check(SmoothMax(), processes=False)
    assert report.passed, report
    assert report["removal"].verdict == "does not apply"  # a log-sum-exp cannot remove elements
    assert sum(finding.verdict == "holds" for finding in report.findings) >= 15


def test_check_finds_a_statistic_that_joins_wrongly(monkeypatch):
    monkeypatch.setattr(
        LogSumExp, "join", lambda self, left, right: (torch.maximum(left[0], right[0]),)
    )
    report = setfold.check(SmoothMax(), processes=False)
    assert report["any partition"].verdict == "fails"


def test_check_finds_a_statistic_whose_gradient_is_wrong(monkeypatch):
    monkeypatch.delattr(LogSumExp, "pull")  # the default is that of a sum
    report = setfold.check(SmoothMax(), processes=False)
    assert report["equal gradients"].verdict == "fails"
    assert report["any partition"].verdict == "holds"


@pytest.mark.parametrize("form", ["dense", "masked", "ragged"])
@pytest.mark.parametrize("lengths", [[12], [1] * 12, [5, 0, 7]], ids=str)
def test_exact_gradients_of_ones_own_statistic(lengths, form):
    encoder, elements = SmoothMax().double(), draw(2, 12, WIDTH).requires_grad_()
    wanted = [elements, encoder.scale]
    mask = torch.ones(2, 12, dtype=torch.bool)
    if form != "dense":
        mask[0, 5:], mask[1, ::3] = False, False
    alone = [by_hand(encoder, elements[i : i + 1, mask[i]]) for i in range(2)]
    expected = torch.cat(alone)
    pieces = elements.split(lengths, 1)
    if form == "dense":
        found = setfold.fold(encoder, pieces)
    elif form == "masked":
        found = setfold.fold(encoder, list(zip(pieces, mask.split(lengths, 1), strict=True)))
    else:
        chunks = [
            (piece[shown], torch.arange(2)[:, None].expand(shown.shape)[shown])
            for piece, shown in zip(pieces, mask.split(lengths, 1), strict=True)
        ]
        found = setfold.fold(encoder, chunks, batch_size=2)
    assert_close(found, expected, **TIGHT)
    assert_close(gradients(found, wanted), gradients(expected, wanted), **TIGHT)


def test_unbiased_gradients_of_ones_own_statistic_are_exact_if_all_chunks_are_drawn():
    encoder, elements = SmoothMax().double(), draw(2, 12, WIDTH)
    found = setfold.fold(encoder, elements.split(5, 1), gradient="unbiased", samples=9)
    expected = by_hand(encoder, elements)
    assert_close(gradients(found, [encoder.scale]), gradients(expected, [encoder.scale]), **TIGHT)


def test_a_state_of_ones_own_statistic_is_saved_loaded_and_merged(tmp_path):
    encoder, elements = SmoothMax().double(), draw(2, 12, WIDTH)
    left, right = (encoder.update(encoder.initial_state(2), part) for part in elements.split(6, 1))
    left.save(tmp_path / "state")
    loaded = setfold.SetState.load(tmp_path / "state")
    assert loaded.fields == left.fields
    found = encoder.readout(loaded.merge(right))
    assert_close(found, by_hand(encoder, elements), **TIGHT)


def test_a_statistic_that_is_not_defined_here_is_a_clear_file_error(tmp_path):
    encoder = SmoothMax().double()
    encoder.update(encoder.initial_state(), draw(1, 5, WIDTH)).save(tmp_path / "state")
    _, tensors, description = persist.read(tmp_path / "state", "state")
    assert description["fields"]["smooth"] == [f"{__name__}.LogSumExp", [WIDTH]]
    description["fields"]["smooth"][0] = "their_package.LogSumExp"
    persist.write(tmp_path / "other", "state", tensors, description)
    message = r"'smooth' keeps the statistic their_package\.LogSumExp, which is not defined.*import"
    with pytest.raises(setfold.FileError, match=message):
        setfold.SetState.load(tmp_path / "other")


def test_a_product_can_be_removed_and_a_log_sum_exp_cannot():
    encoder, elements = SmoothMax().double(), draw(1, 5, WIDTH)
    state = encoder.update(encoder.initial_state(), elements)
    with pytest.raises(setfold.NotRemovableError, match="LogSumExp cannot remove elements"):
        encoder.remove(state, elements)
    whole, part = Product().absorb(elements, None), Product().absorb(elements[:, :2], None)
    expected = Product().absorb(elements[:, 2:], None)
    assert_close(Product().remove(whole, part), expected, **TIGHT)


def test_tables_of_states_keep_ones_own_statistic(tmp_path):
    encoder, rows = SmoothMax().double(), draw(30, WIDTH)
    numbers = torch.arange(30) % 3
    columns = {"set": numbers.numpy(), **{f"x{i}": rows[:, i].numpy() for i in range(WIDTH)}}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    states, outputs = tmp_path / "states.arrow", [tmp_path / f"{i}.parquet" for i in range(2)]
    setfold.encode_sets(encoder, tmp_path / "rows.parquet", outputs[0], set="set", states=states)
    setfold.readout_states(states, outputs[1], model=encoder)
    expected = [by_hand(encoder, rows[numbers == number][None])[0] for number in range(3)]
    for output in outputs:
        found = torch.tensor(pq.read_table(output)["encoding"].to_pylist(), dtype=torch.float64)
        assert_close(found, torch.stack(expected).detach(), rtol=1e-6, atol=1e-6)
