"""Cases of distributed_jobs.py: a set in shards is the set, and its gradients are the set's."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import setfold
from setfold.errors import InputError
from setfold.folding.merge import all_merge
from tests.folding.distributed_jobs import case, raises
from tests.small import AGGREGATES, TIGHT, draw, make, moved

# ---- comparing with one process --------------------------------------------------------------


def uneven(number, world):
    """Shards of 1, 2, 3, ... elements; the rest for the last process."""
    first = list(range(1, world))
    return [*first, number - sum(first)]


def own_loss(encoding, rank):
    """What only this process wants."""
    return (encoding * draw(*encoding.shape, seed=100 + rank)).sum()


def whole_gradients(model, encode, elements, world, times=1):
    """The encoding in one process, and the gradients of the mean of all processes' losses."""
    elements = elements.clone().requires_grad_()
    encoding = encode(model, elements)
    losses = [own_loss(encoding, rank) for rank in range(world)]
    (times * sum(losses) / world).backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return encoding.detach(), named, elements.grad


def averaged(model, world):
    """The gradients as DistributedDataParallel would make them."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        grad = grad.contiguous()  # gloo reduces only such tensors
        dist.all_reduce(grad)
        found[name] = grad / world
    return found


def assert_same_bits(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    assert all(torch.equal(row, rows[0]) for row in rows)


def assert_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        wanted = torch.zeros_like(found[name]) if grad is None else grad
        assert_close(found[name], wanted, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")


def compare(rank, world, model, *, lengths=None, sets=1, number=12, times=1, elements=None):
    """A set in shards is what it is in one process: encoding, gradients of weights and elements."""
    elements = draw(sets, number, 3, seed=7) if elements is None else elements
    lengths = uneven(elements.shape[1], world) if lengths is None else lengths
    expected, wanted, of_elements = whole_gradients(
        model, lambda m, x: m(x), elements, world, times
    )
    shard = elements.split(lengths, 1)[rank].clone().requires_grad_()
    state = all_merge(model.update(model.initial_state(elements.shape[0]), shard))
    assert state.count.tolist() == [elements.shape[1]] * elements.shape[0]
    assert state.count.dtype == torch.int64
    encoding = model.readout(state)
    assert_close(encoding.detach(), expected, **TIGHT)
    assert_same_bits(encoding)
    for time_ in range(times):
        own_loss(encoding, rank).backward(retain_graph=time_ + 1 < times)
    assert_gradients(averaged(model, world), wanted)
    if shard.numel():
        own = of_elements.split(lengths, 1)[rank]
        assert_close(shard.grad / world, own, **TIGHT)
    else:
        assert all(p.grad is not None for p in model.parameters())  # zeros, to be added to others


# ---- gradients -------------------------------------------------------------------------------


def composition():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    encoder = setfold.SlotSetEncoder(4, 3, 5, 6, aggregate=["weighted_mean", "max"])
    head = nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 2))
    return moved(setfold.Composition(encoder, features, head))


def hierarchy():
    torch.manual_seed(0)
    first = setfold.SlotSetEncoder(3, 4, 5, 6)
    second = setfold.SlotSetEncoder(first.dim_readout, 2, 5, 6, slots="learned")
    return moved(setfold.HierarchicalSlotSetEncoder([first, second], nn.Tanh()))


def concat():
    parts = {
        "max": setfold.Pool(3, "max"),
        "slots": setfold.SlotSetEncoder(3, 4, 6, 5, aggregate="weighted_mean"),
        "softmax": setfold.AttentionPool(3, num_queries=2, dim_out=4),
        "moments": setfold.Moments(3),
    }
    return setfold.Concat(parts)


def seeded(make_one):
    torch.manual_seed(0)
    return moved(make_one())


MODELS = {
    **{
        f"slots_{'+'.join([a] if isinstance(a, str) else a)}": partial(make, aggregate=a)
        for a in AGGREGATES
    },
    "learned_slots": partial(make, slots="learned"),
    "attention_pool": partial(seeded, lambda: setfold.AttentionPool(3, 4, 8, 2)),
    "gated_attention_pool": partial(seeded, lambda: setfold.GatedAttentionPool(3, 5, 2)),
    "moments": partial(seeded, lambda: setfold.Moments(3)),
    "pool": partial(seeded, lambda: setfold.Pool(3, ["max", "min", "mean"])),
    "hierarchy": hierarchy,
    "composition": composition,
    "concat": partial(seeded, concat),
}


def only_last(number, world):
    return [*[0] * (world - 1), number]


def empty_second(number, world):
    return [number - 2 * (world - 2), 0, *[2] * (world - 2)]


for _name, _make in MODELS.items():

    @case(f"whole_{_name}")
    def whole(rank, world, make_one=_make):
        compare(rank, world, make_one())

    @case(f"second_empty_{_name}")
    def second_empty(rank, world, make_one=_make):
        compare(rank, world, make_one(), lengths=empty_second(12, world))


@case()
def all_but_the_last_are_empty(rank, world):
    for model in (make(aggregate="max"), composition(), MODELS["attention_pool"]()):
        compare(rank, world, model, lengths=only_last(12, world))


@case()
def several_sets(rank, world):
    for model in (make(), composition(), MODELS["attention_pool"](), MODELS["moments"]()):
        compare(rank, world, model, sets=5)


@case()
def backward_twice(rank, world):
    compare(rank, world, composition(), times=2)


@case()
def ragged(rank, world):
    model, sets = composition(), 6
    rows, index = draw(31, 3), torch.arange(31) ** 2 % 5  # set 5 is empty, others here and there
    lengths = uneven(31, world)
    expected, wanted, of_rows = whole_gradients(
        model, lambda m, x: m(x, index=index, batch_size=sets), rows, world
    )
    shard = rows.split(lengths)[rank].clone().requires_grad_()
    begun = model.initial_state(sets)
    state = all_merge(model.update(begun, shard, index=index.split(lengths)[rank]))
    assert state.count.tolist() == torch.bincount(index, minlength=sets).tolist()
    encoding = model.readout(state)
    assert_close(encoding.detach(), expected, **TIGHT)
    assert_same_bits(encoding)
    own_loss(encoding, rank).backward()
    assert_gradients(averaged(model, world), wanted)
    assert_close(shard.grad / world, of_rows.split(lengths)[rank], **TIGHT)


@case()
def one_of_equal_maxima_gets_the_gradient(rank, world):
    for aggregate in ("max", "min"):
        model = setfold.Pool(3, aggregate).double()
        shard = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
        encoding = model.readout(all_merge(model.update(model.initial_state(), shard)))
        (encoding.sum() / world).backward()
        grads = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(grads, shard.grad)
        total = torch.cat(grads, 1)
        assert_close(total.sum(1), torch.ones(1, 3, dtype=torch.float64), **TIGHT)
        assert (total != 0).sum(1).tolist() == [[1, 1, 1]]


@case()
def one_has_no_loss(rank, world):
    model, elements = composition(), draw(1, 12, 3)
    model(elements).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    shard = elements.split(uneven(12, world), 1)[rank]
    encoding = model.readout(all_merge(model.update(model.initial_state(), shard)))
    loss = (encoding * 0).sum() if rank else encoding.square().sum()
    loss.backward()
    found = {name: world * grad for name, grad in averaged(model, world).items()}
    assert_gradients(found, wanted)


@case()
def several_passes(rank, world):
    """In each pass the empty process must wait for the others, though it looks at nothing."""
    torch.manual_seed(0)
    layers = [setfold.SetNorm(3), setfold.ISAB(3, 2, 1)]
    model = moved(setfold.LayeredSetEncoder(layers, setfold.Pool(3, "mean")))
    elements, lengths = draw(2, 12, 3), empty_second(12, world)
    expected, wanted, of_elements = whole_gradients(model, lambda m, x: m(x), elements, world)
    shard = elements.split(lengths, 1)[rank].clone().requires_grad_()
    found = ()
    for _ in range(model.passes):
        stage, state = model.begin(found, 2)
        state = all_merge(stage.update(state, shard))
        found = (*found, stage.readout(state))
    encoding = model.conclude(found, state.count)
    assert_close(encoding.detach(), expected, **TIGHT)
    own_loss(encoding, rank).backward()
    assert_gradients(averaged(model, world), wanted)
    if shard.numel():
        assert_close(shard.grad / world, of_elements.split(lengths, 1)[rank], **TIGHT)


@case()
def random_slots_of_one_seed(rank, world):
    model, elements = make().train(), draw(1, 12, 3)

    def begun():
        return model.initial_state(generator=torch.Generator().manual_seed(3))

    expected, wanted, _ = whole_gradients(
        model, lambda m, x: m.readout(m.update(begun(), x)), elements, world
    )
    shard = elements.split(uneven(12, world), 1)[rank]
    encoding = model.readout(all_merge(model.update(begun(), shard)))
    assert_close(encoding.detach(), expected, **TIGHT)
    own_loss(encoding, rank).backward()
    assert_gradients(averaged(model, world), wanted)


# ---- DistributedDataParallel -----------------------------------------------------------------


class Sharded(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, shard):
        state = self.model.update(self.model.initial_state(shard.shape[0]), shard)
        return self.model.readout(all_merge(state))


def trained(rank, world, lengths, make_one=composition, parallel=Sharded, **options):
    """Three steps in shards are three steps on the whole set; the buckets change after the first."""
    whole, model = make_one(), make_one()
    sharded = DistributedDataParallel(parallel(model), **options)
    steps = (
        torch.optim.SGD(sharded.parameters(), lr=0.05),
        torch.optim.SGD(whole.parameters(), lr=0.05),
    )
    for step in range(3):
        elements = draw(2, 12, 3, seed=step)
        expected = whole(elements)
        (sum(own_loss(expected, r) for r in range(world)) / world).backward()
        encoding = sharded(elements.split(lengths, 1)[rank])
        assert_close(encoding, expected, **TIGHT)
        own_loss(encoding, rank).backward()
        assert_gradients(
            {name: p.grad for name, p in model.named_parameters()},
            {name: p.grad for name, p in whole.named_parameters()},
        )
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()


@case()
def data_parallel(rank, world):
    trained(rank, world, uneven(12, world))


@case()
def data_parallel_with_an_empty_shard(rank, world):
    for lengths in (empty_second(12, world), only_last(12, world)):
        trained(rank, world, lengths)


@case()
def data_parallel_looking_for_unused_parameters(rank, world):
    for lengths in (uneven(12, world), empty_second(12, world), only_last(12, world)):
        trained(rank, world, lengths, find_unused_parameters=True)


@case()
def data_parallel_in_many_buckets(rank, world):
    """Gradients are sent as they come, and must not meet those of the states on the way.

    The weights of a readout are ready before the states', unless something makes them wait.
    """
    options = {"bucket_cap_mb": 1e-4, "find_unused_parameters": True}
    for make_one in (composition, partial(make, aggregate="mean"), MODELS["attention_pool"]):
        trained(rank, world, empty_second(12, world), make_one, **options)
    trained(rank, world, empty_second(12, world), bucket_cap_mb=1e-4)


# ---- without gradients -----------------------------------------------------------------------


@case()
def without_gradients(rank, world):
    elements = draw(1, 40, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        for model in (make(aggregate=["mean", "max"]), MODELS["attention_pool"]()):
            with mode():
                state = model.initial_state()
                for row in elements.split(1, 1)[rank::world]:
                    state = model.update(state, row)
                state = all_merge(state)
                encoding = model.readout(state)
                assert_close(encoding, model(elements), **TIGHT)
                assert_same_bits(encoding)
            assert not encoding.requires_grad


@case()
def states_of_inference_mode_with_gradients(rank, world):
    model, elements = make(), draw(1, 12, 3)
    with torch.inference_mode():
        state = model.update(model.initial_state(), elements[:, rank : rank + 1])
    state = model.update(all_merge(state), elements[:, world:])
    encoding = model.readout(state)
    assert_close(encoding, model(elements), **TIGHT)
    encoding.sum().backward()


@case()
def a_state_from_a_file(rank, world):
    """It has no live weights."""
    model, elements = make(aggregate=["max", "mean"]), draw(1, 12, 3)
    with torch.no_grad():
        state = model.update(model.initial_state(), elements.split(uneven(12, world), 1)[rank])
        if rank == world - 1:
            with tempfile.TemporaryDirectory() as folder:
                state.save(Path(folder, "state"))
                state = setfold.SetState.load(Path(folder, "state"))
        assert_close(model.readout(all_merge(state)), model(elements), **TIGHT)


@case()
def no_sets_at_all(rank, world):
    model = make()
    state = all_merge(model.update(model.initial_state(0), torch.zeros(0, 4, 3).double()))
    assert model.readout(state).shape[0] == 0


@case()
def the_merged_state_goes_on(rank, world):
    """It is a state like any other: it takes more elements, and merges once more."""
    model, elements = make(aggregate="max"), draw(1, 12, 3)
    state = all_merge(model.update(model.initial_state(), elements[:, rank : rank + 1]))
    state = model.update(state, elements[:, world:])
    assert_close(model.readout(state), model(elements), **TIGHT)
    assert state.weights.are_of(model)


@case()
def a_part_of_the_processes(rank, world):
    members = [0, world - 1]
    group = dist.new_group(members)
    model, elements = make(), draw(1, 12, 3)
    state = model.update(model.initial_state(), elements.split(uneven(12, world), 1)[rank])
    if rank in members:
        merged = all_merge(state, group)
        shards = elements.split(uneven(12, world), 1)
        expected = model(torch.cat([shards[0], shards[-1]], 1))
        assert_close(model.readout(merged), expected, **TIGHT)
    else:
        raises(InputError, "not in the process group", all_merge, state, group)
