"""One process of the rank pool: waits for a body, joins a fresh group, runs it, answers, leaves."""

from __future__ import annotations

import faulthandler
import importlib
import pickle
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_core.runtime.comm import Comm

STORE_TIMEOUT_S = 60.0


def main() -> None:
    """Serve until the pool closes its end."""
    pipe, port = Connection(int(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, None, False, timeout=timeout)
    pipe.send_bytes(pickle.dumps(("ok", time.monotonic_ns(), None)))
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _run(pipe, store, *task)


def _run(
    pipe: Connection,
    store: TCPStore,
    number: int,
    module: str,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    kwargs: dict[str, Any],
) -> None:
    faulthandler.dump_traceback_later(timeout_s)
    comm = Comm(0, 1)
    try:
        if world_size > 1:
            prefix = PrefixStore(f"run-{number}", store)
            comm = Comm.connect(rank, world_size, timeout_s=timeout_s, store=prefix)
        result = getattr(importlib.import_module(module), name)(comm, **kwargs)
        answer = pickle.dumps(("ok", time.monotonic_ns(), result))
    except Exception:
        # Told before the group is left, so that the ranks which then fail for want of this one
        # are later by the clock that all processes of a machine share.
        pipe.send_bytes(pickle.dumps(("error", time.monotonic_ns(), traceback.format_exc())))
    else:
        pipe.send_bytes(answer)
        pipe.recv_bytes()  # "leave", once every rank has answered
    finally:
        faulthandler.cancel_dump_traceback_later()
        comm.close()


if __name__ == "__main__":
    main()
