from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from setfold.kernels import ragged


def rows_by_set(index, batch_size):
    """What the groups hold, by set; and how much of it is padding."""
    found, padding = {}, 0
    for sets, rows, mask in ragged.group_by_length(index, batch_size):
        shown = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
        padding += int((~shown).sum())
        for number, line, present in zip(sets.tolist(), rows, shown, strict=True):
            assert number not in found
            found[number] = line[present].tolist()
    return found, padding


@given(st.lists(st.integers(0, 6), max_size=40))
def test_every_row_is_in_its_set_once(index):
    found, padding = rows_by_set(torch.tensor(index, dtype=torch.long), 7)
    expected = {s: [i for i, j in enumerate(index) if j == s] for s in set(index)}
    assert found == expected
    assert padding == 0


def test_many_lengths_become_few_groups_with_little_padding():
    lengths = torch.arange(0, 300)
    index = torch.arange(300).repeat_interleave(lengths)
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    groups = list(ragged.group_by_length(index, 300))
    assert len(groups) < 60
    found, padding = rows_by_set(index, 300)
    assert [len(found.get(s, [])) for s in range(300)] == lengths.tolist()
    assert padding < 0.16 * len(index)
