"""The command line: train, evaluate, encode, update, merge, readout, weights, check, info."""

from setfold.cli import (  # noqa: F401  (importing them registers their commands)
    files,
    info,
    laws,
    learn,
    live_serve,
    weights,
)
from setfold.cli.app import USAGE, app, run

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line."""
    run(app, "setfold", USAGE)
