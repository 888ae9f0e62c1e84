"""Serves the application: connections, signals, and a stop that loses nothing."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from setfold.errors import InputError
from setfold.live.service.app import make_app
from setfold.live.service.options import ServiceOptions, check_host
from setfold.live.sets import LiveSets

MAX_HEAD = 1 << 15  # bytes of the address and the headers of a request
CONNECTIONS = 1024
KEEP_ALIVE = 65  # seconds; longer than the 60 of common proxies, which then close first


class LimitedProtocol(HttpToolsProtocol):
    """HTTP as uvicorn speaks it, with a limit of size and time for the head of a request."""

    head_timeout: float
    head_size = 0
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._forget_head()
        self.head_size = 0
        self.timer = self.loop.call_later(self.head_timeout, self.transport.close)

    def _forget_head(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _measure(self, size: int) -> None:
        self.head_size += size
        if self.head_size > MAX_HEAD:
            raise ValueError("the head of a request is too large")  # answered with status 400


class LiveServer(uvicorn.Server):
    """A server that ends open streams first when it stops, and then exits as usual.

    Args:
        config: The configuration of uvicorn.
        begin_stop: What to do first.
    """

    def __init__(self, config: uvicorn.Config, begin_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.begin_stop = begin_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again at the end, and nobody would close the store.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def serve(
    sets: LiveSets,
    options: ServiceOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a store until SIGTERM or SIGINT comes; then finish what was accepted.

    Args:
        sets: The store.
        options: The limits, and the token.
        host: The address to bind to. Without a token, one of this machine.
        port: The port; 0 for any that is free.
        on_ready: Called with the URL when requests are accepted.

    Raises:
        InputError: Other machines could use it without a token, or the port is in use.
    """
    server, bound = make_server(sets, options, host, port)
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{bound.getsockname()[1]}")
    gc.collect()
    gc.freeze()  # else each full collection looks at all of torch, and requests wait for 0.2 s
    server.run(sockets=[bound])


def make_server(
    sets: LiveSets, options: ServiceOptions, host: str, port: int
) -> tuple[LiveServer, socket.socket]:
    """Return a server, and the socket to run it with. The arguments are those of `serve`."""
    check_host(host, options.token)
    app = make_app(sets, options)
    config = uvicorn.Config(
        app,
        http=type("Limited", (LimitedProtocol,), {"head_timeout": options.timeout}),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing depends on the address of a client
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(2 * options.timeout),
    )
    return LiveServer(config, app.state.service.begin_stop), _bind(host, port)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens."""
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(CONNECTIONS)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host}, port {port}: {error.strerror}. Pass another --port."
        ) from error
    return bound
