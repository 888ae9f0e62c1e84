"""The benchmark, whose processes are copies of this one where that makes no difference.

    python -m tests.quick_bench --quick --out DIR     # as python -m bench

A copy starts at once, while a new process imports all libraries. Each module still runs once in a
new process, and so does whatever chooses the compiled kernels, which happens on import.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys

from bench import __main__ as bench
from bench import disk, files, memory
from setfold.native.library import VARIABLE

new_process = memory.printed_by
started = set()


def printed_by(module, *words, **settings):
    """What a module of the benchmark prints, in lines."""
    if module not in started or VARIABLE in settings:
        started.add(module)
        return new_process(module, *words, **settings)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run():
        os.environ.update(settings)
        sys.argv = [module, *words]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            sys.modules[module].main()
        writer.send(shown.getvalue())

    process = context.Process(target=run)
    process.start()
    writer.close()
    try:
        return reader.recv().splitlines()
    finally:
        process.join()


if __name__ == "__main__":
    for user in (disk, files, memory):
        user.printed_by = printed_by
    bench.main()
