"""Layers of torch.nn: what was saved computes the same after it was loaded."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import setfold
from setfold.core.torch_layers import FINDERS, NOT_NEEDED
from setfold.core.weights import weights_of


def layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **options)


def decoder_layer(**options):
    return nn.TransformerDecoderLayer(8, 2, 16, **options)


OTHER = {"activation": "gelu", "layer_norm_eps": 0.5, "batch_first": True, "norm_first": True}
LAYERS = {
    "rnn": lambda: nn.RNN(8, 4),
    "rnn relu": lambda: nn.RNN(8, 4, nonlinearity="relu"),
    "lstm": lambda: nn.LSTM(8, 4, 2, bias=False, batch_first=True, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(8, 4, proj_size=2),
    "gru": lambda: nn.GRU(8, 4, num_layers=2, dropout=0.5),
    "encoder layer": layer,
    "encoder layer other": lambda: layer(bias=False, **OTHER),
    "encoder layer module": lambda: layer(activation=nn.SiLU()),
    "encoder": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "encoder norm": lambda: nn.TransformerEncoder(layer(**OTHER), 2, nn.LayerNorm(8)),
    "decoder layer": lambda: decoder_layer(**OTHER),
    "decoder": lambda: nn.TransformerDecoder(decoder_layer(), 2, nn.LayerNorm(8)),
    "transformer": lambda: nn.Transformer(8, 2, 1, 2, 16, **OTHER),
    "attention": lambda: nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True),
    "distance": lambda: nn.PairwiseDistance(p=1.0, keepdim=True),
}


def outputs(module):
    elements = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    taken = inspect.signature(module.forward).parameters.values()
    needed = [p for p in taken if p.default is p.empty]
    with torch.no_grad():
        found = module.eval()(*[elements] * len(needed))
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:LSTM with projections")
def test_a_layer_computes_the_same_after_it_was_loaded(tmp_path, name):
    torch.manual_seed(0)
    module = LAYERS[name]()
    setfold.save(module, tmp_path / "model")
    assert torch.equal(outputs(setfold.load(tmp_path / "model")), outputs(module))


@pytest.mark.filterwarnings("ignore")
def test_no_argument_of_a_layer_is_lost():
    """An argument that is no attribute is found elsewhere, or a layer with it cannot be saved."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, nn.Module) and kind not in FINDERS]
    lost = set()
    for kind in kinds:
        taken = inspect.signature(kind).parameters.values()
        taken = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = {p.name: 4 for p in taken if p.default is p.empty}
        try:
            module = kind(**needed)
        except (TypeError, ValueError, AttributeError, RuntimeError, AssertionError):
            continue  # it takes something else
        found = {p.name for p in taken} - {"device", "dtype", *NOT_NEEDED}
        if not all(hasattr(module, name) for name in found):
            lost.add(kind)
            with pytest.raises(setfold.DescriptionError):
                setfold.save(module, "never written")
    assert nn.ParameterList in lost


def test_states_of_layers_that_differ_only_in_their_arguments_do_not_merge():
    torch.manual_seed(0)
    digests = set()
    for options in ({}, {"activation": "gelu"}, {"norm_first": True}, {"layer_norm_eps": 0.5}):
        torch.manual_seed(0)
        digests.add(weights_of(setfold.Pool(8), [layer(**options)]).digest)
    assert len(digests) == 4
