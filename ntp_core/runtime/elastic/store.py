"""The store on which ranks meet. It lives outside all ranks, so that none of them takes it along.

NTP_STORE=host:port      a store of its own: `python -m ntp_core.runtime.elastic.store`
MASTER_ADDR, MASTER_PORT the launcher's, when TORCHELASTIC_USE_AGENT_STORE says that it has one
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from ntp_core.errors import InvalidInput

TIMEOUT_S = 60.0


def store_outside(environ: Mapping[str, str]) -> Store:
    """A client of the job's store.

    Raises:
        InvalidInput: no store is named, or it would live in a rank, or nobody answers there.
    """
    named = environ.get("NTP_STORE", "")
    if named:
        host, _, port = named.rpartition(":")
    elif environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    else:
        raise InvalidInput(
            "an elastic job needs a store outside its ranks; start `python -m "
            "ntp_core.runtime.elastic.store` and set NTP_STORE=host:port for all ranks"
        )
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(f"the store's address {named or f'{host}:{port}'!r}: give host:port")
    try:
        return TCPStore(host, int(port), None, False, timeout=timedelta(seconds=TIMEOUT_S))
    except RuntimeError as error:
        raise InvalidInput(f"no store answers at {host}:{port}: {error}") from None


def serve(host: str, port: int) -> TCPStore:
    """A store that lives as long as this process."""
    timeout = timedelta(seconds=TIMEOUT_S)
    return TCPStore(host, port, None, True, timeout=timeout, wait_for_workers=False)


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
    except RuntimeError as error:
        sys.stderr.write(f"store: cannot listen on {args.host}:{args.port}: {error}\n")
        return 2
    sys.stdout.write(f"NTP_STORE={args.host}:{store.port}\n")
    sys.stdout.flush()
    signal.sigwait(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
