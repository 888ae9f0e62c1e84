"""The commands on a store of live sets."""

from __future__ import annotations

import typer

from setfold.cli.app import app

live = typer.Typer(name="live", help="Sets that grow all day, in a database.", no_args_is_help=True)
app.add_typer(live)
