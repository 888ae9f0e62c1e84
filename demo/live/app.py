"""The server of the page: its files, the sets, and the steps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from demo.live.parts import Part
from demo.live.step import describe, example, step
from setfold.errors import InputError, SetfoldError
from setfold.live.service.gate import Gate
from setfold.live.service.messages import Bodies, JsonResponse, RefusedError, answer_to
from setfold.live.service.metrics import Metrics
from setfold.live.service.options import ServiceOptions
from setfold.live.service.threads import Threads

PAGE = Path(__file__).parent / "page"
LIMITS = ServiceOptions(max_body=1 << 16, max_bodies=1 << 22)
HEADERS = {
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-cache",
}


class Pages:
    """The requests of the page.

    Args:
        parts: the models by name, each with its sets.
    """

    def __init__(self, parts: dict[str, Part]) -> None:
        self.parts = parts
        self.bodies, self.threads = Bodies(LIMITS), Threads(LIMITS.timeout)

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Return a context at whose end all threads have ended."""
        yield
        self.threads.close()

    async def about(self, request: Request) -> Response:
        """Return what there is."""
        return JsonResponse([describe(part, name) for name, part in self.parts.items()])

    async def example(self, request: Request) -> Response:
        """Return the elements of a set."""
        part = self._part(request.path_params["part"])
        number = request.path_params["number"]
        if number >= len(part.examples):
            raise RefusedError(404, f"there are {len(part.examples)} sets; got {number}.")
        return JsonResponse(example(part, number))

    async def step(self, request: Request) -> Response:
        """Apply what a visitor has done, and return what the page shows then."""
        async with self.bodies.body_of(request) as body:
            try:
                found = orjson.loads(body)
            except orjson.JSONDecodeError as error:
                raise InputError(f"the body is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise InputError("expected an object.")
        return JsonResponse(await self.threads.run(step, self._part(found.get("part")), found))

    def _part(self, name: object) -> Part:
        if not isinstance(name, str) or name not in self.parts:
            raise RefusedError(404, f"there are {', '.join(self.parts)}; got {name!r:.60}.")
        return self.parts[name]


class Headers:
    """Adds headers to all answers: the page loads nothing from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS.items()]
            await send(message)

        await self.app(scope, receive, add)


async def _refuse(request: Request, error: Exception) -> Response:
    return answer_to(error)


def make_app(parts: dict[str, Part]) -> Starlette:
    """Return the application. It is for this machine, under its own name, only."""
    pages = Pages(parts)
    return Starlette(
        routes=[
            Route("/api/about", pages.about),
            Route("/api/{part}/{number:int}", pages.example),
            Route("/api/step", pages.step, methods=["POST"]),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        middleware=[
            Middleware(partial(Gate, token=None, metrics=Metrics(), direct={})),
            Middleware(Headers),
        ],
        lifespan=pages.running,
        exception_handlers={RefusedError: _refuse, SetfoldError: _refuse},
    )
