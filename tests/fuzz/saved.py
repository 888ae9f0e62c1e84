"""Models and states in safetensors files, which a checksum protects."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

import setfold
from setfold.core import persist
from tests.fuzz.documents import changed, text_of
from tests.fuzz.kind import ANYTHING, Kind
from tests.fuzz.mutations import mutated

WIDTH = 3
DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e300, 2.0**62)
NAMES = ("", "x", "count", "slots.0", "context.0", "sum.0", "sum.1", "weight", "encoder.weight")


class SavedFile(Kind):
    """A safetensors file of setfold.

    Attributes:
        words: values for its description that the reader knows.
    """

    words: ClassVar[tuple[Any, ...]] = ()

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Load a file, use what is in it, and return everything that it says."""

    def damage(self, random: Random) -> Any:
        sample = random.choice(sorted(self.samples.iterdir()))
        self.path = self.target / sample.name
        match random.randrange(4):
            case 0 | 1:
                content, expected = mutated(sample.read_bytes(), random), self.expected[sample.name]
            case 2:
                content, expected = _with_another_header(sample, random), self.expected[sample.name]
            case _:
                content, expected = self._sealed_again(sample, random), ANYTHING
        self.path.write_bytes(content)
        return expected

    def read(self) -> Any:
        return self.load(self.path)

    def keep_expected(self) -> None:
        self.expected = {path.name: self.load(path) for path in self.samples.iterdir()}

    def _sealed_again(self, sample: Path, random: Random) -> bytes:
        """A file with other content and the checksum of that content."""
        with safe_open(sample, framework="pt") as file:
            head = json.loads(file.metadata()[persist.HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        del head["checksum"]
        if tensors and random.randrange(2):
            _change_tensors(tensors, random)
        else:
            head = changed(head, random, self.words)
            if not isinstance(head, dict):
                return save(tensors, {persist.HEADER: text_of(head)})
        head["checksum"] = persist.digest_of(tensors, json.dumps(head))
        return save(tensors, {persist.HEADER: text_of(head)})


def _with_another_header(sample: Path, random: Random) -> bytes:
    """A file whose safetensors header is valid JSON, but not what was written."""
    content = sample.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = text_of(changed(json.loads(content[8:end]), random)).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]


def _change_tensors(tensors: dict[str, Tensor], random: Random) -> None:
    name = random.choice(sorted(tensors))
    tensor = tensors[name]
    match random.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[random.choice(NAMES)] = tensor.clone()
        case 2:
            tensors[name] = tensor.to(random.choice(DTYPES))
        case 3:
            shapes = [(), (0,), (tensor.numel(),), (1, *tensor.shape), (*tensor.shape, 2), (1000,)]
            tensors[name] = torch.zeros(random.choice(shapes), dtype=tensor.dtype)
        case 4 if tensor.dim():
            tensors[name] = torch.cat([tensor, tensor], random.randrange(tensor.dim()))
        case 5 if tensor.dim():
            tensors[name] = tensor.transpose(0, -1).contiguous()
        case _ if tensor.numel():
            flat = tensor.clone().reshape(-1)
            flat[random.randrange(len(flat))] = _fitting(random.choice(NUMBERS), tensor.dtype)
            tensors[name] = flat.reshape(tensor.shape)


def _fitting(number: float, dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return (
            number
            if abs(number) < 1e38 or dtype == torch.float64
            else math.copysign(math.inf, number)
        )
    return int(number) if abs(number) < 2**63 else -7


class Models(SavedFile):
    """Models, which also describe their structure."""

    name = "model"
    words = (
        "torch.nn.Linear",
        "torch.nn.Sequential",
        "torch.nn.Transformer",
        "torch.nn.TransformerEncoder",
        "torch.nn.GRU",
        "torch.nn.Embedding",
        "torch.nn.LazyLinear",
        "torch.nn.ModuleDict",
        "torch.nn.utils.parametrize.ParametrizationList",
        "setfold.Pool",
        "setfold.SetTransformer",
        "setfold.JanossyPool",
        "setfold.load",
        "os.system",
        "builtins.eval",
        {
            "module": {
                "class": "torch.nn.Linear",
                "arguments": {"in_features": 3, "out_features": 3},
            }
        },
        {"module": {"class": "setfold.Pool", "arguments": {"dim_in": 3}}},
        {"class": "torch.nn.Tanh", "arguments": {}},
        "float16",
        "sum",
    )

    def make(self) -> None:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        layers = [nn.TransformerEncoder(layer, 2), nn.LSTM(WIDTH, 4, 2)]
        for number, model in enumerate([*encoders(), *layers]):
            setfold.save(model, self.samples / f"{number}.safetensors")
        self.elements = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
        self.keep_expected()

    def load(self, path: Path) -> Any:
        model = setfold.load(path)
        weights = {name: part.numpy().tobytes() for name, part in model.state_dict().items()}
        if isinstance(model, setfold.SetEncoder):
            # A valid file may describe a model that no elements fit. torch says so.
            with torch.no_grad(), suppress(Exception):
                model(self.elements.to(next(model.parameters(), self.elements).dtype))
        return str(model), weights


class States(SavedFile):
    """States of some sets, which their encoder, and other states, must recognize."""

    name = "state"
    words = ("Sum", "Max", "Softmax", "CentralMoments", "Statistic", ["Sum", [4, 4]], [4, 6], [0])

    def make(self) -> None:
        self.encoders, self.states = {}, {}
        self.elements = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
        for number, encoder in enumerate(encoders()):
            with torch.no_grad():
                state = encoder.update(encoder.initial_state(2), self.elements)
            name = f"{number}.safetensors"
            self.encoders[name], self.states[name] = encoder, state
            state.save(self.samples / name)
        self.keep_expected()

    def load(self, path: Path) -> Any:
        encoder, state = self.encoders[path.name], setfold.SetState.load(path)
        parts = {name: part.numpy().tobytes() for name, part in state.tensors().items()}
        fields = {name: repr(field) for name, field in state.fields.items()}
        with torch.no_grad():
            encoder.readout(state)
            encoder.update(state, self.elements[: len(state)])
            self.states[path.name][: len(state)].merge(state)
        return fields, parts, state.weights.digest


def encoders() -> list[setfold.StreamingSetEncoder]:
    """Encoders that together keep every statistic, nest, and have features and heads."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())
    slots = setfold.SlotSetEncoder(WIDTH, 4, 6, 5, aggregate=["mean", "max"])
    found: list[setfold.StreamingSetEncoder] = [
        slots,
        setfold.HierarchicalSlotSetEncoder(
            [setfold.SlotSetEncoder(WIDTH, 4, 6, 5), setfold.SlotSetEncoder(5, 2, 6, 5)]
        ),
        setfold.Composition(
            setfold.SlotSetEncoder(4, 3, 6, 5, aggregate="weighted_mean", attention="softmax"),
            features,
            nn.Sequential(nn.Flatten(), nn.Linear(15, 2)),
        ),
        setfold.Concat({"a": setfold.Pool(WIDTH, ["sum", "min"]), "b": setfold.Moments(WIDTH)}),
        setfold.AttentionPool(WIDTH, 2, 4, 2),
        setfold.PMA(WIDTH, 2, 1),
    ]
    return [encoder.eval() for encoder in found]
