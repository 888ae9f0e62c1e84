"""Model files that describe more than they store, or something else than they store."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import setfold
from setfold.core import persist, structure
from setfold.core.models import DERIVED_BYTES
from tests.memory import linux_only
from tests.small import make

MANY = 10**7
HUGE = 10**9
RELU = {"class": "torch.nn.ReLU", "arguments": {}}
SLOTS = {"dim_in": 3, "num_slots": 4, "dim_slot": 6, "dim_out": 5}


def described(kind, /, **arguments):
    return {"class": kind, "arguments": arguments}


def crafted(path, structure, tensors=(), dtype="float32", **more):
    persist.write(path, "model", dict(tensors), {"structure": structure, "dtype": dtype, **more})
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# ---- descriptions of large models in small files -----------------------------------------------

HOSTILE = {
    "wide": described("torch.nn.Linear", in_features=20_000, out_features=20_000),
    "wide in memory": described(
        "torch.nn.Linear", in_features=20_000, out_features=20_000, device="cpu"
    ),
    "table": described("torch.nn.Embedding", num_embeddings=HUGE, embedding_dim=8),
    "deep": described("setfold.SetTransformer", dim_in=3, dim=4, num_heads=2, num_layers=MANY),
    "deep decoder": described(
        "setfold.SetTransformer", dim_in=3, dim=4, num_heads=2, num_decoder_layers=MANY
    ),
    "deep in full": described(
        "setfold.FullSetTransformer", dim_in=3, dim=4, num_heads=2, num_layers=MANY
    ),
    "recurrent": described("torch.nn.LSTM", input_size=2, hidden_size=2, num_layers=MANY),
    "recurrent base": described(
        "torch.nn.RNNBase", mode="GRU", input_size=2, hidden_size=2, num_layers=MANY
    ),
    "transformer": described("torch.nn.Transformer", d_model=4, nhead=2, num_encoder_layers=MANY),
    "copies of nothing": described(
        "torch.nn.TransformerEncoder", encoder_layer={"module": RELU}, num_layers=HUGE
    ),
    "slots": described("setfold.SlotSetEncoder", **{**SLOTS, "num_slots": HUGE}),
    "list": described("setfold.EquivariantDeepSets", dim_in=1, dims=[1] * 20_000),
    "number": described("torch.nn.Linear", in_features=10**4000, out_features=2),
    "text": described("setfold.Pool", dim_in=3, aggregate="x" * 1_000_000),
}

SCRIPT = """
import json, pathlib, resource, sys, torch, setfold
sys.path.insert(0, "")

def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

setfold.load(sys.argv[1])  # imports what loading needs
before = status("VmHWM")
for path in sys.argv[2:]:
    started = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        setfold.load(path)
        error = None
    except setfold.SetfoldError as refused:
        error = str(refused)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - started
    print(json.dumps([error, seconds, status("VmHWM") - before]))
