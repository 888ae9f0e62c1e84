"""Janossy pooling against all permutations one by one, and what is its own."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.encoders import janossy
from setfold.encoders.janossy import JanossyPool, draw_tuples, enumerate_tuples
from setfold.kernels.ragged import MAX_EXACT_LENGTHS
from tests.small import TIGHT, assert_ragged_is_dense, draw
from tests.strategies import cases, seeded

CPU = torch.device("cpu")
HOME = "setfold.encoders.janossy.JanossyPool"


class LastState(nn.Module):
    """What a recurrent network remembers of sequences (N, n, d) of any n."""

    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.dim_in, self.dim_out = dim_in, dim_out
        self.network = nn.GRU(dim_in, dim_out, batch_first=True)

    def forward(self, sequences):
        return self.network(sequences)[1][-1]


class Shape(nn.Module):
    """Remembers the shapes that it was shown, and has no weights."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, tuples):
        self.shapes.append(tuple(tuples.shape))
        return tuples.sum(1)


def function_of(arity):
    """Far from invariant, and cheap to evaluate by hand."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * arity, 2), nn.Tanh())


def make(arity=2, num_samples=None, seed=0):
    torch.manual_seed(seed)
    return JanossyPool(function_of(arity), 3, arity, num_samples).double()


def recurrent(num_samples):
    torch.manual_seed(0)
    return JanossyPool(LastState(3, 4), 3, None, num_samples).double()


@st.composite
def encoders(draw):
    seeded(draw)
    arity = draw(st.integers(1, 3))
    return JanossyPool(function_of(arity), 3, arity).double()


def by_loops(elements, encoder):
    """(n, d) elements to (p,): the mean over all n! orders of what the first k give."""
    elements, arity = elements.numpy(), encoder.arity
    weight = encoder.function[1].weight.detach().numpy()
    bias = encoder.function[1].bias.detach().numpy()
    total, orders = np.zeros(len(bias)), 0
    for order in permutations(range(len(elements))):
        seen = [elements[i] for i in order[:arity]]
        seen += [np.zeros(3)] * (arity - len(seen))
        for out in range(len(bias)):
            inside = sum(
                weight[out, 3 * place + feature] * seen[place][feature]
                for place in range(arity)
                for feature in range(3)
            )
            total[out] += math.tanh(inside + bias[out])
        orders += 1
    return total / orders


def by_the_paper(elements, function, arity):
    """The same for any function, with a graph."""
    found = []
    for order in permutations(range(len(elements))):
        seen = [elements[i] for i in order[:arity]]
        seen += [torch.zeros_like(elements[0])] * (arity - len(seen))
        found.append(function(torch.stack(seen)[None])[0])
    return torch.stack(found).mean(0)


# ---- all tuples ----------------------------------------------------------------------------


@pytest.mark.parametrize("arity", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_it_is_what_the_loops_say(arity, size):
    encoder, elements = make(arity), draw(2, size, 3)
    found = encoder(elements).detach()
    for number in range(2):
        expected = by_loops(elements[number], encoder)
        np.testing.assert_allclose(found[number], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("numbers", [1, 17, 64, 1 << 20])
def test_blocks_make_no_difference(monkeypatch, numbers):
    encoder, elements = make(3), draw(3, 5, 3)
    expected = torch.stack([by_the_paper(e, encoder.function, 3) for e in elements])
    monkeypatch.setattr(janossy, "BLOCK_NUMBERS", numbers)
    assert_close(encoder(elements), expected, **TIGHT)


def test_memory_is_bounded_by_blocks(monkeypatch):
    monkeypatch.setattr(janossy, "BLOCK_NUMBERS", 600)
    function = Shape()
    JanossyPool(function, 3, 2)(torch.randn(2, 40, 3))
    assert sum(rows for rows, _, _ in function.shapes) == 2 * 40 * 39
    assert max(math.prod(shape) for shape in function.shapes) <= 600


@given(size=st.integers(1, 6), data=st.data())
def test_tuples_are_numbered_as_itertools_does(size, data):
    taken = data.draw(st.integers(1, size))
    expected = list(permutations(range(size), taken))
    start = data.draw(st.integers(0, len(expected)))
    found = enumerate_tuples(slice(start, len(expected)), size, taken, CPU)
    assert [tuple(row) for row in found.tolist()] == expected[start:]


@settings(max_examples=40)
@given(encoder=encoders(), case=cases())
def test_order_does_not_matter(encoder, case):
    found = encoder(case.elements[:, case.permutation], case.mask[:, case.permutation])
    assert_close(found, encoder(case.elements, case.mask), **TIGHT)


@settings(max_examples=40)
@given(encoder=encoders(), case=cases(), content=st.sampled_from([float("nan"), 1e300]))
def test_what_is_hidden_is_absent(encoder, case, content):
    hidden = case.elements.masked_fill(~case.mask.unsqueeze(-1), content)
    found = encoder(hidden, case.mask)
    for number, elements in enumerate(case.elements):
        alone = encoder(elements[case.mask[number]].unsqueeze(0))
        assert_close(found[number : number + 1], alone, **TIGHT)


@pytest.mark.parametrize("sets", [5, MAX_EXACT_LENGTHS + 10])  # of exact lengths, and padded
def test_ragged_is_dense(sets):
    assert_ragged_is_dense(make(), sets)


@pytest.mark.parametrize("encoder", [make(), make(num_samples=3), recurrent(3)])
def test_empty_sets_are_zeros(encoder):
    width = encoder(draw(1, 1, 3)).shape[1]
    zeros = torch.zeros(2, width, dtype=torch.float64)
    assert torch.equal(encoder(draw(2, 0, 3)), zeros)
    found = encoder(draw(2, 2, 3), torch.tensor([[False, False], [True, True]]))
    assert torch.equal(found[0], zeros[0])
    assert found[1].abs().min() > 0


def test_the_only_element_is_seen_with_zeros_after_it():
    for num_samples in (None, 3):
        encoder, elements = make(3, num_samples), draw(2, 1, 3)
        filled = torch.cat([elements, torch.zeros(2, 2, 3, dtype=torch.float64)], 1)
        assert_close(encoder(elements), encoder.function(filled), **TIGHT)


@pytest.mark.parametrize(("arity", "size"), [(1, 4), (2, 1), (2, 5), (3, 2), (3, 4)])
def test_gradients_are_those_of_the_formula(arity, size):
    encoder, elements = make(arity), draw(2, size, 3).requires_grad_()
    mask = torch.ones(2, size, dtype=torch.bool)
    mask[1, size // 2 + 1 :] = False
    slope = draw(2, 2, seed=1)
    wanted = (elements, *encoder.parameters())
    found = torch.autograd.grad((encoder(elements, mask) * slope).sum(), wanted)
    formula = [
        by_the_paper(e[m], encoder.function, arity) for e, m in zip(elements, mask, strict=True)
    ]
    expected = torch.autograd.grad((torch.stack(formula) * slope).sum(), wanted)
    for gradient, by_hand in zip(found, expected, strict=True):
        assert_close(gradient, by_hand, **TIGHT)


def test_a_long_mean_does_not_stagnate():
    encoder = JanossyPool(Shape(), 1, 1)
    found = encoder(torch.full((1, 1 << 20, 1), 0.1))
    assert_close(found, torch.tensor([[0.1]]), rtol=1e-7, atol=0)


# ---- samples -------------------------------------------------------------------------------


@pytest.mark.parametrize("arity", [2, 3, 5])
def test_a_sample_of_all_permutations_is_the_mean_over_all_tuples(monkeypatch, arity):
    exact, elements = make(arity), draw(2, 4, 3)
    orders = torch.tensor(list(permutations(range(4))))

    def all_orders(shape, size, taken, device):
        assert shape == (2, 24)
        return orders[:, :taken].expand(2, 24, taken)

    monkeypatch.setattr(janossy, "draw_tuples", all_orders)
    sampled = make(arity, num_samples=24)
    assert_close(sampled(elements), exact(elements), **TIGHT)


def test_a_sample_of_all_permutations_is_the_mean_of_a_recurrent_network(monkeypatch):
    encoder, elements = recurrent(24), draw(1, 4, 3)
    orders = torch.tensor(list(permutations(range(4))))
    monkeypatch.setattr(janossy, "draw_tuples", lambda *_: orders[None])
    expected = by_the_paper(elements[0], encoder.function, 4)
    assert_close(encoder(elements)[0], expected, **TIGHT)


@pytest.mark.parametrize(("size", "taken"), [(4, 1), (4, 2), (4, 3), (4, 4), (6, 3), (1, 1)])
def test_every_tuple_is_drawn_as_often(size, taken):
    torch.manual_seed(0)
    tuples = list(permutations(range(size), taken))
    draws = 400 * len(tuples)
    found = draw_tuples((2, draws // 2), size, taken, CPU).reshape(-1, taken).tolist()
    counts = dict.fromkeys(tuples, 0)
    for row in found:
        counts[tuple(row)] += 1  # a KeyError is a tuple that should not be
    # chi squared has mean f and variance 2f; six deviations are never seen by chance
    freedom = len(tuples) - 1
    chi_squared = sum((count - 400) ** 2 / 400 for count in counts.values())
    assert chi_squared <= freedom + 6 * math.sqrt(2 * freedom)


def test_the_mean_of_many_samples_is_that_of_all():
    exact, sampled, elements = make(2), make(2, num_samples=20_000), draw(1, 6, 3)
    with torch.no_grad():
        pairs = torch.stack([elements[0, list(p)] for p in permutations(range(6), 2)])
        bound = 5 * exact.function(pairs).std(0) / math.sqrt(20_000)
        assert ((sampled(elements) - exact(elements)).abs() <= bound).all()


@pytest.mark.parametrize("training", [True, False])
def test_samples_are_fresh_for_each_call_and_each_set(training):
    encoder = make(2, num_samples=3).train(training)
    elements = draw(1, 20, 3).expand(2, -1, -1)
    first, second = encoder(elements), encoder(elements)
    assert not torch.allclose(first, second)
    assert not torch.allclose(first[0], first[1])
    torch.manual_seed(5)
    once = encoder(elements)
    torch.manual_seed(5)
    assert torch.equal(encoder(elements), once)


@pytest.mark.parametrize("num_samples", [1, 7])
def test_a_recurrent_network_reads_whole_permutations_of_what_is_there(num_samples):
    encoder = JanossyPool(Shape(), 3, None, num_samples).double()
    elements = draw(3, 5, 3)
    mask = torch.arange(5) < torch.tensor([[5], [2], [5]])
    found = encoder(elements, mask)  # whatever the order, its sum is the set's
    assert_close(found, (elements * mask[..., None]).sum(1), **TIGHT)
    assert encoder.function.shapes == [(num_samples, 2, 3), (2 * num_samples, 5, 3)]
    read = recurrent(num_samples)(elements, mask)
    assert read.shape == (3, 4)
    assert torch.isfinite(read).all()


def test_gradients_of_a_sample_reach_the_function_and_the_elements():
    encoder, elements = recurrent(4), draw(2, 5, 3).requires_grad_()
    encoder(elements).sum().backward()
    for tensor in (elements, *encoder.parameters()):
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().max() > 0


# ---- files, compiled programs and complaints -----------------------------------------------


def test_it_is_saved_and_loaded(tmp_path):
    elements, path = draw(2, 5, 3), tmp_path / "encoder.safetensors"
    encoder = make(3)
    setfold.save(encoder, path)
    assert torch.equal(setfold.load(path, allow=[HOME])(elements), encoder(elements))
    sampled = recurrent(3)
    setfold.save(sampled, path)
    copy = setfold.load(path, allow=[HOME, f"{LastState.__module__}.LastState"])
    assert (copy.arity, copy.num_samples) == (None, 3)
    found = []
    for model in (sampled, copy):
        torch.manual_seed(1)
        found.append(model(elements))
    assert torch.equal(*found)


def test_compiled_and_exported_forwards_agree():
    torch._dynamo.reset()
    encoder, elements = make(), draw(3, 6, 3)
    expected = encoder(elements)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    assert_close(compiled(elements), expected, **TIGHT)
    exported = torch.export.export(encoder, (elements,)).module()
    assert_close(exported(elements), expected, **TIGHT)


def test_too_many_tuples_are_refused_before_anything_is_done():
    function = Shape()
    encoder = JanossyPool(function, 3, 3)
    with pytest.raises(setfold.InputError, match=r"100,000,000 .* tuples of 3 .* num_samples"):
        encoder(torch.randn(1, 500, 3))
    with pytest.raises(setfold.InputError, match="2 sets of up to 400 elements"):
        encoder(torch.randn(2, 400, 3), torch.ones(2, 400, dtype=torch.bool))  # one would do
    with pytest.raises(setfold.InputError, match="num_samples"):
        JanossyPool(function, 3, 300)(torch.randn(1, 3000, 3))  # a number no float can hold
    assert function.shapes == []
    assert JanossyPool(function, 3, 3, num_samples=2)(torch.randn(1, 500, 3)).shape == (1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": torch.sum}, r"function must be a torch\.nn\.Module"),
        ({"dim_in": 0}, "dim_in must be an integer of at least 1; got 0"),
        ({"dim_in": None}, "dim_in must be an integer of at least 1; got None"),
        ({"arity": 0}, "arity must be an integer of at least 1; got 0"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1; got 0"),
        ({"arity": None}, r"whole permutations .* num_samples"),
    ],
)
def test_bad_settings_say_what_is_allowed(arguments, message):
    with pytest.raises(setfold.InputError, match=message):
        JanossyPool(**({"function": nn.Flatten(), "dim_in": 3} | arguments))


@pytest.mark.parametrize(
    ("function", "got"),
    [(nn.Flatten(0), r"\(120,\)"), (nn.GRU(3, 4, batch_first=True), "tuple")],
)
def test_a_function_that_does_not_give_a_row_for_each_tuple_is_refused(function, got):
    message = rf"function must map \(20, 2, 3\) to a tensor \(20, p\).* got {got}"
    with pytest.raises(setfold.InputError, match=message):
        JanossyPool(function, 3)(torch.randn(1, 5, 3))


def test_elements_of_the_models_dtype_are_wanted():
    with pytest.raises(setfold.InputError, match="floating point"):
        JanossyPool(Shape(), 3)(torch.ones(1, 5, 3, dtype=torch.long))


def test_a_mask_is_not_for_vmap():
    encoder = setfold.JanossyPool(nn.Flatten(), 3).double()
    with pytest.raises(setfold.InputError, match=r"torch\.vmap.*leave the mask out"):
        torch.func.vmap(encoder)(torch.ones(2, 1, 4, 3).double(), torch.ones(2, 1, 4).bool())
