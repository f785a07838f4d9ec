"""Addresses that messages are sent to."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ntp_core.errors import InvalidInput


def check_url(url: str, option: str = "--webhook-url") -> str:
    """The address itself when messages can be sent to it.

    Raises:
        InvalidInput: naming the value, what is wrong with it and the fix, on one line.
    """
    shown = repr(redacted(url))
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidInput(f"{option} {shown}: {error}; give http://HOST[:PORT]/PATH") from None
    if parts.scheme not in ("http", "https"):
        raise InvalidInput(
            f"{option} {shown}: scheme '{parts.scheme}' is not http or https; "
            "give http://HOST[:PORT]/PATH"
        )
    if not parts.hostname or port == 0 or any(c.isspace() or not c.isprintable() for c in url):
        raise InvalidInput(
            f"{option} {shown}: no valid host and port; give http://HOST[:PORT]/PATH"
        )
    return url


def redacted(url: str) -> str:
    """The address without what may be secret: user, password, query, fragment."""
    base = url.split("?", 1)[0].split("#", 1)[0]
    scheme, mark, rest = base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}" if mark else base


def is_loopback(url: str) -> bool:
    """Whether the address is on this machine: then no proxy of the environment is asked."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
