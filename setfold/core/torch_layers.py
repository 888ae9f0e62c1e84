"""Layers of torch.nn that do not keep their constructor arguments as attributes.

Their arguments are found in their parts. An argument that is found nowhere must not be lost: two
models that print alike, with the same weights, could compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional

from setfold.errors import DescriptionError

# Arguments that are deprecated names of others, or show in the tensors of a module.
NOT_NEEDED = {
    "size_average", "reduce", "min_value", "max_value", "_weight", "_freeze",
}  # fmt: skip
RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
)  # fmt: skip
ACTIVATIONS = {functional.relu: "relu", functional.gelu: "gelu"}
MAX_LAYERS = 1000  # of a recurrent network, whose construction takes quadratic time

Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def arguments_of(module: nn.Module) -> dict[str, Any] | None:
    """The constructor arguments of a layer; None if its class keeps them as attributes.

    >>> arguments_of(nn.GRU(3, 4))["hidden_size"], arguments_of(nn.Linear(3, 4))
    (4, None)
    """
    find = FINDERS.get(type(module))
    return None if find is None else find(module)


def check_arguments(kind: type[nn.Module], arguments: dict[str, Any]) -> None:
    """Raise DescriptionError for arguments with which a constructor does not end soon.

    Args:
        kind: the class.
        arguments: what it would be called with.
    """
    if issubclass(kind, nn.RNNBase) and not 0 < arguments.get("num_layers", 1) <= MAX_LAYERS:
        raise DescriptionError(f"a recurrent network has 1 to {MAX_LAYERS} layers.")
    for owner, name, layer in (
        (nn.TransformerEncoder, "encoder_layer", nn.TransformerEncoderLayer),
        (nn.TransformerDecoder, "decoder_layer", nn.TransformerDecoderLayer),
    ):
        # It copies the layer. Copies of a layer without tensors would not be counted.
        if issubclass(kind, owner) and type(arguments.get(name)) is not layer:
            raise DescriptionError(
                f"a {owner.__name__} is saved only if its layers are {layer.__name__}s of torch.nn."
            )


def _recurrent(*more: str) -> Callable[[Any], dict[str, Any]]:
    return lambda module: {name: getattr(module, name) for name in (*RECURRENT, *more)}


def _attention(module: nn.MultiheadAttention) -> dict[str, Any]:
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    return {
        **{name: getattr(module, name) for name in names},
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
    }


def _layer(module: Layer) -> dict[str, Any]:
    return {
        "d_model": module.self_attn.embed_dim,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        "activation": ACTIVATIONS.get(module.activation, module.activation),
        "layer_norm_eps": module.norm1.eps,
        "batch_first": module.self_attn.batch_first,
        "norm_first": module.norm_first,
        "bias": module.linear1.bias is not None,
    }


def _encoder(module: nn.TransformerEncoder) -> dict[str, Any]:
    return {
        "encoder_layer": next(iter(module.layers), None),
        "num_layers": module.num_layers,
        "norm": module.norm,
        "enable_nested_tensor": module.enable_nested_tensor,
        "mask_check": module.mask_check,
    }


def _decoder(module: nn.TransformerDecoder) -> dict[str, Any]:
    return {
        "decoder_layer": next(iter(module.layers), None),
        "num_layers": module.num_layers,
        "norm": module.norm,
    }


def _transformer(module: nn.Transformer) -> dict[str, Any]:
    return {
        "d_model": module.d_model,
        "nhead": module.nhead,
        "custom_encoder": module.encoder,
        "custom_decoder": module.decoder,
        "batch_first": module.batch_first,
    }


FINDERS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.LSTM: _recurrent("proj_size"),
    nn.GRU: _recurrent(),
    nn.RNN: _recurrent("nonlinearity"),
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _layer,
    nn.TransformerDecoderLayer: _layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
    nn.PairwiseDistance: lambda m: {"p": m.norm, "eps": m.eps, "keepdim": m.keepdim},
}