"""


@linux_only
def test_a_small_file_takes_little_memory_and_time(tmp_path):
    setfold.save(setfold.SlotSetEncoder(**SLOTS), tmp_path / "good")
    paths = [crafted(tmp_path / name, structure) for name, structure in HOSTILE.items()]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "good"), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path, line in zip(paths, done.stdout.splitlines(), strict=True):
        error, seconds, memory = json.loads(line)
        assert error is not None, path
        assert len(error) < 2000
        assert seconds < 10  # of this process alone; the first takes minutes if it is not stopped
        assert memory < 100e6


def test_stopping_a_constructor_leaves_no_trace(path, monkeypatch):
    crafted(path, HOSTILE["deep"])
    for calls in range(100, 120):  # some of them are made within torch.no_grad
        monkeypatch.setattr(structure, "CALLS", calls)
        with pytest.raises(setfold.DescriptionError, match="far larger than the tensors"):
            setfold.load(path)
        assert torch.is_grad_enabled()
        assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("levels", [200, 2000, 200_000])
def test_nesting_is_a_model_or_an_error(path, levels):
    begin, end = '{"class": "torch.nn.Sequential", "children": [["0", ', "]]}"
    text = begin * levels + json.dumps(RELU) + end * levels
    head = {"kind": "model", "version": persist.FORMAT_VERSION}
    text = json.dumps({**head, "description": "?"}).replace(
        '"?"', f'{{"structure": {text}, "dtype": "float32"}}'
    )
    checksum = persist.digest_of({}, text)
    content = persist.save({}, {persist.HEADER: text[:-1] + f', "checksum": "{checksum}"}}'})
    path.write_bytes(content)
    if levels == 200:
        assert len(list(setfold.load(path).modules())) == levels + 1
    else:
        with pytest.raises(setfold.SetfoldError):
            setfold.load(path)


def test_a_header_of_any_length_is_not_parsed(path, monkeypatch):
    crafted(path, RELU)
    monkeypatch.setattr(persist, "MAX_HEADER", 100)
    with pytest.raises(setfold.FileError, match=r"header has .* characters; at most 100"):
        setfold.load(path)
    with pytest.raises(setfold.FileError, match=r"description has .* characters"):
        crafted(path, RELU)


def classes():
    for prefix, names, package in (
        ("torch.nn", dir(nn), nn),
        ("setfold", setfold.__all__, setfold),
    ):
        for name in names:
            kind = getattr(package, name)
            if inspect.isclass(kind) and issubclass(kind, nn.Module):
                yield f"{prefix}.{name}", kind


def arguments_of(kind):
    """Arguments for a class, one of them hostile: with the others left out, small, or lists."""
    layer = {"module": described("torch.nn.Linear", in_features=2, out_features=2)}
    encoder = {"module": described("setfold.Pool", dim_in=2)}
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.name != "device"]
    required = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    for argument in [p.name for p in parameters]:
        for value in (MANY, HUGE, [HUGE] * 3):
            for small in (2, layer, encoder, [2, 2]):
                yield {**dict.fromkeys(required, small), argument: value}
            yield {**{p.name: [2, 2] for p in parameters}, argument: value}


def test_no_constructor_of_torch_or_setfold_takes_memory_or_time(monkeypatch):
    monkeypatch.setattr(structure, "CALLS", 500)
    for name, kind in classes():
        for arguments in arguments_of(kind):
            try:
                blank = structure.sketch(described(name, **arguments), allow=set(), num_tensors=4)
            except setfold.DescriptionError:
                continue
            assert all(t.is_meta or t.numel() == 1 for t in blank.state_dict().values())


# ---- weights that are not those described --------------------------------------------------------


def weights(**changes):
    torch.manual_seed(0)
    return {**setfold.SlotSetEncoder(**SLOTS).state_dict(), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to_key.bias": torch.zeros(6)}, r"to_key\.bias would be \(5,\) float32; it is \(6,\)"),
        ({"to_key.bias": torch.zeros(5, dtype=torch.float64)}, r"to_key\.bias .* it is .*float64"),
        ({"to_key.bias": torch.zeros(5, dtype=torch.int64)}, r"to_key\.bias .* it is .*int64"),
        ({"slot_seed": torch.tensor(3.0)}, r"slot_seed would be \(\) int64; it is \(\) float32"),
        ({"slot_seed": torch.tensor([3])}, r"slot_seed would be \(\) int64; it is \(1,\)"),
        ({"slot_seed": torch.tensor(-1)}, "slot_seed must be from 0 to 2147483647; got -1"),
        ({"slot_seed": torch.tensor(2**31)}, "slot_seed must be from 0 to 2147483647"),
        ({"slot_noise": torch.zeros(4, 6)}, "slot_noise is not created"),
    ],
)
def test_each_weight_must_be_as_described(path, changes, message):
    crafted(path, described("setfold.SlotSetEncoder", **SLOTS), weights(**changes))
    with pytest.raises(setfold.FileError, match=message):
        setfold.load(path)


def test_a_missing_weight_is_named(path):
    tensors = weights()
    del tensors["to_key.bias"]
    crafted(path, described("setfold.SlotSetEncoder", **SLOTS), tensors)
    with pytest.raises(setfold.FileError, match=r"to_key\.bias is missing"):
        setfold.load(path)


@pytest.mark.parametrize("dtypes", [3, ["to_key.bias"], {"to_key.bias": "int64"}, {"a": ["b"]}])
def test_other_dtypes_must_be_listed_properly(path, dtypes):
    crafted(path, described("setfold.SlotSetEncoder", **SLOTS), weights(), dtypes=dtypes)
    with pytest.raises(setfold.FileError, match="its description is not valid"):
        setfold.load(path)


def test_noise_is_drawn_for_as_many_slots_as_fit(path):
    most = DERIVED_BYTES // (4 * SLOTS["dim_slot"])
    many = described("setfold.SlotSetEncoder", **{**SLOTS, "num_slots": most + 1})
    with pytest.raises(setfold.DescriptionError, match="noise of random slots"):
        setfold.load(crafted(path, many, weights()))
    encoder = setfold.SlotSetEncoder(**SLOTS)
    encoder.num_slots = most + 1  # as `resize` would, without the memory
    with pytest.raises(setfold.DescriptionError, match="noise of random slots"):
        setfold.save(encoder, path)


def test_the_noise_of_a_loaded_model_is_that_of_its_seed(path):
    encoder = make()
    setfold.save(encoder, path)
    torch.manual_seed(1)
    loaded = setfold.load(path)
    assert torch.equal(loaded.slot_noise, encoder.slot_noise)
    assert loaded.slot_noise.device.type == "cpu"


def test_a_seed_out_of_range_is_an_error_when_saving(path):
    encoder = make()
    encoder.slot_seed.fill_(-1)
    with pytest.raises(setfold.DescriptionError, match="slot_seed must be from 0"):
        setfold.save(encoder, path)
    with pytest.raises(RuntimeError, match="slot_seed must be from 0"):
        make().load_state_dict(encoder.state_dict())


@pytest.mark.parametrize("given", ["a.b", 5, [5], [["a.b"]], None])
def test_what_is_allowed_is_a_list_of_names(path, given):
    setfold.save(make(), path)
    if given is None or given == [["a.b"]]:
        given = 3.5 if given is None else [("a.b",)]
    with pytest.raises(setfold.InputError, match="allow takes a list of import paths"):
        setfold.load(path, allow=given)


@pytest.mark.parametrize("given", [5, None, b"model", ["model"]])
def test_a_path_is_a_path(given):
    for call in (setfold.load, setfold.SetState.load, lambda path: setfold.save(make(), path)):
        with pytest.raises(setfold.InputError, match="expected the path of a file"):
            call(given)
