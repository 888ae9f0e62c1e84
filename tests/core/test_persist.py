from __future__ import annotations

import json
import os
import stat
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file

import setfold
from setfold.core import persist as files
from setfold.core.persist import digest_of

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bias": torch.tensor([1.5, -2.0], dtype=torch.float64),
}


def test_digest_is_the_same_on_every_machine_and_day():
    assert digest_of(TENSORS, "words") == "1ce0845ea55e6a35b8d75213f6f98f3b"


def test_digest_does_not_depend_on_order_or_memory_layout():
    backwards = dict(reversed(TENSORS.items()))
    assert digest_of(backwards) == digest_of(TENSORS)
    strided = TENSORS["weight"].t().contiguous().t()
    assert not strided.is_contiguous()
    assert digest_of({**TENSORS, "weight": strided}) == digest_of(TENSORS)
    tracked = TENSORS["weight"].clone().requires_grad_()
    assert digest_of({**TENSORS, "weight": tracked}) == digest_of(TENSORS)


def test_digest_differs_by_name_type_shape_value_and_words():
    zeros = torch.zeros(2, 3)
    changed = zeros.clone()
    changed[1, 2] = -0.0  # equal to 0.0, but not the same
    digests = {
        digest_of({"a": zeros}),
        digest_of({"b": zeros}),
        digest_of({"a": zeros.double()}),
        digest_of({"a": zeros.int()}),
        digest_of({"a": zeros.reshape(3, 2)}),
        digest_of({"a": zeros[:1]}),
        digest_of({"a": changed}),
        digest_of({"a": zeros, "b": zeros[:0]}),
        digest_of({"a": zeros}, "word"),
        digest_of({"a": zeros}, "word", ""),
        digest_of({}),
    }
    assert len(digests) == 11


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float16),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.ones(1, 3).expand(4, 3),
    ],
    ids=["scalar", "bool", "empty", "bfloat16", "float16", "strided", "expanded"],
)
def test_every_kind_of_tensor_comes_back_as_it_was(tmp_path, tensor):
    files.write(tmp_path / "file", "state", {"t": tensor}, {"some": ["words", 3, None]})
    kind, tensors, description = files.read(tmp_path / "file")
    assert kind == "state"
    assert tensors["t"].dtype == tensor.dtype
    assert torch.equal(tensors["t"], tensor)
    assert description == {"some": ["words", 3, None]}


def test_any_safetensors_reader_can_read_a_file(tmp_path):
    files.write(tmp_path / "file", "model", TENSORS, {"some": "words"})
    with safe_open(tmp_path / "file", "pt") as file:
        assert sorted(file.keys()) == ["bias", "weight"]
        head = json.loads(file.metadata()["setfold"])
    assert (head["kind"], head["version"]) == ("model", 1)
    assert head["description"] == {"some": "words"}


def test_the_same_content_is_the_same_file(tmp_path):
    for name in "ab":
        files.write(tmp_path / name, "model", TENSORS, {"some": "words", "and": [1.5, None]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


HEAD = {"kind": "state", "version": 1, "description": {}, "checksum": ""}
HEADS = ["{", "", "3", "[]", '"state"', "{}", '{"version": 1}', "null", "[" * 100_000]
HEADS += [json.dumps(HEAD | change) for change in ({"version": True}, {"version": "1"})]
HEADS += [json.dumps(HEAD | change) for change in ({"kind": 1}, {"description": []}, {"more": 1})]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[:20])
def test_a_header_that_cannot_be_read_is_a_file_error(tmp_path, head):
    save_file(TENSORS, tmp_path / "file", {"setfold": head})
    with pytest.raises(setfold.FileError, match="its header cannot be read"):
        files.read(tmp_path / "file")


def test_one_entry_more_is_a_file_error(tmp_path):
    files.write(tmp_path / "file", "state", TENSORS, {})
    with safe_open(tmp_path / "file", "pt") as file:
        metadata = file.metadata()
    save_file(TENSORS, tmp_path / "file", metadata)
    assert files.read(tmp_path / "file")[0] == "state"
    save_file(TENSORS, tmp_path / "file", metadata | {"more": ""})
    with pytest.raises(setfold.FileError, match="its header cannot be read"):
        files.read(tmp_path / "file")


def test_a_written_file_has_the_rights_of_an_ordinary_one(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "file", "state", TENSORS, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_readers_see_the_old_file_or_the_new_one_but_no_mixture(tmp_path):
    path, done = tmp_path / "file", threading.Event()
    seen = []

    def write(number):
        files.write(path, "state", {"n": torch.full((50_000,), number)}, {})

    def keep_reading():
        while not done.is_set():
            seen.append(path.read_bytes())

    write(0)
    reader = threading.Thread(target=keep_reading)
    reader.start()
    number = 0
    while number < 60 or (len(seen) < 2 and reader.is_alive()):  # it may be slow to start
        write(number % 7)
        number += 1
    done.set()
    reader.join()
    assert len(seen) > 1
    for content in set(seen):
        assert len(load(content)["n"].unique()) == 1  # refuses what was cut short
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
