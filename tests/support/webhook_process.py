"""A webhook on a disk that can be full: `python -m tests.support.webhook_process URL STATE_DIR`.

Obeys one line of stdin at a time and answers each with one line of JSON: `full` and `free` set what
the process may write to a file, `incident NUMBER` hands one over, `counts` tells, `stop` ends it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from sidecar.announce import Webhooks
from sidecar.config import load
from sidecar.incidents.tracker import Transition
from tests.support import filled


def main(url: str, state_dir: str) -> None:
    """Obey until stdin ends."""
    config = load({"webhook_url": url, "state_dir": state_dir}).config
    hooks = Webhooks(config, "job", "http://127.0.0.1:1")
    hooks.start()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(obey(hooks, *line.split())) + "\n")
        sys.stdout.flush()
    hooks.stop()


def obey(hooks: Webhooks, order: str, number: str = "0") -> dict[str, Any]:
    """Carry out one order."""
    if order in ("full", "free"):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if order == "full" else most, most))
    begin_s = time.monotonic()
    if order == "incident":
        incident = filled.incident(number=int(number))
        hooks.incidents([Transition(state=incident.state, incident=incident)])
    took_s = time.monotonic() - begin_s
    counts = hooks.counts()
    return {
        "took_s": took_s,
        "sent": hooks.sent,
        "delivered": counts.delivered,
        "queued": counts.queued,
        "dropped": hooks.dropped,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
