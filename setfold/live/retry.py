"""Transactions that are repeated if something from outside has ended them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from setfold.errors import StoreError

PAUSES = (0.01, 0.05, 0.2, 1.0)  # seconds before a transaction is repeated

Result = TypeVar("Result")


class InterruptedTransactionError(StoreError):
    """A transaction that can be repeated: it was ended for reasons that lie outside of it.

    Args:
        message: What happened, and what to do.
        is_unknown: Whether it may have been committed, because the connection was lost meanwhile.
    """

    def __init__(self, message: str, *, is_unknown: bool) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


def repeated(work: Callable[[], Result], *, is_identified: bool = False) -> Result:
    """Do work that is one transaction, and do it again a few times if that is interrupted.

    Args:
        work: The work.
        is_identified: Whether it finds out by itself that it was done before. Otherwise it is not
            repeated if it may have been done.
    """
    for pause in PAUSES:
        try:
            return work()
        except InterruptedTransactionError as error:
            if error.is_unknown and not is_identified:
                raise
            time.sleep(random.uniform(pause / 2, pause))  # others that were interrupted wait, too
    return work()
