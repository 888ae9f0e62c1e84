"""Complete digits as their pixels arrive, fold ten million elements, and write an HTML page."""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from rich.console import Console

from demo.arriving import complete_digits
from demo.completion import STEPS
from demo.digits import MissingDigitsError
from demo.ten_million import fold_all


def demonstrate(steps: int, digits: int, elements: int, workers: int, out: Path) -> str | None:
    """Run both parts and write the page; returns an error message or None."""
    # Imported here, because worker processes import this file and need no plotting.
    from demo.page import write_page

    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    console.print("1. Train two models to complete digits from some of their pixels.\n")
    arrived = complete_digits(steps, digits, console)
    console.print("", arrived.sheet().for_terminal(), "")
    console.print(
        f"2. Fold a set of {elements:,} elements in one process, and split over {workers}.\n"
    )
    folded = fold_all(elements, workers, out, console)
    console.print("", folded.sheet().for_terminal(), "")
    page = write_page(out, arrived, folded)
    console.print(f"Page with pictures and numbers: {page}", soft_wrap=True)
    return arrived.failure() or folded.failure()


def main() -> str | None:
    """Parse the command line and run the demo; returns an error message or None."""
    parser = ArgumentParser(prog="python -m demo", description=__doc__)
    workers = max(2, min(4, os.cpu_count() or 1))
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps; half for the Set Transformer"
    )
    parser.add_argument(
        "--digits", type=int, default=200, help="number of held-out digits to complete (10 to 500)"
    )
    parser.add_argument(
        "--elements", type=int, default=10_000_000, help="number of elements in the large set"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=workers,
        help="number of processes to split the large set over",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="output folder")
    given = parser.parse_args()
    if given.steps < 1 or given.elements < 1000 or given.workers < 1:
        parser.error("--elements must be 1000 or more; --steps and --workers must be 1 or more.")
    if not 10 <= given.digits <= 500:
        parser.error("--digits must be 10 to 500.")
    try:
        return demonstrate(**vars(given))
    except MissingDigitsError as error:
        return str(error)
    except (KeyboardInterrupt, ChildProcessError) as error:
        return f"stopped. {error}".strip()


if __name__ == "__main__":
    sys.exit(main())
