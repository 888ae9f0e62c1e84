"""What can be chosen about a service, and its token."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from setfold.errors import InputError

TOKEN_VARIABLE = "SETFOLD_TOKEN"
LEAST_TOKEN = 16  # characters


@dataclass(frozen=True)
class ServiceOptions:
    """Limits of a service, and the token that clients must send.

    Args:
        token: Clients send it as `Authorization: Bearer TOKEN`. If None, none is needed, and the
            service is only for this machine.
        max_body: The largest body of a request, in bytes.
        max_bodies: How many bytes all bodies that are in memory may have together.
        max_updates: How many updates may wait.
        timeout: Seconds that a client may take to send a body or to take a part of an answer, and
            that the store may take.
        max_listeners: How many clients may listen to changes.

    >>> ServiceOptions(token="0123456789abcdef")
    ServiceOptions(max_body=67108864, max_bodies=268435456, max_updates=4096, timeout=30.0,
        max_listeners=64)
    """

    token: str | None = field(default=None, repr=False)
    max_body: int = 1 << 26
    max_bodies: int = 1 << 28
    max_updates: int = 4096
    timeout: float = 30.0
    max_listeners: int = 64

    def __post_init__(self) -> None:
        for name in ("max_body", "max_bodies", "max_updates", "timeout", "max_listeners"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"{name} must be positive and finite; got {value!r}.")
        if self.max_bodies < self.max_body:
            raise InputError(
                f"max_bodies must be at least max_body; got {self.max_bodies} and {self.max_body}."
            )
        token = self.token
        if token is not None and (len(token) < LEAST_TOKEN or not _is_plain(token)):
            raise InputError(
                f"the token must be {LEAST_TOKEN} or more letters, digits and signs of ASCII, "
                "without spaces. Make one with: openssl rand -hex 32"
            )


def _is_plain(token: str) -> bool:
    return all("!" <= character <= "~" for character in token)


def read_token(path: Path | None) -> str | None:
    """Return the token in a file, or in the environment variable SETFOLD_TOKEN; None without both.

    Arguments of a command are no place for a token: all users of a machine can read them.

    Raises:
        InputError: The file cannot be read.
    """
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the token file {path} cannot be read: {error}.") from error


def check_host(host: str, token: str | None) -> None:
    """Raise InputError if other machines could use a service without a token.

    >>> check_host("localhost", None)
    >>> check_host("0.0.0.0", None)
    Traceback (most recent call last):
    setfold.errors.InputError: without a token the service is only for this machine; got the host
    '0.0.0.0'. Set SETFOLD_TOKEN or pass --token-file, or use the host 127.0.0.1.
    """
    if token is None and not _is_loopback(host):
        raise InputError(
            f"without a token the service is only for this machine; got the host {host!r}. Set "
            f"{TOKEN_VARIABLE} or pass --token-file, or use the host 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    """Whether all addresses of a host are of this machine only."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise InputError(f"the host {host!r} has no address: {error}.") from error
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)
