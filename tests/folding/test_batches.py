"""Ragged sets in a DataLoader: collated, and batched by a budget of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import setfold


def sets(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, generator=generator) for n in lengths]


def test_a_collated_batch_has_the_encodings_of_its_sets():
    given = sets([3, 0, 1, 7])
    batch = setfold.collate(given)
    model = setfold.SlotSetEncoder(3, 4, 6, 5).eval()
    found = model(batch.elements, index=batch.index, batch_size=batch.batch_size)
    expected = torch.cat([model(each[None]) for each in given])
    torch.testing.assert_close(found, expected)
    assert batch.labels is None


def test_labels_are_collated():
    given = sets([1, 2])
    assert setfold.collate([(x, n) for n, x in enumerate(given)]).labels.tolist() == [0, 1]
    labels = setfold.collate([(x, {"a": 0.5, "b": "name"}) for x in given]).labels
    assert labels["a"].tolist() == [0.5, 0.5]
    assert labels["b"] == ["name", "name"]


def test_arrays_become_tensors_of_the_default_dtype():
    batch = setfold.collate([np.ones((2, 3)), np.zeros((1, 3), np.float32)])
    assert batch.elements.dtype == torch.float32
    assert setfold.collate([np.ones((2, 3), np.int64)]).elements.dtype == torch.int64
    array = np.ones((1, 3), np.float32)
    batch = setfold.collate([array])
    array[:] = 5.0  # the batch has its own memory
    assert batch.elements.eq(1).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one"),
        ([torch.ones(2)], r"got \(2,\) for set 0"),
        ([torch.ones(1, 3), torch.ones(1, 2, 3)], r"\(1, 2, 3\) for set 1"),
        ([torch.ones(1, 3), torch.ones(1, 2)], "got 3 for set 0 and 2 for set 1"),
        ([torch.ones(1, 3), torch.ones(1, 3).double()], "same dtype"),
        ([torch.ones(1, 3), torch.ones(1, 3, device="meta")], "same device"),
        ([(torch.ones(1, 3), 0), torch.ones(1, 3)], "got both"),
        (["ab"], "set 0 must be a tensor; got str"),
        ([[1.0, 2.0]], "must be a tensor; got float"),
        ([None], "must be a tensor"),
    ],
)
def test_what_cannot_be_collated_is_refused(wrong, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.collate(wrong)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=30),
    rows=st.integers(1, 25),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_batches_keep_the_budget_and_cannot_be_joined(lengths, rows, shuffle, epoch):
    sampler = setfold.RowBatchSampler(lengths, rows=rows, shuffle=shuffle, seed=1)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert sorted(n for batch in batches for n in batch) == list(range(len(lengths)))
    cost = [sum(max(lengths[n], 1) for n in batch) for batch in batches]
    assert all(c <= rows or len(batch) == 1 for c, batch in zip(cost, batches, strict=True))
    firsts = [max(lengths[batch[0]], 1) for batch in batches]
    assert all(c + first > rows for c, first in zip(cost, firsts[1:], strict=False))  # greedy
    assert batches == list(sampler)


def test_epochs_have_different_orders_that_depend_on_the_seed():
    def orders(seed):
        sampler = setfold.RowBatchSampler([1] * 50, rows=8, shuffle=True, seed=seed)
        found = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    first, second, again = orders(0)
    assert first != second
    assert first == again
    assert orders(0) == [first, second, again]
    assert orders(1)[0] != first


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": [1.5]},
        {"lengths": [-1]},
        {"lengths": [[1]]},
        {"lengths": None},
        {"lengths": "ab"},
        {"lengths": [[1], [1, 2]]},
        {"rows": 0},
        {"rows": 2.0},
        {"rows": True},
        {"shuffle": 1},
        {"seed": -1},
        {"seed": "a"},
    ],
    ids=str,
)
def test_wrong_arguments_of_a_sampler(wrong):
    with pytest.raises(setfold.InputError):
        setfold.RowBatchSampler(**{"lengths": [1], "rows": 1} | wrong)
    with pytest.raises(setfold.InputError, match="epoch"):
        setfold.RowBatchSampler([1], rows=1).set_epoch(-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_gives_every_set_once(workers):
    lengths = [3, 0, 1, 30, 2, 2]
    data = list(zip(sets(lengths), range(6), strict=True))
    sampler = setfold.RowBatchSampler(lengths, rows=5, shuffle=True)
    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=setfold.collate, num_workers=workers
    )
    batches = list(loader)
    assert len(loader) == len(batches)
    for batch in batches:
        for place, label in enumerate(batch.labels.tolist()):
            torch.testing.assert_close(batch.elements[batch.index == place], data[label][0])
    assert sorted(torch.cat([batch.labels for batch in batches]).tolist()) == list(range(6))
