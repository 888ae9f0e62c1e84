"""`python -m tests.differential 17` runs one configuration; `0 1000` runs those from 0 to 999."""

from __future__ import annotations

import sys
from collections import Counter

import torch

from tests.differential.compare import check


def main(first: int, stop: int) -> int:
    """Run some configurations, and print those that fail."""
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    for number in range(first, stop):
        try:
            outcomes[check(number)] += 1
        except AssertionError as error:
            outcomes["wrong"] += 1
            print(error, end="\n\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 1 if outcomes["wrong"] else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[1] if len(numbers) > 1 else numbers[0] + 1))
