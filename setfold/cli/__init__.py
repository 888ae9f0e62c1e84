"""The command line: train, evaluate, encode, merge, readout, weights, export, check, info, live."""

from setfold.cli import (  # noqa: F401  (importing them registers their commands)
    export,
    files,
    info,
    laws,
    learn,
    live,
    live_serve,
    live_update,
    weights,
)
from setfold.cli.app import USAGE, app, run

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line."""
    run(app, "setfold", USAGE)
