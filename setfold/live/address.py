"""The address of a store in PostgreSQL, in which no message shows a password."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from setfold.errors import InputError

try:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:
    raise InputError(
        "a store in PostgreSQL needs the package psycopg, which is not installed. Run: "
        "pip install 'psycopg[binary]'"
    ) from error

SCHEMA = "setfold"  # unless the URL names another one
DEFAULTS = {
    "application_name": "setfold",
    "connect_timeout": "10",
    "keepalives_idle": "30",  # notice a server that has vanished
    "keepalives_interval": "10",
    "keepalives_count": "3",
}


class Address(NamedTuple):
    """Where a store is.

    Attributes:
        options: What libpq needs to connect; a password may be among it.
        schema: The schema of the tables.
        shown: The URL without the password and without options.
    """

    options: dict[str, str]
    schema: str
    shown: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Return the address that a URL names.

        Raises:
            InputError: It is not such a URL.

        >>> Address.of("postgresql://ann:secret@db.example/shop?schema=clicks").shown
        'postgresql://ann@db.example/shop?schema=clicks'
        """
        base, _, query = url.partition("?")
        pairs = [pair.partition("=") for pair in query.split("&") if pair]
        schema = unquote(next((value for name, _, value in pairs if name == "schema"), SCHEMA))
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
            raise InputError(
                "the schema of a store has a name of small letters, digits and underscores; got "
                f"{schema!r:.70}. Change schema=... in the URL."
            )
        rest = "&".join("".join(pair) for pair in pairs if pair[0] != "schema")
        options = _parse(base, f"{base}?{rest}" if rest else base)
        return cls(
            {**DEFAULTS, **options, "client_encoding": "UTF8"}, schema, _show(options, schema)
        )


def _parse(base: str, url: str) -> dict[str, str]:
    """Return the options in a URL; what libpq says of a bad one may contain the password."""
    try:
        options = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except ProgrammingError:
        options = {"port": "?"}
    host, _, path = base.partition("://")[2].partition("/")
    ports = [port for port in options.get("port", "").split(",") if port]
    if host.count("@") > 1 or "@" in path or not all(port.isdecimal() for port in ports):
        raise InputError(
            "expected postgresql://user:password@host:port/database; the URL has another form. In a "
            "password, write %40 for @, %2F for /, %3A for :, %3F for ?, %23 for # and %25 for %."
        )
    return options


def _show(options: dict[str, str], schema: str) -> str:
    user = f"{options['user']}@" if "user" in options else ""
    host, port = options.get("host", ""), options.get("port", "")
    address = host + (f":{port}" if port else "")
    if host.startswith("/"):  # the folder of a socket
        address, host = "", f"host={host}&" + (f"port={port}&" if port else "")
    else:
        host = ""
    return f"postgresql://{user}{address}/{options.get('dbname', '')}?{host}schema={schema}"
