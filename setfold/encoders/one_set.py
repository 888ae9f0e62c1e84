"""One small set and a graph: the Slot Set Encoder as one function of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from setfold.encoders.layers import runs_only
from setfold.kernels.slots import encode_one_set, is_faster
from setfold.native.slots import Settings, SlotTensors

if TYPE_CHECKING:
    from setfold.encoders.slot_set import SlotSetEncoder

LAYERS = ("norm", "to_query", "to_key", "to_value")


def encode_tracked(encoder: SlotSetEncoder, elements: Tensor, divisor: int) -> Tensor | None:
    """The encoding (1, K, d_out) of one small set (1, n, d), differentiable.

    None if a layer does more than its class does, if the general path is faster, and if the
    encoding is not finite.
    """
    layers: list[Any] = [encoder._modules[name] for name in LAYERS]
    norm, query, key, value = layers
    if not (runs_only(norm, nn.LayerNorm) and runs_only(query, nn.Linear)):
        return None
    if type(key) is not nn.Linear or type(value) is not nn.Linear:  # only their weights are used
        return None
    held = [layer._parameters for layer in layers]
    try:
        tensors = [own[name] for own in held for name in ("weight", "bias")]
    except KeyError:  # it is another attribute, which a hook may compute
        return None
    if any(weight is None for weight in tensors[::2]):
        return None
    # before noise is drawn, as the general path draws it again
    if not is_faster(elements, tensors[2], tensors[6], encoder.num_slots):
        return None
    slots: tuple[Any, ...]
    if encoder.slots == "learned":
        slots = encoder.slot_values, None, None
    else:
        noise = encoder._noise(encoder.num_slots, None)
        slots = encoder.slot_mean, encoder.slot_deviation, noise
    settings = Settings(encoder.num_slots, encoder.attention, divisor, norm.eps)
    return encode_one_set(SlotTensors(elements, *slots, *tensors), settings)
