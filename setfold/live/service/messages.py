"""Bodies of requests, within limits of size, memory and time; answers and errors as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from setfold.errors import BatchConflictError, InputError, SetfoldError, StoreError
from setfold.live.service.options import ServiceOptions

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
RETRY = {"Retry-After": "1"}
CLOSE = {"Connection": "close"}  # the rest of the body is not read


class RefusedError(Exception):
    """A request that is refused.

    Args:
        status: The status of the answer.
        message: What was expected, what came, and what to do.
        headers: More headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class JsonResponse(Response):
    """An answer as JSON. Tensors may be part of it as arrays of numpy."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def error_response(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return the answer to a request that failed."""
    return JsonResponse({"error": kind, "message": message}, status, headers)


def answer_to(error: Exception) -> JsonResponse:
    """Return the answer to a request that raised an error."""
    kind, message = type(error).__name__, str(error)
    if isinstance(error, RefusedError):
        return error_response(error.status, "Refused", message, error.headers)
    if isinstance(error, BatchConflictError):
        return error_response(409, kind, message)
    if isinstance(error, InputError):
        return error_response(422, kind, message)
    if isinstance(error, StoreError):
        return error_response(503, kind, message, RETRY)
    if isinstance(error, SetfoldError):
        return error_response(500, kind, message)
    return error_response(500, "Error", "the service has failed; its log says why.")


class Bodies:
    """Reads the bodies of requests, and counts how many bytes of them are in memory.

    Args:
        options: The limits.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.held = 0

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """Return a context with the body of a request, which counts until the context ends.

        Raises:
            RefusedError: It is too large, too slow, compressed, or there is no memory for it now.
        """
        parts: list[bytes] = []
        held = 0
        self._check_head(request)
        try:
            async with asyncio.timeout(self.options.timeout):
                async for part in request.stream():
                    parts.append(part)
                    held += len(part)
                    self.held += len(part)
                    self._check(held, self.held)
            yield b"".join(parts) if len(parts) > 1 else parts[0]
        except ClientDisconnect as error:
            raise RefusedError(400, "the body did not arrive completely.", CLOSE) from error
        except TimeoutError as error:
            raise RefusedError(
                408, f"the body did not arrive within {self.options.timeout:g} seconds.", CLOSE
            ) from error
        finally:
            self.held -= held

    def _check_head(self, request: Request) -> None:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedError(415, "the body is compressed. Send it as it is.", CLOSE)
        length = request.headers.get("content-length", "0")
        size = int(length) if length.isdecimal() else 0
        self._check(size, self.held + size)

    def _check(self, size: int, held: int) -> None:
        if size > self.options.max_body:
            raise RefusedError(
                413,
                f"the body is larger than {self.options.max_body:,} bytes. Send several batches.",
                CLOSE,
            )
        if held > self.options.max_bodies:
            raise RefusedError(
                429, "the service has as much to do as it can hold. Try again later.", RETRY | CLOSE
            )


def media_type_of(request: Request) -> str:
    """Return the media type of a body, without parameters.

    Raises:
        RefusedError: It is neither JSON nor an Arrow stream.
    """
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found not in (JSON, ARROW):
        raise RefusedError(
            415, f"expected a body of type {JSON} or {ARROW}; got {found or 'none'!r:.80}.", CLOSE
        )
    return found


def wants_arrow(request: Request) -> bool:
    """Whether a client wants an Arrow stream; JSON otherwise.

    Raises:
        RefusedError: It wants neither.
    """
    accepted = [
        each.partition(";")[0].strip().lower()
        for each in request.headers.get("accept", "*/*").split(",")
    ]
    if ARROW in accepted:
        return True
    if not {"*/*", "application/*", JSON} & {*accepted}:
        raise RefusedError(406, f"the service answers with {JSON} or {ARROW}.")
    return False


class StreamResponse(Response):
    """An answer in parts. A client that does not take a part in time is cut off.

    Args:
        parts: The parts.
        media_type: What they are.
        timeout: Seconds that a client may take for a part.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], media_type: str, timeout: float) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        self.parts, self.timeout = parts, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until there are no more, or the client is gone."""
        headers = [entry for entry in self.raw_headers if entry[0] != b"content-length"]
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (part := await self._next(gone)) is not None:
                async with asyncio.timeout(self.timeout):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            pass  # without its end, an answer is cut off, and the client can tell
        finally:
            gone.cancel()
            await self.parts.aclose()

    async def _next(self, gone: asyncio.Task[None]) -> bytes | None:
        """Return the next part; None if there is none, or if nobody waits for it."""
        waiting = asyncio.ensure_future(anext(self.parts, None))
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        await asyncio.wait({waiting})
        return None


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
