"""All exceptions and warnings of setfold.

    SetfoldError
    ├── InputError          (ValueError)    invalid elements, mask, index or argument
    │   ├── NonFiniteError                  NaN or infinity in the elements, or overflow
    │   └── BatchConflictError              a batch that was applied before, with other rows
    ├── StateMismatchError  (ValueError)    states, or a state and an encoder, that do not match
    ├── NotRemovableError   (TypeError)     elements cannot be removed from this aggregate
    ├── FileError           (ValueError)    a truncated, corrupt or foreign file
    ├── StoreError          (RuntimeError)  a store that is missing, busy, full or damaged
    ├── DescriptionError    (ValueError)    a model that cannot be saved or must not be loaded
    ├── DistributedError    (RuntimeError)  another process failed, died or timed out
    └── DivergedError       (ArithmeticError)  the loss of a training is not finite

    CancelledAttentionWarning  (UserWarning)  a configuration in which attention has no effect

Every message says what was expected, what was received, and what to do. Each error also derives
from a built-in exception, so that code can catch it without importing setfold.
"""

from __future__ import annotations


class SetfoldError(Exception):
    """Base class of all errors of setfold.

    Args:
        message: What was expected, what came, and what to do.
        command: The message for users of the command line, if it differs from that for Python.
    """

    def __init__(self, message: str = "", *, command: str | None = None) -> None:
        super().__init__(message)
        self.command = command


class InputError(SetfoldError, ValueError):
    """Elements, a mask, an index or an argument is invalid."""


class NonFiniteError(InputError):
    """The elements are not finite, or so large that the encoder overflows. The state is unchanged."""


class BatchConflictError(InputError):
    """A batch with the same identity was applied before, and its rows were others."""


class StateMismatchError(SetfoldError, ValueError):
    """Two states, or a state and an encoder, do not match."""


class NotRemovableError(SetfoldError, TypeError):
    """Elements cannot be removed from a maximum or a minimum."""


class FileError(SetfoldError, ValueError):
    """A file is missing, truncated, corrupt, or was not written by setfold."""


class StoreError(SetfoldError, RuntimeError):
    """A store of live sets is missing, busy, full or damaged, or its database cannot be reached."""


class DescriptionError(SetfoldError, ValueError):
    """A model cannot be saved, or loading it is not allowed."""


class DistributedError(SetfoldError, RuntimeError):
    """Another process of the group failed, died, timed out or made a different call."""


class DivergedError(SetfoldError, ArithmeticError):
    """The loss of a training is not finite, or what is validated is NaN."""


class CancelledAttentionWarning(UserWarning):
    """Attention cancels out in this configuration: slots, queries and keys have no effect."""
