"""A real writer at full speed, killed at random moments: the reader accepts no bad record."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from sidecar.wire.reader import RingReader
from sidecar.wire.ring import RingRefused
from tests.support.servers import wait_until

SEED = int(os.environ.get("NUTP_TEST_SEED", "20"))
KILLS = 25
CAPACITY = 256  # small: the writer laps the reader all the time

# every field of a record follows from its number, so that a mix of two records shows
WRITER = """
import sys
from pathlib import Path
from sidecar.wire.ring import RingWriter, header_of_this_process
emit = RingWriter.create(Path(sys.argv[1]), header_of_this_process("kill", 0, 1, 0, 256)).emit
i = 0
while True:
    i += 1
    emit(i & 0xFFFF, (i * 7) & 0xFFFF, i & 0x7FFFFFFF, i * 3, -i, i ^ 0x5A5A5A5A5A, i * 0.5)
"""


def _all_true(records: np.ndarray) -> bool:
    i = records["seq"].astype(np.int64)
    return bool(
        np.all(records["kind"] == (i & 0xFFFF))
        and np.all(records["code"] == (i * 7 & 0xFFFF))
        and np.all(records["aux"] == (i & 0x7FFFFFFF))
        and np.all(records["a"] == i * 3)
        and np.all(records["b"] == -i)
        and np.all(records["c"] == (i ^ 0x5A5A5A5A5A))
        and np.all(records["x"] == i * 0.5)
        and np.all(records["seq_end"] == records["seq"])
        and np.all(np.diff(i) == 1)
    )


def _open(path: Path) -> RingReader | None:
    try:
        return RingReader(path)
    except FileNotFoundError:
        return None


def _kill_one(path: Path, until: int) -> tuple[int, int]:
    """Read while a writer runs, kill it once `until` records were accepted, read the rest."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        reader = wait_until(lambda: _open(path), "the writer's ring")
        assert isinstance(reader, RingReader)
        accepted = lost = 0
        end_s = time.monotonic() + 30
        while accepted < until:
            batch = reader.drain()
            assert batch.bad == 0
            assert _all_true(batch.records)
            accepted, lost = accepted + len(batch.records), lost + batch.lost
            assert time.monotonic() < end_s, "the writer does not get on"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    for fresh in (reader, RingReader(path)):  # post mortem, by one that was there and by a new one
        batch = fresh.drain()
        assert batch.bad == 0
        assert _all_true(batch.records)
        accepted += len(batch.records) if fresh is reader else 0
        lost += batch.lost if fresh is reader else 0
        fresh.close()
    head = int.from_bytes(path.read_bytes()[192:200], "little")
    assert accepted + lost == head
    return accepted, lost


def test_writer_killed_at_random_moments_leaves_no_bad_record(tmp_path: Path):
    """Accepted and lost records add up to all that were published."""
    random_ = random.Random(SEED)
    accepted = lost = 0
    for kill in range(KILLS):
        got = _kill_one(tmp_path / f"{kill}.ring", random_.randrange(1, 20_000))
        accepted, lost = accepted + got[0], lost + got[1]
    assert accepted > KILLS, f"replay with NUTP_TEST_SEED={SEED}"


def test_header_damaged_under_a_running_writer_never_crashes_the_reader(tmp_path: Path):
    """Each byte of the header in turn is overwritten while the rank goes on writing."""
    random_ = random.Random(SEED)
    path = tmp_path / "r.ring"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        reader = wait_until(lambda: _open(path), "the writer's ring")
        assert isinstance(reader, RingReader)
        whole = path.read_bytes()[:132]
        for at in range(132):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ random_.randrange(1, 256)]))
                file.flush()
                refused = False
                try:
                    RingReader(path)
                except RingRefused:
                    refused = True
                file.seek(at)
                file.write(whole[at : at + 1])
            assert refused, f"byte {at}; replay with NUTP_TEST_SEED={SEED}"
            assert _all_true(reader.drain().records)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
