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


def test_padded_sets_keep_their_rows_and_a_lonely_one_is_not_padded(monkeypatch):
    monkeypatch.setattr(ragged, "MAX_EXACT_LENGTHS", 3)
    lengths = torch.tensor([22, 0, 21, 22, 100, 1, 23, 1])
    index = torch.arange(8).repeat_interleave(lengths)
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    found, padding = rows_by_set(index, 8)
    assert padding == 4  # 21, 22, 22 rows in lines of 23
    for number, rows in found.items():
        assert rows == [i for i, j in enumerate(index.tolist()) if j == number]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 9), st.integers(1, 4))
def test_packs_hold_every_row_once_and_no_more_than_they_may(index, most_rows, most_sets):
    index = torch.tensor(index, dtype=torch.long)
    found = {}
    for pack in ragged.packs(ragged.group_by_length(index, 10), most_rows, most_sets):
        assert sum(piece.rows.numel() for piece in pack) <= most_rows
        assert sum(len(piece.sets) for piece in pack) <= most_sets
        for sets, rows, _ in pack:
            for number, line in zip(sets.tolist(), rows.tolist(), strict=True):
                found.setdefault(number, []).extend(line)
    expected = {s: (index == s).nonzero().squeeze(1).tolist() for s in set(index.tolist())}
    assert found == expected


def test_sets_beyond_sixteen_bits_are_told_apart():
    index = torch.randperm(70_000, generator=torch.Generator().manual_seed(0))
    ((sets, rows, mask),) = ragged.group_by_length(index, 70_000)
    assert mask is None
    assert torch.equal(sets, torch.arange(70_000))
    assert torch.equal(index[rows.squeeze(1)], sets)
