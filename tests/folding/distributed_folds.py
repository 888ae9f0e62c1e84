"""Cases of distributed_jobs.py: setfold.fold over a group of processes."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.errors import DistributedError, InputError
from setfold.folding.source import fresh_seed, seeded
from tests.folding import distributed_gradients as shards
from tests.folding.distributed_gradients import (
    assert_gradients,
    assert_same_bits,
    averaged,
    own_loss,
)
from tests.folding.distributed_jobs import case, raises
from tests.small import TIGHT, draw, make

SEVERAL = {
    "set_transformer": lambda: setfold.SetTransformer(3, 8, 2, 3, num_layers=2),
    "equivariant": lambda: setfold.EquivariantDeepSets(3, [5, 4], head=nn.Linear(4, 2)),
    "slot_attention": lambda: setfold.SlotAttention(3, num_slots=3, dim=6, dim_hidden=7),
}
MODELS = shards.MODELS | {name: partial(shards.seeded, make) for name, make in SEVERAL.items()}


def chunks_of(shard):
    """Two elements at a time; none of an empty shard."""
    return shard.split(2, 1) if shard.shape[1] else []


def compare(rank, world, model, lengths=None, chunks=chunks_of, **options):
    """A fold over all processes is the whole set, in each of them, with its gradients."""
    model.zero_grad()
    elements = draw(2, 12, 3, seed=7)
    lengths = shards.uneven(12, world) if lengths is None else lengths
    expected, wanted, of_elements = shards.whole_gradients(
        model, lambda m, x: m(x), elements, world
    )
    shard = elements.split(lengths, 1)[rank].clone().requires_grad_()
    encoding = setfold.fold(model, chunks(shard), group=dist.group.WORLD, **options)
    assert_close(encoding.detach(), expected, **TIGHT)
    assert_same_bits(encoding)
    own_loss(encoding, rank).backward()
    assert_gradients(averaged(model, world), wanted)
    if not shard.numel():
        assert all(p.grad is not None for p in model.parameters())  # zeros, to be added to others
    else:
        assert_close(shard.grad / world, of_elements.split(lengths, 1)[rank], rtol=1e-9, atol=1e-11)


for _name, _make in MODELS.items():

    @case(f"fold_{_name}")
    def folded(rank, world, make_one=_make):
        compare(rank, world, make_one())
        compare(rank, world, make_one(), lengths=shards.empty_second(12, world))


@case()
def fold_in_other_ways(rank, world):
    for model in (shards.composition(), make(aggregate="max")):
        compare(rank, world, model, gradient="autograd")
        compare(rank, world, model, gradient="unbiased", samples=20)  # more than there are
        compare(rank, world, model, gradient="subset", samples=20)
        compare(rank, world, model, shards.only_last(12, world), gradient="unbiased", samples=20)
        compare(rank, world, model, chunks=lambda shard: shard)  # one tensor, perhaps without rows


@case()
def fold_without_gradients(rank, world):
    model, elements = make(aggregate=["mean", "max"]), draw(1, 12, 3)
    shard = elements.split(shards.empty_second(12, world), 1)[rank]
    with torch.no_grad():
        encoding = setfold.fold(model, iter(chunks_of(shard)), group=dist.group.WORLD)
    assert_close(encoding, model(elements), **TIGHT)


@case()
def fold_draws_slots_once_for_all(rank, world):
    model, elements = make().train(), draw(1, 12, 3)
    torch.manual_seed(0)  # as process 0 will
    with seeded(fresh_seed(), elements.device):
        expected = model(elements)
    torch.manual_seed(rank)
    shard = elements.split(shards.uneven(12, world), 1)[rank]
    encoding = setfold.fold(model, chunks_of(shard), group=dist.group.WORLD)
    assert_close(encoding, expected, **TIGHT)
    assert_same_bits(encoding)


@case()
def fold_of_ragged_shards(rank, world):
    model, rows = shards.composition(), draw(31, 3)
    index = torch.arange(31) ** 2 % 5
    expected, wanted, _ = shards.whole_gradients(
        model, lambda m, x: m(x, index=index, batch_size=6), rows, world
    )
    mine = slice(rank, None, world)
    pairs = list(zip(rows[mine].split(4), index[mine].split(4), strict=True))
    encoding = setfold.fold(model, pairs, batch_size=6, group=dist.group.WORLD)
    assert_close(encoding.detach(), expected, **TIGHT)
    own_loss(encoding, rank).backward()
    assert_gradients(averaged(model, world), wanted)


# ---- DistributedDataParallel -----------------------------------------------------------------


class Folds(nn.Module):
    def __init__(self, model, gradient="exact"):
        super().__init__()
        self.model = model
        self.gradient = gradient

    def forward(self, shard):
        chunks, group = chunks_of(shard), dist.group.WORLD
        return setfold.fold(self.model, chunks, gradient=self.gradient, group=group)


trained = partial(shards.trained, parallel=Folds)


@case()
def data_parallel_folds(rank, world):
    for lengths in (shards.uneven(12, world), shards.empty_second(12, world)):
        for name in ("composition", "slots_max", "attention_pool", "set_transformer"):
            trained(rank, world, lengths, MODELS[name])


@case()
def data_parallel_folds_in_many_buckets(rank, world):
    lengths = shards.only_last(12, world)
    for name in ("composition", "slots_mean", "equivariant"):
        trained(rank, world, lengths, MODELS[name], bucket_cap_mb=1e-4)
    kept = partial(Folds, gradient="autograd")
    shards.trained(rank, world, lengths, parallel=kept, bucket_cap_mb=1e-4)


# ---- failures --------------------------------------------------------------------------------


@case()
def fold_of_a_shard_that_cannot_be_read(rank, world):
    """Before the first chunk, after it, and in a later pass: all know at once, and can go on."""

    def torn(after):
        for number in range(4):
            if rank == 1 and number == after:
                raise OSError("the disk is gone")
            yield draw(1, 3, 3, seed=number)

    for after in (0, 2):
        expected = (
            (OSError, "the disk is gone") if rank == 1 else (DistributedError, "process 1 of")
        )
        for model in (make(), shards.seeded(SEVERAL["set_transformer"])):
            source = partial(torn, after)
            text = raises(*expected, setfold.fold, model, source, group=dist.group.WORLD)
            assert "the disk is gone" in text
    compare(rank, world, make())


@case()
def backward_of_a_shard_that_cannot_be_read_again(rank, world):
    """In the last of several passes, whose gradients the earlier ones wait for."""
    model = shards.seeded(SEVERAL["set_transformer"])
    lost = []

    def torn():
        yield draw(1, 3, 3, seed=rank)
        if lost:
            raise OSError("the disk is gone")
        yield draw(1, 2, 3, seed=rank)

    encoding = setfold.fold(model, torn, group=dist.group.WORLD)
    lost += [rank] * (rank == 1)
    expected = (OSError, "the disk is gone") if rank == 1 else (DistributedError, "process 1 of")
    text = raises(*expected, encoding.sum().backward)
    assert "the disk is gone" in text
    compare(rank, world, make())


@case()
def backward_in_different_orders(rank, world):
    model, chunks = make(), [draw(1, 3, 3, seed=rank)]
    folds = [setfold.fold(model, chunks, group=dist.group.WORLD) for _ in range(2)]
    order = folds if rank == 0 else folds[::-1]
    raises(DistributedError, "same order", order[0].sum().backward)


@case()
def fold_in_different_ways_at_once(rank, world):
    model, chunks = make(), [draw(1, 3, 3, seed=rank)] * 2
    gradient = "exact" if rank else "subset"
    fold = partial(setfold.fold, model, chunks, group=dist.group.WORLD)
    raises(InputError, "gradient must be the same", fold, gradient=gradient)
    model.train(rank == 0)
    raises(InputError, "training must be the same", fold)


@case()
def dropout_differs_between_processes_that_began_alike(rank, world):
    torch.manual_seed(0)
    model = setfold.DeepSets(nn.Dropout(0.5), 3, "sum")
    shard = [torch.ones(1, 50, 3), torch.ones(1, 50, 3)]
    made = []
    model.features.register_forward_hook(lambda *args: made.append(args[-1].detach()))
    setfold.fold(model, shard, group=dist.group.WORLD)
    others = [torch.empty_like(made[0]) for _ in range(world)]
    dist.all_gather(others, made[0].contiguous())
    assert not torch.equal(others[0], others[1])


@case()
def fold_of_nothing_anywhere(rank, world):
    raises(InputError, "at least one chunk", setfold.fold, make(), [], group=dist.group.WORLD)
    compare(rank, world, make())


@case()
def fold_of_different_numbers_of_sets(rank, world):
    sets = 2 + (rank == world - 1)
    chunks = [draw(sets, 3, 3)]
    raises(InputError, "number of sets", setfold.fold, make(), chunks, group=dist.group.WORLD)
