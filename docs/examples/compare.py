"""Print the table of docs/laws.md that compares all encoders, from `setfold check --all --json`.

Run it from the root of a clone: setfold check --all --json | python docs/examples/compare.py
"""

import json
import sys
from typing import Any

NO_BREAK = "\u00a0"  # keeps a cell on one line
HEADINGS = ("encoder", "verdict", "fold", "chunk + average", "why not in one pass")


def row(entry: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one encoder."""
    laws = {law["law"]: law for law in entry["report"]["laws"]}
    error = laws["any partition"]["errors"].get("float64") if "any partition" in laws else None
    return (
        entry["encoder"].replace(" ", NO_BREAK),
        entry["verdict"].replace(" ", NO_BREAK),
        "" if error is None else f"{error:.1e}",
        f"{entry['chunk_average']:.1e}",
        entry["obstacle"],
    )


def main() -> None:
    """Read JSON, print Markdown."""
    entries = json.load(sys.stdin)["encoders"]
    print(f"| {' | '.join(HEADINGS)} |\n|---|---|---:|---:|---|")
    for entry in entries:
        print(f"| {' | '.join(row(entry))} |")


if __name__ == "__main__":
    main()
