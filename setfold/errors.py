"""Everything that setfold raises or warns about, in one tree.

    SetfoldError
    ├── InputError          (ValueError)    elements, mask, index or an argument that does not fit
    │   └── NonFiniteError                  NaN or infinity among the elements
    ├── StateMismatchError  (ValueError)    states, or a state and an encoder, that do not belong together
    ├── NotRemovableError   (TypeError)     an aggregate that cannot forget: max and min
    ├── FileError           (ValueError)    a file that is truncated, corrupt or not setfold's
    ├── DescriptionError    (ValueError)    a model that cannot be written down, or may not be rebuilt
    └── DistributedError    (RuntimeError)  another process that failed, died or did not come

    CancelledAttentionWarning  (UserWarning)  a configuration in which attention has no effect

Every message says what was expected, what came and what to do. The doubled bases let code that
knows nothing of setfold catch what it would expect to catch.
"""

from __future__ import annotations


class SetfoldError(Exception):
    """The base of all of setfold's errors."""


class InputError(SetfoldError, ValueError):
    """Elements, a mask, an index or an argument does not fit the encoder."""


class NonFiniteError(InputError):
    """NaN or infinity among the elements; the caller's state is as it was."""


class StateMismatchError(SetfoldError, ValueError):
    """Two states, or a state and an encoder, do not belong together."""


class NotRemovableError(SetfoldError, TypeError):
    """Elements cannot be taken out of a maximum or a minimum."""


class FileError(SetfoldError, ValueError):
    """A file is truncated, corrupt, or was not written by setfold."""


class DescriptionError(SetfoldError, ValueError):
    """A model cannot be described for saving, or its description may not be rebuilt."""


class DistributedError(SetfoldError, RuntimeError):
    """Another process of the group has failed, has died, did not come or does something else."""


class CancelledAttentionWarning(UserWarning):
    """Attention cancels exactly in this configuration: slots, queries and keys have no effect."""
