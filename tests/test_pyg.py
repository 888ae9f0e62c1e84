"""Set encoders as aggregations of PyTorch Geometric, compared with calls group by group."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch_geometric.nn import GATConv, GINConv, GraphConv, MultiAggregation, SAGEConv

import setfold
from setfold.laws.gallery import DIM_IN, EXHIBITS
from setfold.pyg import SetAggregation
from tests.examples import run_program
from tests.small import TIGHT, draw, gradients, moved

GROUPS = 7  # of which one in the middle and the last have no rows
INDEX = torch.tensor([4, 0, 1, 4, 2, 2, 0, 4, 5, 4, 4, 2, 1, 4, 0, 2])
ENCODERS = {found.name: found.make for found in EXHIBITS if not found.wrong}
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 1], [1, 4, 4, 0, 1, 0, 0]])  # none leads to 2, 3 or 5


def rows(*shape, dtype=torch.float64):
    return draw(*shape).to(dtype).requires_grad_()


def one_by_one(encoder, x, index, groups):
    """Each group's encoding from a call of its own."""
    return torch.cat([encoder(x[index == g].unsqueeze(0)).flatten(1) for g in range(groups)])


def attention(width=4, **options):
    return moved(setfold.AttentionPool(width, 2, 3, **options))


# ---- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_group_is_encoded_as_if_alone(name, dtype):
    encoder = moved(ENCODERS[name]()).to(dtype)
    x = rows(len(INDEX), DIM_IN, dtype=dtype)
    found = SetAggregation(encoder)(x, INDEX, dim_size=GROUPS)
    expected = one_by_one(encoder, x, INDEX, GROUPS)
    single = dtype == torch.float32
    assert_close(found, expected, **({"rtol": 1e-6, "atol": 1e-6} if single else TIGHT))
    weights = [x, *encoder.parameters()]
    room = {"rtol": 1e-5, "atol": 1e-5} if single else TIGHT
    assert_close(gradients(found, weights), gradients(expected, weights), **room)


def test_groups_may_be_given_by_their_boundaries():
    aggregation, x = SetAggregation(attention()), rows(6, 4)
    index, ptr = torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([0, 3, 3, 5, 6])
    expected = aggregation(x, index)
    assert_close(aggregation(x, ptr=ptr), expected)
    assert_close(aggregation(x, index, ptr), expected)
    assert aggregation(x, index, dim_size=9).shape == (9, 6)


def test_without_groups_all_rows_are_one():
    encoder, x = attention(), rows(6, 4)
    assert_close(SetAggregation(encoder)(x), encoder(x.unsqueeze(0)).flatten(1))


@pytest.mark.parametrize("groups", [0, 3])
def test_without_rows_all_groups_are_empty(groups):
    aggregation, nothing = SetAggregation(attention()), torch.zeros(0, dtype=torch.long)
    found = aggregation(rows(0, 4), nothing, dim_size=groups)
    assert_close(found, torch.zeros(groups, 6, dtype=torch.float64))


@pytest.mark.parametrize(("shape", "dim"), [((16, 2, 4), 0), ((2, 3, 16, 4), -2), ((2, 16, 4), 1)])
def test_rows_may_lie_along_any_dimension_but_the_last(shape, dim):
    aggregation, x = SetAggregation(attention()), rows(*shape)
    found = aggregation(x, INDEX, dim_size=GROUPS, dim=dim).movedim(dim, 0).flatten(1, -2)
    each = x.movedim(dim, 0).flatten(1, -2).unbind(1)
    expected = [aggregation(one, INDEX, dim_size=GROUPS) for one in each]
    assert_close(found, torch.stack(expected, 1), **TIGHT)


def test_one_number_per_group_is_a_column():
    head = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    encoder = moved(setfold.Composition(setfold.Pool(4, "max"), head=head))
    found = SetAggregation(encoder)(rows(16, 4), INDEX)
    assert found.shape == (6, 1)


def test_random_slots_are_drawn_once_for_all_groups():
    torch.manual_seed(0)
    aggregation = SetAggregation(setfold.SlotSetEncoder(4, 3, 4, 5)).train()
    x = draw(2, 4).float().repeat(2, 1)
    left, right = aggregation(x, torch.tensor([0, 0, 1, 1]))
    assert_close(left, right)
    assert not torch.equal(left, aggregation(x, torch.tensor([0, 0, 1, 1]))[0])


def test_autocast_may_round_the_rows():
    aggregation, x = SetAggregation(attention().float()), draw(16, 4).float()
    with torch.autocast("cpu", torch.float16):
        found = aggregation(x.half(), INDEX)
    assert_close(found, aggregation(x.half().float(), INDEX))


# ---- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((16, 4), INDEX, None, None, 1), "features come last.*dim=1"),
        (((16,), INDEX, None, None, 0), "unsqueeze"),
        (((16, 3), INDEX, None, None, 0), r"must be \(N, 4\); got \(16, 3\)"),
        (((15, 4), INDEX, None, None, 0), "set of each element"),
        (((16, 4), INDEX, None, 4, 0), "index must be in 0..3 for 4 sets; found 5"),
        (((16, 4), None, torch.tensor([0, 9, 15]), None, 0), "from 0 to 16"),
        (((16, 4), None, torch.tensor([0, 9, 3, 16]), None, 0), "from 0 to 16"),
        (((16, 4), None, torch.tensor([], dtype=torch.long), None, 0), "from 0 to 16"),
        (((16, 4), None, torch.tensor([0.0, 16.0]), None, 0), "ptr must be integers"),
        (((16, 4), INDEX + 0.5, None, None, 0), "index must be integers"),
        (((16, 4), INDEX > 2, None, None, 0), "index must be integers"),
    ],
)
def test_what_does_not_fit_raises(arguments, message):
    shape, *others = arguments
    with pytest.raises(setfold.InputError, match=message):
        SetAggregation(attention())(rows(*shape), *others)


