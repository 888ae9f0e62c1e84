"""The last layers of heads that predict a target: they know what their numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from setfold.core.arguments import check_numbers, check_positive, check_text
from setfold.errors import InputError


class Classes(nn.Module):
    """Logits (B, C) of classes. Returns them as they are.

    Args:
        name: The name of the target.
        labels: The label of each class: text, whole numbers or booleans, all of one type.

    >>> import torch
    >>> classes = Classes("species", ["oak", "pine"])
    >>> classes.predict(torch.tensor([[0.0, 2.0]]))
    (['pine'], tensor([[0.1192, 0.8808]]))
    """

    def __init__(self, name: str, labels: Sequence[str | int | bool]) -> None:
        super().__init__()
        check_text(name=name)
        if not isinstance(labels, list | tuple):
            raise InputError(f"labels must be a list; got {labels!r:.80}.")
        one_kind = any(all(isinstance(label, kind) for label in labels) for kind in (str, int))
        flags = {isinstance(label, bool) for label in labels}
        if not one_kind or len(flags) > 1 or len({*labels}) < len(labels):
            raise InputError(
                f"labels must be different texts, whole numbers or booleans; got {labels!r:.80}."
            )
        if len(labels) < 2:
            raise InputError(f"there must be at least two classes; got {labels!r}.")
        self.name = name
        self.labels = list(labels)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {len(self.labels)} classes"

    def forward(self, logits: Tensor) -> Tensor:
        return logits

    def predict(self, logits: Tensor) -> tuple[list[str | int | bool], Tensor]:
        """Return the most probable label of each set, and the probabilities (B, C)."""
        return [self.labels[place] for place in logits.argmax(1).tolist()], logits.softmax(1)


class Quantity(nn.Module):
    """Predictions (B, 1) of a quantity in its own unit, from standardized ones.

    Args:
        name: The name of the target.
        center: The mean in training.
        scale: The standard deviation in training.

    >>> import torch
    >>> Quantity("age", center=40.0, scale=10.0)(torch.tensor([[0.5]]))
    tensor([[45.]])
    """

    def __init__(self, name: str, center: float, scale: float) -> None:
        super().__init__()
        check_text(name=name)
        check_numbers(center=center)
        check_positive(scale=scale)
        self.name = name
        self.center = center
        self.scale = scale

    def extra_repr(self) -> str:
        return f"{self.name!r}, center={self.center:g}, scale={self.scale:g}"

    def forward(self, standardized: Tensor) -> Tensor:
        return standardized * self.scale + self.center

    def predict(self, found: Tensor) -> list[float]:
        """Return the prediction of each set."""
        return found.squeeze(1).tolist()


Target = Classes | Quantity


class Prediction(nn.Module):
    """A head that ends with a target, for results: probabilities instead of logits.

    Args:
        head: The head.
        target: Its target.
    """

    def __init__(self, head: nn.Module, target: Target) -> None:
        super().__init__()
        self.head = head
        self.target = target

    def forward(self, readout: Tensor) -> Tensor:
        found: Tensor = self.head(readout)
        return found.softmax(-1) if isinstance(self.target, Classes) else found


def target_of(model: nn.Module) -> Target | None:
    """Return what a model predicts; None if it was not trained for a target."""
    return next((module for module in model.modules() if isinstance(module, Target)), None)
