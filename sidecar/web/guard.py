"""Who may ask: token, Host header and security headers around every answer.

Without a token the server only listens on loopback. There a foreign web page could still reach it
by pointing its own name at 127.0.0.1 (DNS rebinding), so then the Host header must be a loopback
name. With a token the rebinding page does not know it, and any name may be used.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ntp_core.inbound.plain_json import to_json

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = ("/healthz", "/readyz")
"""Asked by machines that carry no token; they tell one word and a reason."""

MAX_QUERY_FIELDS = 16
"""A query with more is not looked at, and so holds no token."""

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # the page's address may hold the token
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    return host in LOOPBACK_NAMES or host.startswith("127.")


class Guard:
    """ASGI middleware that refuses strangers and adds the security headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                # Measurements age; the program may be another version after an update.
                headers.setdefault("cache-control", "no-cache" if _is_static(scope) else "no-store")
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if self._token is None:
            if _host_name(headers.get("host", "")) not in LOOPBACK_NAMES:
                return _error(
                    421,
                    "this sidecar has no token and answers to localhost only; "
                    "open it as http://127.0.0.1:<port>/ or start it with --token",
                )
            return None
        if scope["path"] in OPEN_PATHS or _is_static(scope):
            return None
        if _has_token(headers, scope, self._token):
            return None
        return _error(
            401,
            "this sidecar needs its token: send 'Authorization: Bearer <token>', "
            "or open the page as /?token=<token>",
        )


def _is_static(scope: Scope) -> bool:
    """The page's scripts and styles: the same for everyone, and no data."""
    return str(scope["path"]).startswith("/static/")


def _host_name(host: str) -> str:
    """The Host header without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _has_token(headers: Headers, scope: Scope, token: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    offered = [given.strip()] if scheme.lower() == "bearer" else []
    query = scope.get("query_string", b"").decode("latin-1")
    with contextlib.suppress(ValueError):  # it has more fields than any page of ours sends
        offered += parse_qs(query, max_num_fields=MAX_QUERY_FIELDS).get("token", [])
    return any(secrets.compare_digest(_bytes(o), _bytes(token)) for o in offered)


def _bytes(text: str) -> bytes:
    """Also of a token that came out of the environment with bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON. Whatever numbers and text are in it, it can be encoded."""
    return Response(to_json(body), status, headers, media_type="application/json")


def _error(status: int, text: str) -> ASGIApp:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return json_response({"error": text}, status, headers)
