"""The endpoints of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from setfold import __version__
from setfold.errors import SetfoldError, StoreError
from setfold.live.service import describe, reads
from setfold.live.service.changes import Changes
from setfold.live.service.gate import Gate
from setfold.live.service.messages import (
    ARROW,
    JSON,
    RETRY,
    Bodies,
    JsonResponse,
    RefusedError,
    StreamResponse,
    answer_to,
    error_response,
    media_type_of,
    wants_arrow,
)
from setfold.live.service.metrics import Metrics
from setfold.live.service.options import ServiceOptions
from setfold.live.service.page import render
from setfold.live.service.queue import UpdateQueue
from setfold.live.service.threads import Threads
from setfold.live.service.updates import parse_arrow, parse_json
from setfold.live.sets import LiveSets

UPDATES, SETS = describe.UPDATES, "/v1/sets/"
EVENTS = "text/event-stream"
Last = Annotated[str | None, Query(description=describe.LAST)]
Head = Annotated[bool, Query(description=describe.HEAD)]


class Service:
    """What the endpoints of a service share.

    Args:
        sets: The store.
        options: The limits, and the token.
    """

    def __init__(self, sets: LiveSets, options: ServiceOptions) -> None:
        self.sets, self.options = sets, options
        self.metrics = Metrics()
        self.bodies = Bodies(options)
        self.changes = Changes(options.max_listeners, self.metrics)
        self.queue = UpdateQueue(sets, options, self.changes, self.metrics)
        self.threads = Threads(options.timeout)
        self.metrics.watch("body_bytes", lambda: self.bodies.held)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Return a context in which updates are applied; at its end, all that were accepted are."""
        self.queue.start()
        try:
            yield
        finally:
            self.begin_stop()
            await self.queue.stop()
            self.threads.close()

    def begin_stop(self) -> None:
        """Tell those who listen that the service stops, and say that it is not ready any more."""
        self.changes.stop()

    # ---- sets ----------------------------------------------------------------------------------

    async def update(self, request: Request) -> Response:
        """Add rows to their sets, once: a batch that was applied before changes nothing."""
        media_type = media_type_of(request)
        async with self.bodies.body_of(request) as body:
            if media_type == JSON:
                applied = await self.queue.apply(partial(parse_json, body))
            else:
                query = request.query_params.multi_items()
                applied = await self.queue.apply(partial(parse_arrow, body, query))
        found = applied._asdict()
        del found["skipped"]  # a bad row is an error here
        return JsonResponse(found)

    async def read(self, request: Request, last: Last = None, head: Head = False) -> Response:
        """Return the number of elements of a set, and its encoding."""
        reads.check_query([*request.query_params])
        names = reads.ids_in_path(request.scope["raw_path"], SETS)
        found = await self.threads.run(reads.read_one, self.sets, names, last, head)
        return JsonResponse(found)

    async def read_many(self, request: Request) -> Response:
        """Return the numbers of elements and the encodings of some sets, at one moment."""
        as_arrow = wants_arrow(request)
        if media_type_of(request) != JSON:
            raise RefusedError(415, f"expected a body of type {JSON}.")
        async with self.bodies.body_of(request) as body:
            names, last, head = reads.parse_read(body)
        if as_arrow:
            table = await self.threads.run(reads.read_table, self.sets, names, last, head)
            return Response(table, media_type=ARROW)
        return JsonResponse(await self.threads.run(reads.read_many, self.sets, names, last, head))

    async def read_all(self, request: Request, last: Last = None, head: Head = False) -> Any:
        """Return the encodings of all sets, sorted by set id, as an Arrow stream."""
        reads.check_query([*request.query_params])
        parts = self.threads.stream(partial(reads.stream_all, self.sets, last, head))
        first = await anext(parts)  # errors before the first part have a status of their own
        return StreamResponse(_after(first, parts), ARROW, self.options.timeout)

    async def delete(self, request: Request) -> Response:
        """Delete a set completely: from all models and buckets, and from the files of the store."""
        names = reads.ids_in_path(request.scope["raw_path"], SETS)
        told = [_shown(name) for name in names]
        loop = asyncio.get_running_loop()

        def delete_and_tell() -> int:  # in the thread, because the time limit may come before
            try:
                elements = self.sets.delete(names)
            except StoreError:  # it may come after the deletion
                loop.call_soon_threadsafe(self.changes.tell, "deleted", told)
                raise
            loop.call_soon_threadsafe(self.changes.tell, "deleted", told)
            return elements

        return JsonResponse({"elements": await self.threads.run(delete_and_tell)})

    async def listen(self) -> Any:
        """Tell which sets change, as server-sent events, from now on."""
        self.changes.check()
        return StreamResponse(self.changes.listen(), EVENTS, self.options.timeout)

    # ---- the service ---------------------------------------------------------------------------

    async def health(self) -> Response:
        """Say that the process runs."""
        return PlainTextResponse("ok\n")

    async def ready(self) -> Response:
        """Say whether updates and reads can be answered now."""
        if self.changes.stopping:
            raise RefusedError(503, "the service stops.", RETRY)
        await self.threads.run(self.sets.count, [])
        return PlainTextResponse("ready\n")

    async def show_metrics(self) -> Response:
        """Return counts and times for Prometheus."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")


def make_app(sets: LiveSets, options: ServiceOptions | None = None) -> FastAPI:
    """Return the application of a service, for any ASGI server.

    Args:
        sets: The store. Whoever opened it closes it, after the service has stopped.
        options: The limits, and the token.

    >>> import setfold, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = setfold.live.create(f"{folder}/live.db", setfold.Pool(1, "mean"))
    ...     app = make_app(store)
    >>> sorted(path for path in app.openapi()["paths"] if path.startswith("/v1"))
    ['/v1/changes', '/v1/read', '/v1/sets', '/v1/sets/{id}', '/v1/updates']
    """
    chosen = options or ServiceOptions()
    service = Service(sets, chosen)
    app = FastAPI(
        title="setfold live",
        version=__version__,
        description=describe.ABOUT,
        docs_url=None,  # they load a program from elsewhere
        redoc_url=None,
        lifespan=service.running,
        middleware=[
            Middleware(
                Gate,
                token=chosen.token,
                metrics=service.metrics,
                direct={("POST", UPDATES): _directly(service.update)},
            )
        ],
        default_response_class=JsonResponse,
    )
    app.state.service = service
    for route in describe.routes(service):
        app.add_api_route(**route)
    page = render(app.openapi())

    async def show_page() -> Response:
        return HTMLResponse(page, headers=describe.PAGE_HEADERS)

    for path in ("/", "/docs"):
        app.add_api_route(path, show_page, include_in_schema=False)
    for kind in (RefusedError, SetfoldError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)
    return app


def _directly(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Return an application that answers with an endpoint alone."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except (RefusedError, SetfoldError) as error:
            response = answer_to(error)
        await response(scope, receive, send)

    return answer


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return error_response(422, "InputError", f"{first['loc'][-1]}: {first['msg']}.")
    if isinstance(error, HTTPException):
        return error_response(error.status_code, "Refused", str(error.detail), error.headers)
    return answer_to(error)


async def _after(first: bytes, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield a first part and then others, whose generator is closed when this one is."""
    async with aclosing(parts):
        yield first
        async for part in parts:
            yield part


def _shown(name: Any) -> Any:
    return list(name) if isinstance(name, tuple) else name
