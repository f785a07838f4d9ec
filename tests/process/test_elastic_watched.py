"""An elastic job under its sidecar: deaths and returns are seen, explained, traced and over again.

Real processes: five ranks, a sidecar, a receiver of traces. Ranks are killed from outside at
whatever moment it happens to be, and the driver of a change in the middle of that change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ntp_core.faults import When, fault_file, kill_at, leave_fault
from ntp_core.job import ElasticConfig, JobConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.observe import Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.proposal import FILE_NAME, Proposal
from ntp_core.runtime.launch import LocalRanks
from ntp_core.units import UnitKind
from sidecar.daemon import read_address
from sidecar.demo.stage import ENGINE_OBSERVER
from tests.support.otlp_receiver import OtlpReceiver

DEGREES = (3, 2)
WAIT_S = 60.0
SLOW_FACTOR = 8.0
HEAVY = LlamaConfig(width=384, ffn=1536, mlp_block=32)
"""Most of a step is matrix products, which shares can divide."""
POLL_S = 0.05
MODEL = LlamaConfig(width=48, heads=6, kv_heads=6, ffn=96, layers=2, mlp_block=8)
HOME = even_plan(MODEL, DEGREES, 5)
ELASTIC = ElasticConfig(timeout_s=20.0, stopped_s=1.0, silent_s=20.0, newcomer_s=120.0)

pytestmark = pytest.mark.timeout(300)

Data = dict[str, Any]


class Watched:
    """The job, its sidecar, and where traces go."""

    def __init__(self, home: Path, model: LlamaConfig, flags: Sequence[str]) -> None:
        self.run_dir = home / "run"
        self.run_dir.mkdir(mode=0o700)
        self._stack = ExitStack()
        self.traces = self._stack.enter_context(OtlpReceiver())
        command = [sys.executable, "-W", "error", "-m", "sidecar", "daemon", "--port", "0"]
        command += ["--run-dir", str(self.run_dir), "--clear-s", "0.3"]
        command += ["--otlp-endpoint", self.traces.url, *flags]
        self.daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.ranks = LocalRanks(self._rank_command(home, model), sum(DEGREES), self._environment())

    def _rank_command(self, home: Path, model: LlamaConfig) -> list[str]:
        config = JobConfig(
            train=TrainConfig(model=model, seq=16, lr=1e-3, check_every=1),
            plan=even_plan(model, DEGREES, 5),
            steps=10**9,
            obey_faults=True,
            calibrate=model is HEAVY,
            elastic=ELASTIC,
        )
        (home / "job.json").write_text(config.to_json())
        command = [sys.executable, "-m", "ntp_core.runtime.train", "--config"]
        return [*command, str(home / "job.json")]

    def _environment(self) -> dict[str, str]:
        return {
            "NTP_SIDECAR_RUN_DIR": str(self.run_dir),
            "NTP_SIDECAR_JOB_ID": self.run_dir.name,
            "NTP_OBSERVER": ENGINE_OBSERVER,
            "NTP_INBOX": str(self.run_dir),
        }

    def text(self, path: str) -> str:
        """One answer of the sidecar."""
        address = read_address(self.run_dir)
        assert address is not None
        return httpx.get(address[1] + path, trust_env=False, timeout=10).raise_for_status().text

    def get(self, part: str) -> Any:
        """One part of the API."""
        address = read_address(self.run_dir)
        assert address is not None
        body = httpx.get(f"{address[1]}/api/v1/{part}", trust_env=False, timeout=10).json()
        return body if part in ("job", "plan") else body[part]

    def wait(self, what: str, look: Callable[[], Any]) -> Any:
        """The first true result of `look`."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            if found := look():
                return found
            time.sleep(POLL_S)
        changes = [(c["epoch"], c["reason"], c["status"]) for c in self.get("changes")]
        raise AssertionError(f"{what}: not within {WAIT_S} s; {self.get('job')}, {changes}")

    def change(self, reason: str, status: str, after: int = 0) -> Data:
        """The newest change of that kind to an epoch beyond `after`, once there is one."""

        def look() -> Data | None:
            for c in self.get("changes"):
                if (c["reason"], c["status"]) == (reason, status) and c["epoch"] > after:
                    return dict(c)
            return None

        found: Data = self.wait(f"a change: {reason}, {status}", look)
        return found

    def incident(self, rank: int, state: str) -> Data:
        """The newest death of that rank, once it is in that state."""

        def look() -> Data | None:
            for i in self.get("incidents"):
                if (i["check"], i["rank"]) == ("dead_rank", rank):
                    return dict(i) if i["state"] == state else None
            return None

        found: Data = self.wait(f"dead_rank of rank {rank}, {state}", look)
        return found

    def wait_for_steps(self, number: int) -> None:
        """Until the job is that much further."""
        first = self.get("job")["step"] or 0
        self.wait(f"{number} steps", lambda: (self.get("job")["step"] or 0) >= first + number)

    def checks_of_critical(self) -> set[str]:
        """Checks that have found something critical. On a crowded host a rank may be slow."""
        return {i["check"] for i in self.get("incidents") if i["severity"] == "critical"}

    def refused(self) -> int:
        """What the job has set aside."""
        return int(self.get("job")["proposals_refused"])

    def mlp_share(self, rank: int) -> float:
        """The part of its replica's MLP units that the plan in force gives a rank."""
        for replica in self.get("plan")["replicas"]:
            if rank in replica["ranks"]:
                shares = replica["shares"]["mlp"]
                return float(shares[replica["ranks"].index(rank)] / sum(shares))
        return 0.0

    def health(self, rank: int) -> str:
        """How a rank is shown."""
        return str(next(r["health"] for r in self.get("ranks") if r["rank"] == rank))

    def close(self) -> None:
        """End what still runs."""
        self.ranks.stop()
        self.daemon.terminate()
        self.daemon.wait(20)
        self._stack.close()


