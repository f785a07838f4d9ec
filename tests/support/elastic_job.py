"""A tiny elastic job for the tests of launchers: its files, and what its ranks have told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.elastic_rank import FOLDER, Tail
from ntp_core.job import ElasticConfig, JobConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.runtime.inbox import STOP_FILE
from tests.support.rank_pool import ROOT
from tests.support.servers import wait_until

WAIT_S = 60.0
MODEL = LlamaConfig(width=48, heads=6, kv_heads=6, ffn=96, layers=1, mlp_block=8)
ELASTIC = ElasticConfig(timeout_s=20.0, stopped_s=2.0, silent_s=20.0, newcomer_s=60.0)


class ElasticJob:
    """Runs until it is told to stop. Any one replica may be lost.

    Attributes:
        command: of one rank.
        env: what each rank's environment must hold besides its place and store.
    """

    def __init__(self, home: Path, degrees: tuple[int, ...]) -> None:
        self._events, self._inbox = home / "events", home / "inbox"
        self._events.mkdir()
        self._inbox.mkdir()
        config = JobConfig(
            train=TrainConfig(model=MODEL, seq=16, lr=1e-3, check_every=1),
            plan=even_plan(MODEL, degrees, 2 * len(degrees)),
            steps=10**9,
            elastic=ELASTIC,
        )
        self.config = home / "job.json"
        self.config.write_text(config.to_json())
        self.program = ["-m", "ntp_core.runtime.train", "--config", str(self.config)]
        self.command = [sys.executable, *self.program]
        self.env = {
            FOLDER: str(self._events),
            "NTP_OBSERVER": "benchmarks.elastic_rank:observer",
            "NTP_INBOX": str(self._inbox),
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self.environ = {**os.environ, **self.env}
        self._tail = Tail(self._events)
        self._newest: dict[int, tuple[int, int]] = {}

    def newest(self) -> dict[int, tuple[int, int]]:
        """Process and newest step of each rank."""
        for event in self._tail.new():
            if event["kind"] == "step":
                self._newest[event["rank"]] = event["pid"], event["step"]
        return self._newest

    def wait_for_steps(self, *ranks: int, number: int = 3) -> None:
        """Until each of these ranks has made some more than any rank has now."""
        until = max((step for _, step in self.newest().values()), default=0) + number

        def look() -> bool:
            now = self.newest()
            return all(now.get(g, (0, 0))[1] >= until for g in ranks)

        wait_until(look, f"ranks {ranks} at step {until}", WAIT_S)

    def pid(self, rank: int) -> int:
        """The process that made a rank's newest step."""
        return self.newest()[rank][0]

    def wait_for_other(self, rank: int, pid: int) -> None:
        """Until another process than that one makes the rank's steps."""
        wait_until(lambda: self.pid(rank) != pid, f"rank {rank} is back", WAIT_S)

    def stop(self) -> None:
        """Leave the wish to stop."""
        (self._inbox / STOP_FILE).touch()
