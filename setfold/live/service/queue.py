"""The queue of updates: bounded, and those that wait share a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from setfold.live.batches import Applied
from setfold.live.models import LiveModel
from setfold.live.service.changes import Changes
from setfold.live.service.messages import RETRY, RefusedError
from setfold.live.service.metrics import SIZES, Metrics
from setfold.live.service.options import ServiceOptions
from setfold.live.service.updates import Own, Update, bundled
from setfold.live.sets import GROUP, LiveSets
from setfold.preprocessing.columns import Column, columns_of

LINGER = 0.005  # seconds to wait for others that are expected
Parse = Callable[[Own | None], Update]  # from the columns that the models read by themselves


@dataclass(eq=False)
class _Waiting:
    parse: Parse
    future: asyncio.Future[Applied]
    names: Sequence[Any] = ()


class UpdateQueue:
    """Applies updates in the order of their arrival, as many at once as wait.

    A thread takes all updates that wait, and applies them in one transaction. Meanwhile others
    arrive. So the larger the load, the larger the groups, and the less the work for an update.

    Args:
        sets: The store.
        options: The limits.
        changes: Gets the ids of sets that change, for listeners.
        metrics: Where updates are counted.
    """

    def __init__(
        self, sets: LiveSets, options: ServiceOptions, changes: Changes, metrics: Metrics
    ) -> None:
        self.sets, self.options, self.changes, self.metrics = sets, options, changes, metrics
        self.waiting: deque[_Waiting] = deque()
        self.pending = 0  # those that wait, and those that are being applied
        self.changed = threading.Condition()
        self.stopping = False
        self.expected = 1  # as many as in the last group
        self.thread = threading.Thread(target=self._work, name="setfold-updates")
        metrics.watch("waiting_updates", lambda: self.pending)

    def start(self) -> None:
        """Begin to apply updates. Futures belong to the event loop that runs now."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """Accept no more updates, and wait until those that were accepted are applied."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        await asyncio.to_thread(self.thread.join)
        await asyncio.sleep(0)  # the last results are delivered

    async def apply(self, parse: Parse) -> Applied:
        """Apply an update, and return what became of it.

        Raises:
            RefusedError: Too many updates wait, or this one waits for too long.
            InputError, StoreError: As `LiveSets.update`.
        """
        if self.stopping:
            raise RefusedError(503, "the service stops. Try again later.", RETRY)
        if self.pending >= self.options.max_updates:
            raise RefusedError(429, f"{self.pending} updates wait. Try again later.", RETRY)
        one = _Waiting(parse, self.loop.create_future())
        self.pending += 1
        with self.changed:
            self.waiting.append(one)
            if len(self.waiting) in (1, self.expected):  # the thread wakes up for nothing else
                self.changed.notify()
        try:
            async with asyncio.timeout(self.options.timeout):
                return await one.future
        except TimeoutError as error:
            raise RefusedError(
                503,
                f"the update was not applied within {self.options.timeout:g} seconds, and may be "
                "applied later. Send it again, with the same batch: it counts once.",
                RETRY,
            ) from error

    # ---- in the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while group := self._take():
            results = self._apply(group)
            self.loop.call_soon_threadsafe(self._deliver, group, results)

    def _take(self) -> list[_Waiting]:
        """Wait for updates; return those that wait, or none when the service stops."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.stopping)
            # Those who got their answers together send the next updates together, too.
            self.changed.wait_for(
                lambda: len(self.waiting) >= self.expected or self.stopping, LINGER
            )
            group = [self.waiting.popleft() for _ in range(min(len(self.waiting), GROUP))]
            self.expected = len(group)
            return group

    def _apply(self, group: Sequence[_Waiting]) -> list[Applied | BaseException]:
        """Return what became of each update, or why it failed."""
        results: dict[int, Applied | BaseException] = {}
        try:
            own = own_columns(self.sets._current_models())
            parsed: dict[int, Update] = {}
            for number, one in enumerate(group):
                try:
                    parsed[number] = one.parse(own)
                except Exception as error:  # a bad body
                    results[number] = error
            results |= self._apply_parsed(parsed)
            if self.changes.listeners:
                for number, update in parsed.items():
                    group[number].names = update.names()
        except Exception as error:  # the store cannot be used, for example
            results = dict.fromkeys(range(len(group)), error) | results
        return [results[number] for number in range(len(group))]

    def _apply_parsed(self, parsed: dict[int, Update]) -> dict[int, Applied | BaseException]:
        numbers, bundles = [], []
        results: dict[int, Applied | BaseException] = {}
        try:
            for bundle, places in bundled(list(parsed.values())):
                bundles.append(bundle)
                numbers.append([[*parsed][place] for place in places])
        except Exception as error:  # a value that does not fit its column; of which one?
            if len(parsed) == 1:
                return dict.fromkeys(parsed, error)
            for number, update in parsed.items():
                results |= self._apply_parsed({number: update})
            return results
        for places, found in zip(numbers, self.sets.update_many(bundles), strict=True):
            results |= zip(places, found, strict=True)
        return results

    # ---- in the event loop ---------------------------------------------------------------------

    def _deliver(
        self, group: Sequence[_Waiting], results: Sequence[Applied | BaseException]
    ) -> None:
        self.pending -= len(group)
        self.metrics.observe("group_updates", len(group), SIZES)
        names: dict[Any, None] = {}
        for one, result in zip(group, results, strict=True):
            self._count(result)
            if isinstance(result, BaseException):
                if not one.future.done():
                    one.future.set_exception(result)
                continue
            if not one.future.done():
                one.future.set_result(result)
            if result.status == "applied":
                names |= {_hashable(name): None for name in one.names}
        self.changes.tell("changed", list(names))

    def _count(self, result: Applied | BaseException) -> None:
        if isinstance(result, BaseException):
            self.metrics.count("updates_total", status=type(result).__name__)
            return
        self.metrics.count("updates_total", status=result.status)
        for kind in ("rows", "late", "deleted"):
            if number := getattr(result, kind):
                self.metrics.count("rows_total", number, kind=kind)


def _hashable(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name


def own_columns(models: Sequence[LiveModel]) -> Own | None:
    """Return the columns that models read by themselves; None if one takes any features."""
    found: dict[str, Column] = {}
    for model in models:
        parser = columns_of(model.encoder)
        if parser is None:
            return None
        found |= {column.name: column for column in parser.all}
    return found
