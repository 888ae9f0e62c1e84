"""What the description of the service (OpenAPI) says about each endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from setfold.live.service.messages import ARROW, JSON

if TYPE_CHECKING:
    from setfold.live.service.app import Service

ABOUT = (
    "A store of live sets: rows are added to their sets, each batch once, and sets are read as "
    "encodings. Every request except those for this page, /openapi.json, /healthz and /readyz "
    "carries the header `Authorization: Bearer TOKEN`, if the service has a token."
)
LAST = "Only the most recent elements, such as 7d: a multiple of the buckets of the store."
HEAD = "Apply the head of the model, for predictions instead of encodings."
ID = (
    "The set id, percent-encoded. If it has several columns, one after the other, separated by "
    "slashes."
)
UPDATES = "/v1/updates"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}

NAMES = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
SET_ID = {
    "description": "A set id; a list if it has several columns.",
    "oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {}}],
}
NUMBERS = {"type": "array", "items": {}, "description": "Numbers, in the shape of an encoding."}
UPDATE = {
    "type": "object",
    "required": ["batch", "set", "rows"],
    "properties": {
        "batch": {
            "type": "array",
            "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            "minItems": 2,
            "description": "The identity of the batch: a source, and what identifies a batch of it.",
        },
        "set": NAMES | {"description": "The column of the set id, or several."},
        "features": NAMES
        | {
            "description": "The columns to encode, in the order that the model expects. Not for "
            "models that read their own columns, and not needed for a single column."
        },
        "time": {
            "type": "string",
            "description": "The column of the time, if the store has buckets: seconds since 1970, "
            "or text such as 2026-11-18T16:05:43Z.",
        },
        "rows": {"type": "array", "items": {"type": "object"}, "minItems": 1},
    },
    "example": {
        "batch": ["orders", 17],
        "set": "user",
        "features": ["price", "amount"],
        "rows": [{"user": "ann", "price": 9.5, "amount": 2}],
    },
}
APPLIED = {
    "type": "object",
    "properties": {
        "status": {"enum": ["applied", "duplicate"]},
        "rows": {"type": "integer", "description": "Rows that count now."},
        "sets": {"type": "integer", "description": "Sets that they belong to."},
        "late": {"type": "integer", "description": "Rows whose bucket has expired."},
        "deleted": {"type": "integer", "description": "Rows whose set was deleted after them."},
    },
    "example": {"status": "applied", "rows": 1, "sets": 1, "late": 0, "deleted": 0},
}
READ = {
    "type": "object",
    "required": ["sets"],
    "properties": {
        "sets": {"type": "array", "items": SET_ID},
        "last": {"type": "string", "description": LAST},
        "head": {"type": "boolean", "description": HEAD},
    },
    "example": {"sets": ["ann", "bob"]},
}
ONE = {
    "type": "object",
    "properties": {"set": SET_ID, "count": {"type": "integer"}, "encoding": NUMBERS},
}
MANY = {
    "type": "object",
    "properties": {
        "sets": {"type": "array", "items": SET_ID},
        "counts": {"type": "array", "items": {"type": "integer"}},
        "encodings": {"type": "array", "items": NUMBERS},
    },
}
DELETED = {
    "type": "object",
    "properties": {"elements": {"type": "integer", "description": "Elements that it had."}},
}
ERRORS = {
    401: "The token is missing or wrong.",
    408: "The body took too long.",
    409: "The batch was applied before, with other rows.",
    413: "The body, or what was asked for, is too large.",
    415: "The body has another type than JSON or Arrow.",
    422: "The rows, columns or arguments are not what the model and the store expect.",
    429: "Too much waits. Retry-After says when to try again.",
    503: "The store cannot be used now, or the service stops.",
}


def _binary(description: str) -> dict[str, Any]:
    return {"schema": {"type": "string", "format": "binary", "description": description}}


def _answers(content: dict[str, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of an endpoint, by status."""
    found: dict[int | str, dict[str, Any]] = {200: {"description": "OK", "content": content}}
    return found | {status: {"description": ERRORS[status]} for status in (401, *errors)}


def _parameter(name: str, where: str, description: str, schema: Any = None) -> dict[str, Any]:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": description,
        "schema": schema or {"type": "string"},
    }


def routes(service: Service) -> list[dict[str, Any]]:
    """Return the arguments of `FastAPI.add_api_route` for each endpoint."""
    json = lambda schema: {JSON: {"schema": schema}}  # noqa: E731
    several = {"type": "array", "items": {"type": "string"}}
    of_arrow = [
        _parameter(name, "query", f"For an Arrow stream: as {name} in JSON.", several)
        for name in ("batch", "set", "features", "time")
    ]
    of_set = {"parameters": [_parameter("id", "path", ID)]}
    text = {"text/plain": {"schema": {"type": "string"}}}
    return [
        {
            "path": UPDATES,
            "endpoint": service.update,
            "methods": ["POST"],
            "responses": _answers(json(APPLIED), 408, 409, 413, 415, 422, 429, 503),
            "openapi_extra": {
                "parameters": of_arrow,
                "requestBody": {
                    "required": True,
                    "content": json(UPDATE) | {ARROW: _binary("The rows.")},
                },
            },
        },
        {
            "path": "/v1/sets/{id:path}",
            "endpoint": service.read,
            "methods": ["GET"],
            "responses": _answers(json(ONE), 422, 429, 503),
            "openapi_extra": of_set,
        },
        {
            "path": "/v1/sets/{id:path}",
            "endpoint": service.delete,
            "methods": ["DELETE"],
            "responses": _answers(json(DELETED), 422, 429, 503),
            "openapi_extra": of_set,
        },
        {
            "path": "/v1/read",
            "endpoint": service.read_many,
            "methods": ["POST"],
            "responses": _answers(
                json(MANY) | {ARROW: _binary("Columns count and encoding.")},
                413,
                415,
                422,
                429,
                503,
            ),
            "openapi_extra": {"requestBody": {"required": True, "content": json(READ)}},
        },
        {
            "path": "/v1/sets",
            "endpoint": service.read_all,
            "methods": ["GET"],
            "responses": _answers({ARROW: _binary("Columns set, count, encoding.")}, 422, 429, 503),
        },
        {
            "path": "/v1/changes",
            "endpoint": service.listen,
            "methods": ["GET"],
            "responses": _answers(
                {
                    "text/event-stream": _binary(
                        'Events "changed" and "deleted" with {"sets": [...]}; "dropped" and '
                        '"stopped" with {"reason": ...} are the last ones.'
                    )
                },
                429,
            ),
        },
        {"path": "/healthz", "endpoint": service.health, "responses": {200: {"content": text}}},
        {
            "path": "/readyz",
            "endpoint": service.ready,
            "responses": {200: {"content": text}, 503: {"description": ERRORS[503]}},
        },
        {"path": "/metrics", "endpoint": service.show_metrics, "responses": _answers(text)},
    ]
