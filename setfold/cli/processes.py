"""Commands that run over the processes that torchrun has started. The first of them speaks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from setfold.errors import DistributedError

P = ParamSpec("P")


def is_first() -> bool:
    """Whether this process is the first, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def over_processes(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command join the other processes. If it fails in one of them, all end."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        from setfold.learning.processes import join_processes

        with join_processes() as processes:
            with processes.together():
                command(*arguments, **options)
            processes.from_first()  # all wait for the first, which writes files

    return run


def is_shown_elsewhere(error: Exception) -> bool:
    """Whether the first process shows an error, and this one is another."""
    if is_first():
        return False
    from setfold.folding.messages import SENT

    return isinstance(error, DistributedError) or hasattr(error, SENT)
