"""Modules of the user's own in files: what their constructors may do, and what is refused when."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import setfold
from setfold.core import structure


class Positions(nn.Module):
    """Its values come from plain tensors, and from a buffer that is not saved."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.scale = torch.arange(1.0, width + 1)
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def forward(self, elements):
        return elements * self.scale + self.shift


class Measured(Positions):
    """Its constructor reads numbers from tensors, so it cannot run without memory."""

    def __init__(self, width):
        super().__init__(width)
        self.total = float(self.scale.sum())
        self.register_buffer("table", torch.from_numpy(np.eye(width, dtype="f4")) + torch.ones(1))


class Probing(nn.Module):
    """Its constructor calls the module that it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(inner(torch.zeros(1, 3)).shape[-1], 2)

    def forward(self, elements):
        return self.head(self.inner(elements))


class Looping(nn.Module):
    """Its constructor fills a table number by number."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        table = torch.zeros(size)
        for place in range(size):
            table[place] = place
        self.register_buffer("table", table, persistent=False)

    def forward(self, elements):
        return elements + self.table.sum()


class Recurrent(nn.Module):
    """It contains a module that does not keep its arguments."""

    def __init__(self, width, depth):
        super().__init__()
        self.width, self.depth = width, depth
        self.layers = nn.LSTM(width, width, depth)

    def forward(self, elements):
        return self.layers(elements.unsqueeze(0))[0].squeeze(0)


class Reading(nn.Module):
    """Its constructor reads a number from a weight of the module that it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.norm = inner.weight.norm().item()


class Remembering(nn.Module):
    """Its state is more than tensors."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


OWN = {
    "plain tensors": lambda: Positions(3),
    "values needed": lambda: Measured(3),
    "a call": lambda: Probing(nn.Linear(3, 4)),
    "a call of its own kind": lambda: Probing(Positions(3)),
    "many calls": lambda: Looping(1000),
    "recurrent": lambda: Recurrent(3, 2),
}
NAMES = [f"{__name__}.{name}" for name in ("Positions", "Measured", "Probing", "Looping")]
NAMES += [f"{__name__}.Recurrent"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", OWN)
def test_a_constructor_may_do_what_it_wants(path, name, monkeypatch):
    monkeypatch.setattr(structure, "CALLS", 500)  # fewer than a table of numbers takes
    torch.manual_seed(0)
    features = OWN[name]()
    model = setfold.Composition(setfold.Pool(2 if name.startswith("a call") else 3), features)
    setfold.save(model.eval(), path)
    loaded, elements = setfold.load(path, allow=NAMES), torch.randn(2, 5, 3)
    assert torch.equal(loaded(elements), model(elements))
    tensors = [*vars(loaded.features).values(), *loaded.state_dict().values(), *loaded.buffers()]
    assert not any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ParameterList([torch.ones(2)]), "ParameterList cannot be saved, because it does not"),
        (nn.ParameterDict({"a": torch.ones(2)}), "ParameterDict.parameters is a method"),
        (nn.LSTM(1, 1, 1001), "1 to 1000 layers"),
        (nn.TransformerEncoder(nn.Identity(), 2, enable_nested_tensor=False), "TransformerEncoder"),
        (nn.TransformerEncoderLayer(4, 2, activation=torch.tanh), "activation is a builtin_fun"),
        (nn.LazyLinear(3), "weight has no shape yet. Call the model once"),
        (Remembering(), "_extra_state is a dict; only tensors can be saved"),
        (Reading(nn.Linear(2, 2)), "cannot be rebuilt from its description"),
        (nn.Linear(2, 2).to(torch.float8_e4m3fn), "weights are torch.float8.*Cast the model"),
        (nn.Embedding(2, 2, dtype=torch.complex64), "weight would be .*float32; it is .*complex64"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_is_not_saved(path, module, message):
    with pytest.raises(setfold.DescriptionError, match=message):
        setfold.save(module, path)
    assert not path.exists()


def test_a_class_of_a_script_is_refused_when_saving(path):
    own = type("Own", (nn.Module,), {"__module__": "__main__"})
    with pytest.raises(setfold.DescriptionError, match=r"script or notebook.*Move it to a module"):
        setfold.save(setfold.Composition(setfold.Pool(3), own()), path)


def test_weights_of_several_dtypes_keep_them(path):
    model = nn.Sequential(nn.Linear(2, 3).half(), nn.BatchNorm1d(3), nn.Linear(3, 1).double())
    setfold.save(model, path)
    loaded = setfold.load(path)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_model_in_half_precision_keeps_it(path):
    setfold.save(setfold.Pool(3).half(), path)
    assert setfold.load(path).like.dtype == torch.float16
