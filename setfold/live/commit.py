"""Group commit: calls that arrive while a transaction is written share the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Call(Generic[Item, Result]):
    def __init__(self, item: Item) -> None:
        self.item = item
        self.result: Result | BaseException | None = None
        self.done = False


class GroupCommit(Generic[Item, Result]):
    """Collects the items of concurrent calls, so that one of the callers commits all of them.

    There is no thread of its own: the first caller that gets the lock commits what has collected,
    and the others find their results.

    Args:
        commit: A function of items that returns a result, or an exception, for each.
        most: The largest number of items of a group.

    >>> def commit(numbers):
    ...     return [number * number for number in numbers]
    >>> GroupCommit(commit, most=10).submit(3)
    9
    """

    def __init__(
        self, commit: Callable[[Sequence[Item]], Sequence[Result | Exception]], most: int
    ) -> None:
        self.commit, self.most = commit, most
        self.pending: list[_Call[Item, Result]] = []
        self.collecting, self.committing = threading.Lock(), threading.Lock()

    def submit(self, item: Item) -> Result:
        """Commit an item, alone or with others, and return its result or raise its exception."""
        (result,) = self.submit_all([item])
        if isinstance(result, BaseException):
            raise result
        return result

    def submit_all(self, items: Sequence[Item]) -> list[Result | BaseException]:
        """Commit several items, and return the result or the exception of each."""
        calls: list[_Call[Item, Result]] = [_Call(item) for item in items]
        with self.collecting:
            self.pending += calls
        while not all(call.done for call in calls):
            with self.committing:
                if not all(call.done for call in calls):
                    self._commit_pending()
        return [call.result for call in calls]  # type: ignore[misc]  # they are done

    def _commit_pending(self) -> None:
        with self.collecting:
            group, self.pending = self.pending[: self.most], self.pending[self.most :]
        try:
            results: Sequence[Result | BaseException] = self.commit([call.item for call in group])
        except BaseException as error:  # the store cannot be written: all of them have failed
            results = [error] * len(group)
            if not isinstance(error, Exception):
                raise
        finally:
            for call, result in zip(group, results, strict=True):
                call.result, call.done = result, True
