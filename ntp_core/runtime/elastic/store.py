"""The store on which ranks meet. It lives outside all ranks, so that none of them takes it along.

NTP_STORE=host:port      a store of its own: `python -m ntp_core.runtime.elastic.store`
MASTER_ADDR, MASTER_PORT the launcher's, when TORCHELASTIC_USE_AGENT_STORE says that it has one
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from ntp_core.errors import InvalidInput, StoreLost

TIMEOUT_S = 60.0
ANSWER_S = 30.0
"""A store that leaves a request without answer for so long is gone."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, name: str, text: str) -> StoreAddress:
        """host:port, or [host]:port for IPv6; `name` says in errors where the text is from.

        Raises:
            InvalidInput: it is something else.
        """
        host, _, port = text.rpartition(":")
        is_number = port.isascii() and port.isdigit() and len(port) <= 5
        if not host or not is_number or not 0 < int(port) < 65536:
            raise InvalidInput(f"{name}={text!r}: give host:port, the port from 1 to 65535")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StoreAddress:
        """The job's store.

        Raises:
            InvalidInput: none is named, or it would live in a rank, or the address is none.
        """
        if named := environ.get("NTP_STORE", ""):
            return cls.parse("NTP_STORE", named)
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
            return cls.parse("MASTER_ADDR:MASTER_PORT", f"{host}:{port}")
        raise InvalidInput(
            "an elastic job needs a store outside its ranks; start `python -m "
            "ntp_core.runtime.elastic.store` and set NTP_STORE=host:port for all ranks"
        )


def store_outside(environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> TCPStore:
    """A client of the job's store; it may come up to `timeout_s` later than this rank.

    Raises:
        InvalidInput: no store is named, or it would live in a rank, or nobody answers there.
    """
    address = StoreAddress.of(environ)
    _wait_for_listener(address, timeout_s)
    try:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address.host, address.port, None, False, timeout=timeout)
    except RuntimeError as error:
        raise InvalidInput(f"no store answers at {address}: {_first_line(error)}") from None
    bound_silence(address.port, ANSWER_S)
    return store


def _wait_for_listener(address: StoreAddress, timeout_s: float) -> None:
    """Torch waits too, but writes pages to stderr meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InvalidInput(f"no store answers at {address}: {error}") from None
        time.sleep(LOOK_S)


def bound_silence(port: int, answer_s: float) -> int:
    """Let requests of this process to a store fail when no answer comes for so long.

    Torch waits for it without end: a host that vanished says nothing. It does not give its sockets
    away; they are found by the port they lead to. A wait for a key has a time limit of its own.
    Source: socket(7), SO_RCVTIMEO; torch raises DistNetworkError on the EAGAIN that follows.

    Returns:
        how many connections were found; 0 where there is no /proc.
    """
    limit = struct.pack("@ll", int(answer_s), int(answer_s % 1 * 1e6))
    found = 0
    for number in _open_sockets():
        with contextlib.suppress(OSError), socket.fromfd(number, socket.AF_INET, 1) as s:
            if s.getpeername()[1] == port:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                found += 1
    return found


def _open_sockets() -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                    found.append(int(path.name))
    return found


@contextlib.contextmanager
def loss_told(environ: Mapping[str, str]) -> Iterator[None]:
    """Turn torch's word for a store that does not answer any more into ours.

    Raises:
        StoreLost: it is gone.
    """
    try:
        yield
    except DistNetworkError as error:
        raise StoreLost(
            f"the store at {StoreAddress.of(environ)} is gone ({_first_line(error)}), and with it "
            "who is a member; start the job again, from its last checkpoint if it saves any"
        ) from None


def serve(host: str, port: int) -> TCPStore:
    """A store that lives as long as this process, and listens at `host` alone.

    Raises:
        OSError: it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        port = listener.getsockname()[1]
        # Given the address alone, torch would listen at every interface of the machine.
        return TCPStore(
            host,
            port,
            None,
            True,
            timeout=timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ntp_core.runtime.elastic.store --port N`: serves until it is told to end."""
    parser = argparse.ArgumentParser(
        prog="python -m ntp_core.runtime.elastic.store",
        description="Serve the store of one elastic job. Whoever reaches the port is trusted.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    args = parser.parse_args(argv)
    if not 0 <= args.port < 65536:
        parser.error(f"--port {args.port}: give 0 to 65535")
    wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        store = serve(args.host, args.port)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"store: cannot listen on {args.host}:{args.port}: {_first_line(error)}\n")
        return 2
    sys.stdout.write(f"NTP_STORE={StoreAddress(host=args.host, port=store.port)}\n")
    sys.stdout.flush()
    signal.sigwait(wanted)
    return 0


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    sys.exit(main())
