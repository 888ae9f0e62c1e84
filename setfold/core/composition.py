"""features -> streaming encoder -> head, as one encoder."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import Arrivals, absorb_for_gradients, absorb_ragged
from setfold.core.arguments import check_choice, check_modules
from setfold.core.begin import setup_of
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics
from setfold.errors import CancelledAttentionWarning, InputError
from setfold.kernels.modes import needs_plain_formula


class Composition(StreamingSetEncoder):
    """features (per element) -> streaming encoder -> head (on the readout), as one fold.

    Args:
        encoder: any streaming encoder.
        features: a module applied to each element: (N, ...) -> (N, d). If the state has a context,
            it is called as features(elements (B, n, ...), context (B, ...)) -> (B, n, d), with one
            context for each earlier pass.
        head: any module on the encoder's readout (B, ...).

    >>> import setfold
    >>> model = setfold.Composition(
    ...     features=nn.Sequential(nn.Linear(3, 16), nn.ReLU()),
    ...     encoder=setfold.SlotSetEncoder(dim_in=16, num_slots=4, dim_slot=8, dim_out=8),
    ...     head=nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
    ... )
    >>> model(torch.randn(2, 100, 3)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        encoder: StreamingSetEncoder,
        features: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(encoder, StreamingSetEncoder):
            raise InputError(
                f"encoder must be a streaming set encoder; got {type(encoder).__name__}. The order "
                "is Composition(encoder, features, head)."
            )
        check_modules(features=features, head=head)
        self.features = features
        self.encoder = encoder
        self.head = head
        self.dim_in = encoder.dim_in if features is None else None
        self.slot_dims = encoder.slot_dims
        self.slot_axis = encoder.slot_axis if head is None else None
        self.slots_cancel = encoder.slots_cancel and head is None
        self.batched_slots = encoder.batched_slots
        if encoder.slots_cancel and _begins_with_pool(head):
            warnings.warn(
                "attention cancels: the weights of an element sum to 1 over the slots, so the sum "
                "or mean of slots that hold sums or means is a plain sum of the elements. Slots, "
                "queries and keys then have no effect. Keep the slots separate (nn.Flatten as the "
                'head), or use aggregate="weighted_mean" or "max".',
                CancelledAttentionWarning,
                stacklevel=2,
            )

    @property
    def has_features(self) -> bool:
        return self.features is not None or self.encoder.has_features

    @property
    def draws_slots(self) -> bool:
        return self.encoder.draws_slots

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return self.encoder.fields(frame)

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return self.encoder.absorb(elements, mask, prepared)

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: Any
    ) -> Statistics:
        return absorb_for_gradients(self.encoder, elements, mask, prepared)

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Any
    ) -> Arrivals | None:
        return absorb_ragged(self.encoder, elements, index, batch_size, prepared)

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        encoding = self.encoder.finish(statistics, count, prepared)
        return encoding if self.head is None else self.head(encoding)

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        return self.encoder.draw_frame(num_slots, generator)

    def prepare(self, frame: tuple[Tensor, ...]) -> Any:
        if frame or self.encoder.training or torch.is_grad_enabled():
            return self.encoder.prepare(frame)
        return setup_of(self.encoder).prepared  # which may have been kept

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        found = elements
        if context and self.features is not None and not torch.compiler.is_compiling():
            _check_context(self.features, len(context))
        if self.features is not None:
            found = apply_features(self.features, elements, mask, context)
        width = self.encoder.dim_in
        if width is not None and found.shape[2:] != (width,):
            raise InputError(
                f"the features must return ({width},) for each element, the dim_in of "
                f"{type(self.encoder).__name__}; got {tuple(found.shape[2:])}."
            )
        return self.encoder.featurize(found, mask, context if self.features is None else ())

    @property
    def has_weights(self) -> bool:
        return self.encoder.has_weights

    def weigh(self, elements: Tensor, state: SetState, prepared: Any) -> Tensor:
        return self.encoder.weigh(elements, state, prepared)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        features = () if self.features is None else (self.features,)
        return (*features, *self.encoder.shaping_modules())


class SlotPool(nn.Module):
    """A head that sums or averages slots, (B, K, p) -> (B, p), as in most of the paper.

    Args:
        reduce: "mean" or "sum".

    >>> SlotPool("sum")(torch.ones(2, 4, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, reduce: str = "mean") -> None:
        super().__init__()
        check_choice(("mean", "sum"), reduce=reduce)
        self.reduce = reduce

    def forward(self, encoding: Tensor) -> Tensor:
        return encoding.mean(1) if self.reduce == "mean" else encoding.sum(1)


def _check_context(features: nn.Module, passes: int) -> None:
    """Raise InputError if features cannot be called with a context, which may come from a file."""
    kind: Any = type(features)
    if "forward" not in vars(features) and not _takes(kind, 1 + passes):
        raise InputError(
            f"the features do not take a context: {kind.__name__}.forward cannot be called "
            f"with the elements and {passes} more. Leave the context out, or use other features."
        )


@cache
def _takes(kind: type[nn.Module], arguments: int) -> bool:
    """Whether the forward of a module takes so many arguments."""
    try:
        signature(kind.forward).bind(None, *range(arguments))
    except TypeError:
        return False
    except ValueError:  # there is no signature
        return True
    return True


def apply_features(
    features: Callable[..., Tensor],
    elements: Tensor,
    mask: Tensor | None,
    context: tuple[Tensor, ...] = (),
) -> Tensor:
    """Apply a function to elements (B, n, ...): features (B, n, d), zero where masked.

    Args:
        features: (N, ...) -> (N, d), or with a context (B, n, ...), *context -> (B, n, d).
        elements: (B, n, ...).
        mask: (B, n), True where present, or None.
        context: further arguments of the features, each (B, ...).
    """
    if mask is None or mask.shape[1] == 0:
        if context:
            return features(elements, *context)
        return features(elements.flatten(0, 1)).unflatten(0, elements.shape[:2])
    if not context and not needs_plain_formula():
        # the output for padding could be NaN, so features are applied to present elements only
        values = features(elements[mask])
        return values.new_zeros(*mask.shape, *values.shape[1:]).index_put((mask,), values)
    # features with a context need whole sets, so padding is replaced by a present element
    found = apply_features(features, _replace_padding(elements, mask), None, context)
    return found.masked_fill(~mask.unsqueeze(-1), 0)


def _replace_padding(elements: Tensor, mask: Tensor) -> Tensor:
    """Elements (B, n, ...) with padding replaced by an element of the same set."""
    sets = torch.arange(mask.shape[0], device=mask.device)
    some = elements[sets, mask.to(torch.uint8).argmax(1)].unsqueeze(1)
    hidden = ~mask.reshape(*mask.shape, *(1,) * (elements.dim() - 2))
    return torch.where(hidden, some, elements)


def _begins_with_pool(head: nn.Module | None) -> bool:
    """Whether slots are added up before any nonlinear module."""
    if isinstance(head, nn.Sequential):
        for module in head:
            if not isinstance(module, nn.Linear | nn.Identity):
                return _begins_with_pool(module)
        return False
    return isinstance(head, SlotPool)
