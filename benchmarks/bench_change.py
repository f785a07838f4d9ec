"""Time lost when ranks die, turn slow and come back: live, against what others do.

    python -m benchmarks.bench_change --json [--quick]

One machine, one model (50 million parameters or more), real processes, real SIGKILL. Lost time goes
from the fault to the first step after it at full speed, less what that step itself takes. Arms:

    shrink     a rank dies; survivors regroup, fetch what it held, go on under a new plan
    grow       it comes back, and is fed by its peers
    rebalance  a rank turns slow; a new plan by speed is applied at a step boundary
    restart    the same job under torchrun: a rank dies, all are killed, started again, and load the
               last checkpoint (saved at the step before the fault: the best case for it)
    drop       the whole replica of the dead rank is left out, as torchft does

"Once the failure is detected" leaves the time until the survivors' first word of it out, in all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.elastic_rank import FOLDER, Tail
from ntp_core.job import ElasticConfig, JobConfig, SaveConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, Proposal
from ntp_core.replan import rebalance
from ntp_core.runtime.launch import LocalRanks
from sidecar.demo.duty import DutyCycle

MODEL = LlamaConfig(layers=8, width=768, heads=12, kv_heads=6, ffn=2048, mlp_block=64)
QUICK = LlamaConfig(layers=2, width=256, heads=8, kv_heads=4, ffn=1024, mlp_block=64)
DEGREES, BATCH, SEQ = (2, 1), 3, 64
VICTIM = 1
SLOW_FACTOR = 3.0
STEPS = 3
"""Steps over which a step's time is taken."""
WAIT_S = 120.0

Event = dict[str, Any]


class Run:
    """A job, and what its ranks tell."""

    def __init__(self, home: Path, config: JobConfig, ranks: LocalRanks | None) -> None:
        self.home = home
        self.config = config
        self.ranks = ranks
        self.events: list[Event] = []
        self._tail = Tail(home / "events")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the ranks to have told something."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"{what}: not within {WAIT_S:g} s")
            time.sleep(0.005)
            self.events += self._tail.new()

    @property
    def step(self) -> int:
        """The newest step of any rank."""
        return max((e["step"] for e in self.events if e["kind"] == "step"), default=0)

    def until_step(self, step: int) -> None:
        """Wait until a step is committed."""
        self.until(lambda: self.step >= step, f"step {step}")

    def until_changed(self, reason: Reason) -> int:
        """Wait until a change for a reason is committed on all its ranks; its epoch."""

        def find() -> list[int]:
            begun = [e["epoch"] for e in self.events if e.get("reason") == reason.name]
            ends = [e for e in self.events if e["kind"] == "end" and e["status"] == "COMMITTED"]
            return [n for n in begun if any(e["epoch"] == n for e in ends)]

        self.until(lambda: bool(find()), f"a change for {reason.name}")
        return find()[-1]

    def times_of(self, step: int) -> list[int]:
        """When each rank had committed a step."""
        return [e["t"] for e in self.events if e["kind"] == "step" and e["step"] == step]

    def step_s(self, first: int, last: int) -> float:
        """Median time of a step of its slowest rank."""
        slowest: dict[int, int] = {}
        for e in self.events:
            if e["kind"] == "step" and first <= e["step"] <= last:
                slowest[e["step"]] = max(slowest.get(e["step"], 0), e["took"])
        return statistics.median(slowest.values()) / 1e9


def cost(run: Run, epoch: int, since_ns: int | None = None) -> dict[str, Any]:
    """What the change of an epoch cost, once some steps have followed it.

    Args:
        since_ns: when the fault struck; None where the job went on until the change began: then
            time counts from the end of the last step before it.
    """
    begun = [e for e in run.events if e["kind"] == "begin" and e["epoch"] == epoch]
    ends = [e for e in run.events if e["kind"] == "end" and e["epoch"] == epoch]
    phases = [e for e in run.events if e["kind"] == "phase" and e["epoch"] == epoch]
    last = begun[0]["step"]
    run.until_step(last + 1 + STEPS)
    step_s = run.step_s(last + 2, last + 1 + STEPS)
    start_ns = max(run.times_of(last)) if since_ns is None else since_ns
    done_ns = max(t for t in run.times_of(last + 1) if t > start_ns)
    received = {e["rank"]: e["bytes"] for e in phases if e["phase"] == "TRANSFER"}
    detected = [e["begin"] for e in phases if e["phase"] == "DETECT"]
    by_phase: dict[str, float] = {}
    for e in phases:
        by_phase[e["phase"]] = max(by_phase.get(e["phase"], 0.0), e["took"] / 1e9)
    found = {
        "lost_s": (done_ns - start_ns) / 1e9 - step_s,
        "step_s_after": step_s,
        "phases_s": by_phase,
        "bytes_moved": ends[0]["moved"],
        "bytes_lower_bound": ends[0]["bound"],
        "received_mb": {str(g): n / 1e6 for g, n in sorted(received.items())},
        "peak_rss_mb": peak_rss_mb(run),
    }
    if since_ns is not None and detected:
        found["detected_s"] = (min(detected) - since_ns) / 1e9
    return found