def test_only_set_encoders_are_taken():
    with pytest.raises(setfold.InputError, match=r"set encoder of setfold.*Linear"):
        SetAggregation(nn.Linear(4, 4))


# ---- in networks -----------------------------------------------------------------------------


def convolutions():
    with_head = setfold.Composition(setfold.AttentionPool(4, 2, 3), head=Flat(6, 4))
    return {
        "SAGEConv": (SAGEConv, (4, 5), with_head),
        "SAGEConv, pair of widths": (SAGEConv, ((6, 4), 5), setfold.AttentionPool(4, 2, 3)),
        "GINConv": (GINConv, (nn.Linear(4, 5),), with_head),
        "GraphConv": (GraphConv, (4, 4), with_head),
    }


class Flat(nn.Linear):
    """A linear layer on all numbers of a readout."""

    def forward(self, readout):
        return super().forward(readout.flatten(1))


@pytest.mark.parametrize("name", convolutions())
def test_a_convolution_aggregates_its_messages(name):
    kind, arguments, encoder = convolutions()[name]
    conv = moved(kind(*arguments, aggr=SetAggregation(encoder)))
    x, seen = rows(6, 4), []
    conv.aggr_module.register_forward_hook(lambda _, given, found: seen.append((given[0], found)))
    conv(x, EDGES).sum().backward()
    (messages, found) = seen[0]
    assert_close(found, one_by_one(encoder, messages, EDGES[1], 6), **TIGHT)
    assert all(p.grad is not None and p.grad.any() for p in encoder.parameters())
    shuffled = EDGES[:, torch.randperm(7)]
    assert_close(conv(x, shuffled), conv(x, EDGES), **TIGHT)


def test_heads_of_attention_are_aggregated_apart():
    encoder = moved(setfold.AttentionPool(5, 1, 5))
    conv = GATConv(4, 5, heads=2, bias=False, aggr=SetAggregation(encoder)).double()
    assert conv(rows(6, 4), EDGES).shape == (6, 10)


@pytest.mark.parametrize("mode", ["cat", "sum", "proj"])
def test_it_is_one_of_several(mode):
    encoder = attention(num_heads=1)
    widths = {"in_channels": [4, 6, 4], "out_channels": 3} if mode == "proj" else {}
    if mode != "cat" and mode != "proj":
        encoder = moved(setfold.Pool(4, "max"))
    several = MultiAggregation(["mean", SetAggregation(encoder), "max"], None, mode, widths)
    several, x = several.double(), rows(16, 4)
    found = several(x, INDEX, dim_size=GROUPS)
    parts = [one(x, INDEX, dim_size=GROUPS) for one in several.aggrs]
    expected = {
        "cat": lambda: torch.cat(parts, 1),
        "sum": lambda: sum(parts),
        "proj": lambda: several.lin(torch.cat(parts, 1)),
    }
    assert_close(found, expected[mode](), **TIGHT)


def test_it_is_a_module_like_others():
    aggregation = SetAggregation(attention())
    assert repr(aggregation) == "SetAggregation(AttentionPool)"
    twin = copy.deepcopy(aggregation)
    for name, weight in aggregation.state_dict().items():
        assert name.startswith("encoder.")
        assert weight.data_ptr() != twin.state_dict()[name].data_ptr()
    x = draw(16, 4)
    with torch.no_grad():
        twin.encoder.queries.add_(1)
    assert not torch.equal(twin(x, INDEX), aggregation(x, INDEX))
    twin.load_state_dict(aggregation.state_dict())
    assert torch.equal(twin(x, INDEX), aggregation(x, INDEX))
    assert twin.float()(x.float(), INDEX).dtype == torch.float32


def test_a_reset_restores_the_weights_that_were_given():
    encoder, x = attention(), draw(16, 4)
    before = encoder(x.unsqueeze(0))
    conv = SAGEConv((6, 4), 5, aggr=SetAggregation(encoder)).double()  # resets
    assert torch.equal(encoder(x.unsqueeze(0)), before)
    with torch.no_grad():
        encoder.queries.add_(1)
    assert not torch.equal(encoder(x.unsqueeze(0)), before)
    conv.reset_parameters()
    assert torch.equal(encoder(x.unsqueeze(0)), before)


def test_the_encoder_is_saved_and_loaded_by_itself(tmp_path):
    aggregation, x = SetAggregation(attention()), draw(16, 4)
    setfold.save(aggregation.encoder, tmp_path / "encoder.safetensors")
    loaded = SetAggregation(setfold.load(tmp_path / "encoder.safetensors"))
    assert torch.equal(loaded(x, INDEX), aggregation(x, INDEX))


def test_the_example_of_graphs_runs(capsys):
    run_program("graphs.py", 100, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(0 <= float(line.split()[-1]) <= 1 for line in lines)
