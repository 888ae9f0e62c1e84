"""Every request passes the gate: it needs the token, and is counted."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from setfold.live.service.messages import CLOSE, error_response
from setfold.live.service.metrics import SECONDS, Metrics

OPEN = frozenset({"/", "/docs", "/openapi.json", "/healthz", "/readyz"})  # they say nothing secret
LOCAL_HOSTS = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


class Gate:
    """Refuses requests without the token, and counts requests.

    Without a token, only requests to this machine by its own name pass. Otherwise a page from
    elsewhere could use the browser of this machine to read the sets, through a name of its own that
    it lets point here.

    Args:
        app: What answers requests that pass.
        token: The token; None if none is needed.
        metrics: Where requests are counted.
        direct: What answers requests of some methods and paths at once. FastAPI's way to an
            endpoint takes as long as the rest of a small update.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        metrics: Metrics,
        direct: Mapping[tuple[str, str], ASGIApp],
    ) -> None:
        self.app, self.metrics, self.direct = app, metrics, direct
        self.expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method, path = scope["method"], scope["path"]
        direct = self.direct.get((method, path))
        try:
            await (self._refuse(scope) or direct or self.app)(scope, receive, watch)
        finally:
            if direct is None:  # clients invent methods and paths
                path = getattr(scope.get("route"), "path", "other")
                method = method if path != "other" else "other"
            self.metrics.count("requests_total", path=path, method=method, status=str(status))
            took = time.perf_counter() - begun
            self.metrics.observe("request_seconds", took, SECONDS, path=path, method=method)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        """Return the answer to a request that must not pass; None if it may."""
        headers = dict(scope["headers"])
        if self.expected is None:
            host = headers.get(b"host", b"").lower()
            name = host if host.endswith(b"]") else host.rpartition(b":")[0] or host
            if name in LOCAL_HOSTS:
                return None
            return error_response(
                421,
                "Refused",
                "the service has no token, so it is for http://127.0.0.1 only.",
                CLOSE,
            )
        if scope["path"] in OPEN:
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return None
        return error_response(
            401,
            "Refused",
            "expected the header Authorization: Bearer TOKEN, with the token of this service.",
            {"WWW-Authenticate": "Bearer", **CLOSE},
        )
