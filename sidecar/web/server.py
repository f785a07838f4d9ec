"""The web server: uvicorn in a thread of the daemon, started and stopped by it."""

from __future__ import annotations

import errno
import socket
import threading

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidecar.web.connections import BoundedConfig, ConnectionLimits
from sidecar.web.guard import is_loopback
from sidecar.web.stream import Address, SnapshotStream

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9440
CONNECTION_LIMITS = ConnectionLimits()
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0


class ServeError(Exception):
    """The server cannot run as asked. The message is one line: what is wrong and what to do."""


class WebServer:
    """Serves one application until stopped.

    The port is taken in the constructor, so that a port in use is known before anything runs.
    Port 0 takes a free one; `port` says which.

    Raises:
        ServeError: the address is not loopback and there is no token, or it cannot be taken.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        token: str | None,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        limits: ConnectionLimits = CONNECTION_LIMITS,
    ) -> None:
        if token is None and not is_loopback(host):
            raise ServeError(
                f"{host} can be reached from other machines and there is no token; "
                f"set one with --token, or listen on {DEFAULT_HOST}"
            )
        self._socket = _listen(host, port, limits.max_connections)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self.stream: SnapshotStream = app.state.stream
        self.stream.drop = self._drop
        self._server = _Server(
            BoundedConfig(
                app,
                limits,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="web", daemon=True
        )

    @property
    def url(self) -> str:
        """Address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def link(self) -> str:
        """Address for links that others follow: on all addresses, the name of this machine."""
        if self.host not in ("0.0.0.0", "::"):
            return self.url
        return f"http://{socket.gethostname()}:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Return when requests are answered. Raises ServeError if that does not come about."""
        self._thread.start()
        if not self._server.is_up.wait(START_TIMEOUT_S):
            raise ServeError(f"the web server on {self.url} did not start in {START_TIMEOUT_S} s")

    def stop(self) -> None:
        """End all streams and free the port; at most about STOP_TIMEOUT_S."""
        self.stream.stopping.set()
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._socket.close()

    def _drop(self, client: Address) -> None:
        """Cut a connection that does not read; closing it in good order would wait for it."""
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, H11Protocol) and connection.client == client:
                connection.transport.abort()


class _Server(uvicorn.Server):
    """Tells when it is up. `run` in a thread other than the main one leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ServeError(_refused(host, port, error)) from error
    return sock


def _refused(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the other program, "
            "or choose another port with --port (0 takes a free one)"
        )
    reason = error.strerror or str(error)
    return f"cannot listen on {host} port {port}: {reason}; use another --host or --port"
