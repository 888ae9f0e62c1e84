"""The page that describes the endpoints, made from the description (OpenAPI). It loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1d2436; --soft: #5d6678; --paper: #fbfbfc;
  --line: #dfe2ea; --mark: #21305a; --code: #f0f2f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ee; --soft: #a0a8ba; --paper: #14171f;
  --line: #303645; --mark: #a9bcf5; --code: #1f2430; } }
body { margin: 0 auto; padding: 2.5rem 1.1rem 4rem; max-width: 52rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.6 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.8rem; margin: 0 0 .5rem; } h1 small { color: var(--soft); font-size: 1rem; }
h2 { font: 600 1.05rem ui-monospace, "DejaVu Sans Mono", monospace; margin: 2.5rem 0 .3rem;
  padding-top: 1rem; border-top: 1px solid var(--line); color: var(--mark); }
h3 { font-size: .95rem; margin: 1.2rem 0 .2rem; }
code, pre { font: .88rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--code); padding: .7rem .9rem; border-radius: .4rem; overflow-x: auto; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .2rem 1rem; margin: 0; }
dt { font: 600 .88rem/1.7 ui-monospace, monospace; } dd { margin: 0; color: var(--soft); }
"""


def render(description: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    >>> paths = {"/healthz": {"get": {"description": "Say that <it> runs.", "responses": {}}}}
    >>> page = render({"info": {"title": "a", "version": "1", "description": ""}, "paths": paths})
    >>> "Say that &lt;it&gt; runs." in page
    True
    """
    info = description["info"]
    parts = [
        _operation(path, method, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        f"<p>{escape(info['description'])}</p>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</main></body></html>"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h2>{method.upper()} {escape(path)}</h2>"]
    parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
    parameters = operation.get("parameters", ())
    if parameters:
        entries = {f"{one['name']} ({one['in']})": one.get("description", "") for one in parameters}
        parts.append(f"<h3>Parameters</h3>{_entries(entries)}")
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        parts.append("<h3>Body</h3>" + "".join(_content(*item) for item in body.items()))
    for status, answer in operation.get("responses", {}).items():
        if status == "200":
            content = answer.get("content", {}).items()
            parts.append("<h3>Answer</h3>" + "".join(_content(*item) for item in content))
    errors = {
        status: answer["description"]
        for status, answer in operation.get("responses", {}).items()
        if status not in ("200", "422") or answer["description"] != "Validation Error"
        if status != "200"
    }
    if errors:
        parts.append(f"<h3>Errors</h3>{_entries(errors)}")
    return f"<section>{''.join(parts)}</section>"


def _content(kind: str, content: Mapping[str, Any]) -> str:
    schema = content.get("schema", {})
    parts = [f"<p><code>{escape(kind)}</code> {escape(schema.get('description', ''))}</p>"]
    if "properties" in schema:
        entries = {
            name: one.get("description", one.get("type", ""))
            for name, one in schema["properties"].items()
        }
        parts.append(_entries(entries))
    if "example" in schema:
        parts.append(f"<pre>{escape(json.dumps(schema['example'], indent=2))}</pre>")
    return "".join(parts)


def _entries(entries: Mapping[str, str]) -> str:
    inner = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items())
    return f"<dl>{inner}</dl>"
