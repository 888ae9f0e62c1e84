"""Processes that stop at exact points, so that races are tested in a fixed order."""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("fork")


class Paused:
    """A forked process that stops before the first call of each of some functions.

    It is stopped at the first one when the constructor returns.

    Args:
        work: What the process does. It may call `report` with something that can be pickled.
        places: Where it stops: modules or classes, and names of their functions.
    """

    def __init__(self, work, *places):
        self.arrived, self.go = PROCESSES.Semaphore(0), PROCESSES.Semaphore(0)
        self.reports = PROCESSES.SimpleQueue()
        self.process = PROCESSES.Process(target=self._run, args=(work, places), daemon=True)
        self.process.start()
        self.arrived.acquire()

    def _run(self, work, places):
        for owner, name in places:
            self._stop_at(owner, name)
        try:
            self.reports.put(work())
        except BaseException as error:
            self.reports.put(repr(error))
        self.arrived.release()

    def _stop_at(self, owner, name):
        original = getattr(owner, name)

        def stop(*arguments, **options):
            setattr(owner, name, original)  # only the first time
            self.arrived.release()
            self.go.acquire()
            return original(*arguments, **options)

        setattr(owner, name, stop)

    def go_on(self):
        """Let it run until it stops again, or ends."""
        self.go.release()
        self.arrived.acquire()

    def result(self):
        """Let it run to its end, and return its result or a description of its error."""
        self.go_on()
        found = self.reports.get()
        self.process.join()
        return found
