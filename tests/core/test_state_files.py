from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

import setfold
from setfold.core import persist as files
from setfold.core.state import SetState
from setfold.core.state_files import describe_fields, fields_from
from setfold.core.statistic import CentralMoments, Field, Max, Softmax
from tests.small import AGGREGATES, TIGHT, assert_same_state, contextual, draw, make

ENCODERS = {
    **{str(a): lambda a=a: make(aggregate=a) for a in AGGREGATES},
    "learned": lambda: make(slots="learned"),
    "pool": lambda: setfold.Pool(3, ["mean", "max"]).double(),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder(
        [make(), setfold.SlotSetEncoder(5, 2, 6, 3).double()]
    ).eval(),
}


@pytest.fixture
def encoder():
    return make()


@pytest.fixture
def saved(tmp_path, encoder):
    path = tmp_path / "state.safetensors"
    encoder.update(encoder.initial_state(2), draw(2, 5, 3)).save(path)
    return path


def header_length(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# ---- round trips ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_a_loaded_state_is_the_one_saved(tmp_path, name):
    model = ENCODERS[name]()
    state = model.update(model.initial_state(2), draw(2, 5, 3))
    state.save(str(tmp_path / "state"))
    loaded = SetState.load(str(tmp_path / "state"))
    assert_same_state(loaded, state)
    for name, parts in state.statistics.items():
        assert all(map(torch.equal, loaded.statistics[name], parts))  # to the last bit
    assert_close(model.readout(loaded), model.readout(state), **TIGHT)
    more = draw(2, 3, 3, seed=1)
    expected = model.readout(model.update(state, more))
    assert_close(model.readout(model.update(loaded, more)), expected, **TIGHT)
    merged = state.merge(state)
    assert_same_state(loaded.merge(state), merged)
    assert_same_state(state.merge(loaded), merged)
    assert_same_state(loaded.merge(loaded), merged)


def test_context_and_own_slots_are_saved(tmp_path):
    encoder = contextual()
    encoder.train()
    states = [encoder.initial_state(context=draw(1, 2, seed=i)) for i in range(2)]
    state = encoder.update(SetState.stack(states), draw(2, 3, 3))
    state.save(tmp_path / "state")
    loaded = SetState.load(tmp_path / "state")
    assert_same_state(loaded, state)
    assert torch.equal(loaded.context[0], state.context[0])


def test_no_sets_are_saved_too(tmp_path, encoder):
    encoder.initial_state(0).save(tmp_path / "state")
    assert len(SetState.load(tmp_path / "state")) == 0


def test_slots_that_share_memory_are_saved(tmp_path):
    model, slots = ENCODERS["hierarchy"](), draw(4, 6)
    state = model.initial_state(slots=[slots, slots])
    state.save(tmp_path / "state")
    assert_same_state(SetState.load(tmp_path / "state"), state)


def test_a_loaded_state_of_another_model_is_refused(saved):
    loaded = SetState.load(saved)
    with pytest.raises(setfold.StateMismatchError, match="weights differ"):
        make(seed=1).update(loaded, draw(2, 5, 3))
    with pytest.raises(setfold.StateMismatchError, match=r"its fields \(sum\)"):
        make(aggregate="max").readout(loaded)


# ---- files that are not as they should be --------------------------------------------------


def test_a_file_cut_short_anywhere_is_a_file_error(tmp_path, saved):
    content, cut = saved.read_bytes(), tmp_path / "cut"
    for length in [*range(0, len(content), 7), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(setfold.FileError, match="truncated"):
            SetState.load(cut)


@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_anywhere_is_a_file_error(tmp_path, saved, bit):
    content, flipped = saved.read_bytes(), tmp_path / "flipped"
    unnoticed = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= bit
        flipped.write_bytes(damaged)
        with contextlib.suppress(setfold.FileError):  # any other error fails the test
            SetState.load(flipped)
            unnoticed.append(place)
    assert not unnoticed, bytes(content[place] for place in unnoticed)


def test_a_flipped_bit_in_the_data_is_called_corrupt(saved):
    content = bytearray(saved.read_bytes())
    content[header_length(saved) + 3] ^= 1
    saved.write_bytes(content)
    with pytest.raises(setfold.FileError, match="corrupt: its checksum"):
        SetState.load(saved)


def test_an_empty_file_is_a_file_error(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(setfold.FileError, match="truncated"):
        SetState.load(tmp_path / "empty")


@pytest.mark.parametrize("content", [b"not a state", bytes(1000), b"\xff" * 1000, b"PK\3\4" * 99])
def test_any_other_file_is_a_file_error(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(setfold.FileError, match="not a safetensors file"):
        SetState.load(tmp_path / "other")


def test_a_foreign_safetensors_file_is_a_file_error(tmp_path):
    save_file({"count": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(setfold.FileError, match=r"setfold did not write it.*state\.save"):
        SetState.load(tmp_path / "foreign")


def test_a_model_is_not_a_state(tmp_path, encoder):
    setfold.save(encoder, tmp_path / "model")
    with pytest.raises(setfold.FileError, match="contains a setfold model; expected a state"):
        SetState.load(tmp_path / "model")


def test_another_version_is_a_file_error(tmp_path, monkeypatch, encoder):
    monkeypatch.setattr(files, "FORMAT_VERSION", 99)
    encoder.initial_state().save(tmp_path / "state")
    monkeypatch.undo()
    with pytest.raises(setfold.FileError, match="format version 99; this version of setfold"):
        SetState.load(tmp_path / "state")


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"fields": {"sum": ["Sum", [2]]}},
        {"digest": ""},
        [],
        3,
        {"fields": 3, "digest": ""},
        {"fields": {"sum": ["Sum"]}, "digest": ""},
        {"fields": {"sum": ["Sum", 2]}, "digest": ""},
        {"fields": {"sum": ["Sum", [2]]}, "digest": 3},
        {"fields": {"sum": ["Sum", [True, 2]]}, "digest": "0" * 32},
        {"fields": {"sum": ["Sum", [-2]]}, "digest": "0" * 32},
        {"fields": {"sum": [["Sum"], [2]]}, "digest": "0" * 32},
        {"fields": {"sum": ["Sum", [2.0]]}, "digest": "0" * 32},
    ],
    ids=str,
)
def test_a_description_that_lacks_something_is_a_file_error(tmp_path, description):
    tensors = {"count": torch.zeros(1, dtype=torch.long), "sum.0": torch.zeros(1, 2)}
    files.write(tmp_path / "state", "state", tensors, description)
    with pytest.raises(setfold.FileError, match="corrupt"):
        SetState.load(tmp_path / "state")


def test_an_abstract_statistic_is_a_file_error(tmp_path):
    tensors = {"count": torch.zeros(1, dtype=torch.long), "sum.0": torch.zeros(1, 2).double()}
    description = {"fields": {"sum": ["Reduction", [2]]}, "digest": "0" * 32}
    files.write(tmp_path / "state", "state", tensors, description)
    with pytest.raises(setfold.FileError, match="not defined here"):
        SetState.load(tmp_path / "state")


def test_tensors_that_are_not_there_are_a_file_error(tmp_path):
    description = {"fields": {"sum": ["Sum", [2]]}, "digest": "0" * 32}
    files.write(tmp_path / "state", "state", {"sum.0": torch.zeros(1, 2)}, description)
    with pytest.raises(setfold.FileError, match="'count'"):
        SetState.load(tmp_path / "state")


SUM = torch.zeros(2, 3, dtype=torch.float64)
COUNT = torch.tensor([1, 2])
SLOTS = torch.zeros(1, 4, 6)
FORMS = {
    "negative count": {"count": torch.tensor([1, -1])},
    "fractional count": {"count": torch.tensor([1.0, 1.5])},
    "narrow count": {"count": torch.tensor([1, 2], dtype=torch.int32)},
    "boolean count": {"count": torch.tensor([True, True])},
    "complex count": {"count": torch.tensor([1j, 2j])},
    "counts overflow": {"count": torch.tensor([1 << 62, 1 << 62])},
    "one count": {"count": torch.tensor(1)},
    "counts of pairs": {"count": torch.tensor([[1], [2]])},
    "too few counts": {"count": torch.tensor([1])},
    "no count": {"count": None},
    "no part": {"sum.0": None},
    "one part more": {"sum.1": SUM},
    "another field": {"max.0": SUM},
    "something else": {"weight": SUM},
    "too narrow": {"sum.0": SUM[:, :2]},
    "too many sets": {"sum.0": torch.zeros(3, 3, dtype=torch.float64)},
    "integers": {"sum.0": SUM.long()},
    "half precision": {"sum.0": SUM.half()},
    "complex": {"sum.0": SUM.to(torch.complex64)},
    "NaN": {"sum.0": SUM + torch.nan},
    "infinite": {"sum.0": SUM + torch.inf},
    "flat slots": {"slots.0": SLOTS[0]},
    "slots of three sets": {"slots.0": torch.zeros(3, 4, 6)},
    "NaN slots": {"slots.0": SLOTS + torch.nan},
    "integer slots": {"slots.0": SLOTS.int()},
    "slots with a gap": {"slots.2": SLOTS},
    "a name like slots": {"slots.x": SLOTS},
    "context of three sets": {"context.0": torch.zeros(3, 1)},
    "context without sets": {"context.0": torch.tensor(1.0)},
    "context with a gap": {"context.1": torch.zeros(2, 1)},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_state_with_a_valid_checksum_must_have_the_right_form(tmp_path, name):
    description = {"fields": {"sum": ["Sum", [3]]}, "digest": "0" * 32}
    tensors = {"sum.0": SUM, "count": COUNT, "slots.0": SLOTS}
    files.write(tmp_path / "state", "state", tensors, description)
    assert len(SetState.load(tmp_path / "state")) == 2
    tensors = {n: t for n, t in (tensors | FORMS[name]).items() if t is not None}
    files.write(tmp_path / "state", "state", tensors, description)
    with pytest.raises(setfold.FileError, match="corrupt"):
        SetState.load(tmp_path / "state")


@pytest.mark.parametrize("name", ["slots", "context", "count", "slots.0", "context.more", "", ".x"])
def test_names_that_a_state_uses_itself_are_refused(tmp_path, name):
    class Named(setfold.Pool):
        def fields(self, frame):
            (field,) = super().fields(frame).values()
            return {name: field}

    with pytest.raises(setfold.InputError, match="cannot be named"):
        Named(3, "sum").initial_state()
    description = {"fields": {name: ["Sum", [3]]}, "digest": "0" * 32}
    files.write(tmp_path / "state", "state", {f"{name}.0": SUM, "count": COUNT}, description)
    with pytest.raises(setfold.FileError, match="cannot be named"):
        SetState.load(tmp_path / "state")


@pytest.mark.parametrize(
    "slots", [torch.zeros(1, 4, 9).double(), torch.zeros(1, 4, 6), torch.zeros(1, 3, 6).double()]
)
def test_slots_of_another_encoder_are_refused(tmp_path, encoder, slots):
    state = encoder.initial_state(2)
    tensors = state.tensors() | {"slots.0": slots}
    files.write(tmp_path / "state", "state", tensors, state.describe())
    with pytest.raises(setfold.StateMismatchError):
        encoder.readout(SetState.load(tmp_path / "state"))


def test_a_missing_file_is_a_file_error(tmp_path):
    for path in (tmp_path / "none", tmp_path / "no" / "folder"):
        with pytest.raises(setfold.FileError, match=f"{path} does not exist"):
            SetState.load(path)


def test_a_folder_is_a_file_error(tmp_path):
    with pytest.raises(setfold.FileError, match=str(tmp_path)):
        SetState.load(tmp_path)


# ---- saves that fail -----------------------------------------------------------------------


def test_saving_into_a_missing_folder_says_so(tmp_path, encoder):
    with pytest.raises(
        setfold.FileError, match=r"the folder .*none does not exist\. Create it first"
    ):
        encoder.initial_state().save(tmp_path / "none" / "state")


def test_saving_below_a_file_says_so(saved, encoder):
    with pytest.raises(setfold.FileError, match="folder"):
        encoder.initial_state().save(saved / "state")


def test_saving_over_a_folder_says_so(tmp_path, encoder):
    (tmp_path / "folder").mkdir()
    with pytest.raises(setfold.FileError, match="folder"):
        encoder.initial_state().save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace"), (Path, "chmod")])
@pytest.mark.parametrize("failure", [full_disk, interrupted])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    monkeypatch, encoder, saved, place, failure
):
    before = saved.read_bytes()
    monkeypatch.setattr(*place, failure)
    with pytest.raises((OSError, setfold.FileError, KeyboardInterrupt)):
        encoder.initial_state().save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_save_that_works_leaves_nothing_else(saved, encoder):
    encoder.initial_state().save(saved)
    assert list(saved.parent.iterdir()) == [saved]
    assert int(SetState.load(saved).count) == 0


def test_a_loaded_state_does_not_need_its_file(saved, encoder):
    loaded = SetState.load(saved)
    shutil.rmtree(saved.parent)
    assert encoder.readout(loaded).isfinite().all()


@pytest.mark.parametrize("grad", [True, False])
def test_a_state_can_be_saved_after_its_weights_have_changed(saved, grad):
    encoder = make()
    with torch.set_grad_enabled(grad):
        state = encoder.update(encoder.initial_state(2), draw(2, 5, 3))
    with torch.no_grad():
        encoder.to_key.weight.add_(1)
    state.save(saved)
    loaded = SetState.load(saved)
    assert_same_state(loaded, state)
    assert_close(make().readout(loaded), make().readout(state), **TIGHT)  # of the weights before
    with pytest.raises(setfold.StateMismatchError, match="weights differ"):
        encoder.readout(loaded)


def test_fields_are_described_and_found_again():
    fields = {
        "max": Field(Max(), (3,)),
        "softmax": Field(Softmax(), (1, 4)),
        "moments": Field(CentralMoments(), (3,)),
    }
    description = json.loads(json.dumps(describe_fields(fields)))
    assert fields_from(description) == fields
    assert description["moments"] == ["CentralMoments", [3]]
