"""The command live serve: an HTTP service on a store of live sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from setfold.cli.live import live
from setfold.cli.options import Allow
from setfold.errors import InputError


@live.command(
    epilog="Examples:\n\n  setfold live serve live.db\n\n"
    "  SETFOLD_TOKEN=$(openssl rand -hex 32) setfold live serve live.db --host 0.0.0.0\n\n"
    "  setfold live serve postgresql://localhost/live --port 9000 --token-file token.txt"
)
def serve(
    store: Annotated[str, typer.Argument(help="A SQLite file, or postgresql://...")],
    host: Annotated[
        str,
        typer.Option(help="Address to bind to. Without a token, only one of this machine."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 for any that is free.", min=0, max=65535)
    ] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that clients must send. If omitted, the environment variable "
            "SETFOLD_TOKEN."
        ),
    ] = None,
    max_body: Annotated[str, typer.Option(help="Largest body of a request: 64MB.")] = "64MiB",
    max_updates: Annotated[
        int, typer.Option(help="Updates that may wait; more are refused with 429.", min=1)
    ] = 4096,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a client may take to send a request, or the store.", min=1, max=86400
        ),
    ] = 30.0,
    model: Annotated[
        str | None,
        typer.Option(help="Model to use instead of the one in the store, e.g. with another head."),
    ] = None,
    allow: Allow = None,
) -> None:
    """Serve a store by HTTP until it is stopped by Ctrl-C or SIGTERM.

    The address shows a page that describes the requests. A stop finishes what was accepted.
    """
    try:
        from setfold.live.service import ServiceOptions
        from setfold.live.service import serve as serve_sets
    except ModuleNotFoundError as error:
        raise InputError(
            f"the service needs the package {error.name}. Run: pip install 'setfold[serve]'"
        ) from error
    import torch

    from setfold import live as stores
    from setfold.files.budget import parse_size
    from setfold.live.service.options import check_host, read_token

    largest = parse_size(max_body)
    options = ServiceOptions(
        token=read_token(token_file),
        max_body=largest,
        max_bodies=max(4 * largest, 1 << 28),
        max_updates=max_updates,
        timeout=timeout,
    )
    check_host(host, options.token)
    torch.set_num_threads(1)  # requests are small: threads of torch would wait for one another
    with stores.open(store, model=model, allow=allow or ()) as sets:
        serve_sets(
            sets,
            options,
            host=host,
            port=port,
            on_ready=lambda url: typer.echo(f"listening on {url}"),
        )
