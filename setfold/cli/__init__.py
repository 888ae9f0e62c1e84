"""The command line: train, evaluate, encode, update, merge, readout, check, info."""

from setfold.cli import files, info, laws, learn  # noqa: F401  (importing them registers their commands)
from setfold.cli.app import USAGE, app, run

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line."""
    run(app, "setfold", USAGE)