@pytest.fixture
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A job that has made its first steps. A test may give its model and flags of the sidecar."""
    made = Watched(tmp_path, *getattr(request, "param", (MODEL, ())))
    try:
        made.wait("a sidecar", lambda: read_address(made.run_dir))
        made.wait("ten steps", lambda: (made.get("job")["step"] or 0) >= 10)
        yield made
    finally:
        made.close()


def check_tree(change: Data, ranks: set[int]) -> None:
    """Every phase is there, each rank has its transfer, and no byte too many has moved."""
    names = [s["name"].removeprefix("nutp.") for s in change["spans"]]
    assert set(names) == {
        "detect", "decide", "quiesce", "regroup", "transfer", "verify", "resume"
    }  # fmt: skip
    transfer = next(s for s in change["spans"] if s["name"] == "nutp.transfer")
    assert {c["rank"] for c in transfer["children"]} == ranks
    assert sum(c["bytes"] for c in transfer["children"]) == change["bytes_moved"]
    assert change["bytes_moved"] == change["bytes_lower_bound"] > 0
    assert all(s["seconds"] > 0 for s in change["spans"])
    assert change["verified"] and change["error"] is None
    assert change["from"] != change["to"]


def counters(metrics: str) -> dict[str, float]:
    """Every counter of the job with its value."""
    lines = (line for line in metrics.splitlines() if "_total{" in line)
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines)}


def test_rank_dies_and_returns_and_all_of_it_is_told(watched: Watched) -> None:
    """SIGKILL: named at once, the job goes on, the incident is over; then the rank comes back."""
    before = watched.get("job")["step"]
    os.kill(watched.ranks.pids[1], signal.SIGKILL)
    died = watched.change("rank_died", "committed")
    check_tree(died, {0, 2, 3, 4})
    incident = watched.incident(1, "resolved")
    assert f"the job goes on without it under epoch {died['epoch']}" in incident["summary"]
    assert incident["changes"] == [died["epoch"]]
    assert incident["trace_ids"] == [died["trace_id"]]
    assert watched.change("rank_died", "committed")["incident"] == incident["id"]
    watched.wait_for_steps(5)
    plan, job = watched.get("plan"), watched.get("job")
    assert (plan["epoch"], plan["digest"]) == (died["epoch"], died["to"])
    assert [r["ranks"] for r in plan["replicas"]] == [[0, 2], [3, 4]]
    assert (job["ranks_alive"], job["ranks_dead"], job["ranks_left"]) == (4, 0, 1)
    assert job["step"] > before
    assert watched.health(1) == "left"
    metrics = watched.text("/metrics")
    for line in (
        f'nutp_plan_epoch{{nutp_job="run"}} {died["epoch"]}.0',
        'nutp_job_ranks{nutp_job="run",state="left"} 1.0',
        'nutp_allocation_changes_total{nutp_job="run",reason="rank_died",status="committed"} 1.0',
        'nutp_replica_tp_degree{nutp_job="run",replica="0"} 2.0',
    ):
        assert line in metrics
    counted = counters(metrics)
    watched.ranks.processes[1].wait()
    watched.ranks.respawn(1)
    back = watched.change("rank_returned", "committed", died["epoch"])
    check_tree(back, {0, 1, 2, 3, 4})
    assert back["incident"] == incident["id"]
    watched.wait_for_steps(5)
    for now, home in zip(watched.get("plan")["replicas"], HOME.replicas, strict=True):
        assert now["ranks"] == list(home.ranks)
        most = {str(k): max(v.shares) for k, v in home.layouts.items()}
        assert {k: max(s) for k, s in now["shares"].items()} == most, "as fast as at the start"
    assert {watched.health(g) for g in range(5)} <= {"ok", "slow"}  # slow: on a crowded host
    assert watched.get("job")["ranks_left"] == 0
    later = counters(watched.text("/metrics"))
    assert {k: v for k, v in counted.items() if later.get(k, -1) < v} == {}, "a counter went back"
    assert watched.checks_of_critical() == {"dead_rank"}


def test_driver_killed_in_the_middle_of_a_change(watched: Watched) -> None:
    """The trace of the change that it drove ends with an error, the next change commits."""
    leave_fault(watched.run_dir, kill_at(0, 0, When.IN_TRANSFER))
    watched.wait("the fault taken", lambda: not fault_file(watched.run_dir, 0).exists())
    os.kill(watched.ranks.pids[4], signal.SIGKILL)
    failed = watched.change("rank_died", "failed")
    done = watched.change("rank_died", "committed", failed["epoch"])
    check_tree(done, {1, 2, 3})
    first, second = watched.incident(4, "resolved"), watched.incident(0, "resolved")
    assert failed["seconds"] is not None
    assert failed["verified"] is False
    assert {"quiesce", "regroup"} <= {s["name"].removeprefix("nutp.") for s in failed["spans"]}
    assert first["changes"] == [failed["epoch"], done["epoch"]]
    assert second["changes"] == [done["epoch"]]
    assert [r["ranks"] for r in watched.get("plan")["replicas"]] == [[1, 2], [3]]
    spans = watched.traces.wait_for(
        lambda told: {failed["trace_id"], done["trace_id"]} <= {s.trace_id for s in told}
    )
    roots = {s.trace_id: s for s in spans if not s.parent_id}
    root = roots[failed["trace_id"]]
    assert (root.status, roots[done["trace_id"]].status) == ("error", "ok")
    assert root.attributes["nutp.change.incident"] == first["id"]
    watched.wait_for_steps(5)
    assert (watched.health(0), watched.health(4)) == ("left", "left")
    assert "running" not in {c["status"] for c in watched.get("changes")}


def test_proposals_that_do_not_fit_a_job_with_gaps_are_refused_and_shown(watched: Watched) -> None:
    """Of an old epoch, with a rank that is gone, of no sense at all: the job goes on."""
    os.kill(watched.ranks.pids[1], signal.SIGKILL)
    died = watched.change("rank_died", "committed")
    now = Plan.build(
        HOME.counts,
        [
            ReplicaPlan(
                ranks=tuple(r["ranks"]),
                batch=r["batch"],
                layouts={UnitKind(k): Layout.contiguous(s) for k, s in r["shares"].items()},
            )
            for r in watched.get("plan")["replicas"]
        ],
        epoch=died["epoch"] + 1,
    )
    good = Proposal(base_digest=died["to"], plan=now, reason=Reason.OPERATOR)
    hostile = {
        "in force is epoch": replace(good, plan=now.with_epoch(died["epoch"])).to_json(),
        "names ranks [0, 1, 2, 3, 4]": replace(good, plan=HOME.with_epoch(now.epoch)).to_json(),
        "gives speeds": replace(good, speeds={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}).to_json(),
        "not a proposal": '{"plan": ' * 500,
    }
    for number, (why, text) in enumerate(hostile.items(), 1):
        (watched.run_dir / "draft").write_text(text)
        (watched.run_dir / "draft").replace(watched.run_dir / FILE_NAME)
        watched.wait(f"{number} refused", lambda n=number: watched.refused() == n)
        watched.wait(why, lambda w=why: w in (watched.get("job")["refusal"] or ""))
    assert 'nutp_proposals_refused_total{nutp_job="run"} 4.0' in watched.text("/metrics")
    watched.wait_for_steps(5)
    assert watched.get("plan")["epoch"] == died["epoch"]
    assert watched.checks_of_critical() == {"dead_rank"}


@pytest.mark.parametrize("watched", [(MODEL, ("--kill-stopped", "0.5"))], indirect=True)
def test_stopped_rank_is_killed_when_that_was_asked_for(watched: Watched) -> None:
    """Long before the others would give it up; counted, in the incident, and in the trace."""
    os.kill(watched.ranks.pids[3], signal.SIGSTOP)
    died = watched.change("rank_died", "committed")
    incident = watched.incident(3, "resolved")
    assert watched.ranks.processes[3].wait(WAIT_S) == -signal.SIGKILL
    assert incident["signals"]["killed"].startswith("by the sidecar, as it had stood still for")
    assert incident["changes"] == [died["epoch"]]
    assert 'nutp_ranks_killed_total{nutp_job="run"} 1.0' in watched.text("/metrics")
    watched.traces.wait_for(lambda told: "nutp.rank.killed" in {e for s in told for e in s.events})
    watched.wait_for_steps(5)