def peak_rss_mb(run: Run) -> float:
    """The largest resident set that a living rank has had."""
    peaks = []
    for pid in [] if run.ranks is None else run.ranks.pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        peaks += [int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM")]
    return max(peaks, default=0.0)


def start(home: Path, config: JobConfig) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a rank."""
    (home / "events").mkdir(parents=True)
    (home / "inbox").mkdir()
    (home / "job.json").write_text(config.to_json())
    command = ["-m", "ntp_core.runtime.train", "--config", str(home / "job.json")]
    env = {
        FOLDER: str(home / "events"),
        "NTP_OBSERVER": "benchmarks.elastic_rank:observer",
        "NTP_INBOX": str(home / "inbox"),
        "OMP_NUM_THREADS": "1",
    }
    return command, env


def config_of(
    model: LlamaConfig, save: SaveConfig | None = None, least_part: float = 0.0
) -> JobConfig:
    """The job: two replicas, of two ranks and of one."""
    return JobConfig(
        train=TrainConfig(model=model, seq=SEQ, check_every=0, warmup=0, lr=1e-4),
        plan=even_plan(model, DEGREES, BATCH),
        steps=10**6,
        save=save,
        elastic=ElasticConfig(least_part=least_part),
    )


def measure_live(home: Path, model: LlamaConfig) -> dict[str, Any]:
    """Shrink, grow and rebalance, one after the other in one run."""
    config = config_of(model)
    command, env = start(home, config)
    with LocalRanks([sys.executable, *command], sum(DEGREES), env) as ranks:
        run = Run(home, config, ranks)
        run.until_step(1 + STEPS)
        before_s = run.step_s(2, 1 + STEPS)
        os.kill(ranks.pids[VICTIM], signal.SIGKILL)
        fault_ns = time.monotonic_ns()
        found = {"shrink": cost(run, run.until_changed(Reason.RANK_DIED), fault_ns)}
        ranks.processes[VICTIM].wait()
        ranks.respawn(VICTIM)
        found["grow"] = cost(run, run.until_changed(Reason.RANK_RETURNED))
        propose(run, model)
        found["rebalance"] = cost(run, run.until_changed(Reason.OPERATOR))
        return found | {"step_s_before": before_s}


def propose(run: Run, model: LlamaConfig) -> None:
    """Leave a plan for one rank at a third of the others' speed."""
    text = [e["text"] for e in run.events if e["kind"] == "plan"][-1]
    plan = Plan.from_json(json.loads(text)["plan"])
    speeds = {g: 1.0 / SLOW_FACTOR if g == VICTIM else 1.0 for g in plan.ranks}
    new = rebalance(plan, model.work(SEQ), speeds).with_epoch(plan.epoch + 1)
    proposal = Proposal(base_digest=plan.digest, plan=new, reason=Reason.OPERATOR, speeds=speeds)
    draft = run.home / "inbox" / "draft"
    draft.write_text(proposal.to_json())
    draft.replace(run.home / "inbox" / FILE_NAME)


def measure_restart(home: Path, model: LlamaConfig) -> dict[str, Any]:
    """The same fault under torchrun, with a checkpoint of the very step before it."""
    save = SaveConfig(folder=str(home / "saved"), every=1 + STEPS)
    rigid = config_of(model, save)
    config = JobConfig(train=rigid.train, plan=rigid.plan, steps=rigid.steps, save=save)
    command, env = start(home, config)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={sum(DEGREES)}", "--max-restarts=1", "--monitor-interval=0.1"]
    with (home / "log").open("wb") as log:
        job = subprocess.Popen([*torchrun, *command], env=os.environ | env, stdout=log, stderr=log)
        try:
            run = Run(home, config, None)
            latest = Path(save.folder) / "latest"
            run.until(latest.exists, "the checkpoint")
            last = 1 + STEPS
            victim = next(e["pid"] for e in run.events if e["rank"] == VICTIM)
            old = {e["pid"] for e in run.events}
            os.kill(victim, signal.SIGKILL)
            fault_ns = time.monotonic_ns()

            def after(step: int) -> list[Event]:
                steps = [e for e in run.events if e["kind"] == "step" and e["step"] == step]
                return [e for e in steps if e["pid"] not in old]

            run.until(lambda: len(after(last + 1 + STEPS)) == sum(DEGREES), "the restarted job")
            step_s = run.step_s(last + 2, last + 1 + STEPS)
            done_ns = max(e["t"] for e in after(last + 1))
            return {"lost_s": (done_ns - fault_ns) / 1e9 - step_s, "step_s_after": step_s}
        finally:
            job.terminate()
            job.wait()


def measure_speed(home: Path, model: LlamaConfig, least_part: float) -> dict[str, Any]:
    """Step times before and after a death, where each rank has a third of a core of its own.

    With more ranks than cores a rank that dies frees a processor, and nothing would be lost.
    """
    config = config_of(model, least_part=least_part)
    command, env = start(home, config)
    with LocalRanks([sys.executable, *command], sum(DEGREES), env) as ranks:
        run = Run(home, config, ranks)
        run.until_step(2)
        slowed = [DutyCycle(pid, 2 * SLOW_FACTOR) for pid in ranks.pids]
        try:
            first = run.step + 2
            run.until_step(first + STEPS)
            before_s = run.step_s(first, first + STEPS)
            os.kill(ranks.pids[VICTIM], signal.SIGKILL)
            run.until_changed(Reason.RANK_DIED)
            first = run.step + 2
            run.until_step(first + STEPS)
            return {"before_s": before_s, "after_s": run.step_s(first, first + STEPS)}
        finally:
            for slow_down in slowed:
                slow_down.stop()


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios against what others do, with the target of each."""
    live, restart = found["live"], found["restart"]["lost_s"]
    changes = [live[name] for name in ("shrink", "grow", "rebalance")]
    speed, drop = found["speed"], found["drop"]
    survivors = (sum(DEGREES) - 1) / sum(DEGREES)
    rows: list[tuple[str, float, str, str, float]] = [
        (f"{name}_vs_restart_ratio", restart / live[name]["lost_s"], "x", "higher", 20.0)
        for name in ("shrink", "grow", "rebalance")
    ]
    moved, bound = (sum(c[k] for c in changes) for k in ("bytes_moved", "bytes_lower_bound"))
    rows += [
        ("vs_drop_replica_ratio", drop["after_s"] / speed["after_s"], "x", "higher", 1.0),
        ("bytes_vs_bound_ratio", moved / bound, "x", "lower", 1.0),
        (
            "throughput_after_vs_ideal",
            speed["before_s"] / speed["after_s"] / survivors,
            "x",
            "higher",
            0.95,
        ),
        ("dead_detected_s", live["shrink"]["detected_s"], "s", "lower", 1.0),
    ]
    return [
        {
            "name": name,
            "value": value,
            "unit": unit,
            "better": better,
            "target": target,
            "met": value <= target if better == "lower" else value >= target,
        }
        for name, value, unit, better, target in rows
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    model = QUICK if args.quick else MODEL
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        found = {
            "live": measure_live(home / "live", model),
            "restart": measure_restart(home / "restart", model),
            "speed": measure_speed(home / "speed", QUICK, 0.0),
            "drop": measure_speed(home / "drop", QUICK, 1.0),
        }
    result = {
        "bench": "change",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "parameters": sum(t.numel for t in model.units().tensors),
        "figures": found,
        "targets": targets(found),
    }
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return 0
    for t in result["targets"]:
        met = "met" if t["met"] else "missed"
        sys.stdout.write(f"{t['name']:28} {t['value']:10.3g} {t['unit']}  ({met})\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
