"""Damage files at random and read them: `python -m tests.fuzz --help`."""

from __future__ import annotations

import os

for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):  # before anything starts threads: workers fork
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import argparse  # noqa: E402
import sys  # noqa: E402

from tests.fuzz.driver import fuzz  # noqa: E402
from tests.fuzz.kinds import KINDS  # noqa: E402
from tests.fuzz.worker import KEPT  # noqa: E402


def main() -> int:
    """Run the fuzzer; 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = ", ".join(KINDS)
    parser.add_argument("kinds", nargs="*", help=f"kinds of files; all if none: {names}")
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutation")
    parser.add_argument("--count", type=int, default=1000, help="how many mutations of each kind")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    unknown = [name for name in options.kinds if name not in KINDS]
    if unknown:
        parser.error(f"no kind {unknown[0]!r}; there are {names}")
    chosen = [KINDS[name] for name in options.kinds or KINDS]
    failed = False
    for report in fuzz(chosen, options.first, options.count, options.at_once):
        print(report, flush=True)
        for number, text in sorted(report.failures.items()):
            failed = True
            again = f"python -m tests.fuzz {report.kind.name} --first {number} --count 1"
            print(f"\n{again}  ({KEPT / f'{report.kind.name}-{number}'})\n{text}\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
