"""A process that fills or drains an outbox until it is killed.

`fill PATH` prints each id once it is safely kept. `drain PATH URL` delivers to URL, signed with the
secret in NUTP_TEST_SECRET.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from itertools import count
from pathlib import Path

from sidecar.notify.outbox import Outbox
from sidecar.notify.sender import Sender
from sidecar.notify.signer import Signer


def main() -> None:
    mode, path = sys.argv[1], Path(sys.argv[2])
    outbox = Outbox(path, clock=time.time)
    if mode == "fill":
        for number in count():
            outbox.enqueue(f"msg-{number}", b'{"number": %d}' % number)
            print(f"msg-{number}", flush=True)  # noqa: T201
    signer = Signer(os.environ["NUTP_TEST_SECRET"])
    Sender(outbox, sys.argv[3], signer, rng=random.Random(1)).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
