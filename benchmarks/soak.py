"""A soak: many random faults in one run of an elastic job, from a seed.

    python -m benchmarks.soak --faults 200 --seed 1 --json

Real processes are killed, two at once at times, stopped for a while, slowed, and started again, at
random moments: in steps and in the changes that answer the faults before. At the end the job must
have made every step once, its replicas must hold the same bits, and its losses must be those of one
process but for rounding. Prints one JSON object with --json; exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_rank import FOLDER, Tail
from ntp_core.job import ElasticConfig, JobConfig, SaveConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.runtime.launch import LocalRanks
from sidecar.demo.duty import DutyCycle

DEGREES = (2, 2, 2)
"""With three replicas any two ranks may be gone at once and nothing is lost."""
MODEL = LlamaConfig(width=48, heads=6, kv_heads=3, ffn=96, layers=2, mlp_block=8)
ELASTIC = ElasticConfig(timeout_s=4.0, stopped_s=0.5, silent_s=20.0, newcomer_s=300.0)
LONGEST_STOP_S = 6.0
HANG_S = 90.0
"""Longest time without a step before the job counts as hung."""
MOST_GONE = 2
KINDS = ("kill", "kill", "kill two", "stop", "stop", "slow")


@dataclass(slots=True)
class Watch:
    """What the job has done so far, out of its ranks' files."""

    tail: Tail
    step: int = 0
    last_ns: int = field(default_factory=time.monotonic_ns)
    changes: Counter[str] = field(default_factory=Counter)
    divergences: int = 0
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> pid, step

    def look(self) -> None:
        """Take in what is new."""
        for event in self.tail.new():
            if event["kind"] == "step":
                self.newest[event["rank"]] = event["pid"], event["step"]
                if event["step"] > self.step:
                    self.step, self.last_ns = event["step"], event["t"]
            if event["kind"] == "divergence":
                self.divergences += 1
            if event["kind"] == "end" and event["rank"] == 0:
                self.changes[event["status"]] += 1


class Soak:
    """One run.

    Args:
        ranks: the job's processes.
        draw: source of all that is random.
    """

    def __init__(self, ranks: LocalRanks, draw: random.Random, watch: Watch) -> None:
        self._ranks = ranks
        self._draw = draw
        self._watch = watch
        self._stopped: dict[int, float] = {}  # rank -> when it is to run on
        self._slowed: dict[int, tuple[DutyCycle, float]] = {}
        self.done: Counter[str] = Counter()

    def run(self, num_faults: int) -> None:
        """Strike until so many faults are done."""
        while sum(self.done.values()) < num_faults:
            self._wait(self._draw.uniform(0.02, 1.5))
            self._strike()
        for rank in list(self._stopped):
            self._continue(rank)
        for slow_down, _ in self._slowed.values():
            slow_down.stop()
        self._slowed.clear()

    def _wait(self, seconds: float) -> None:
        """Let time go by; end what is to end, and see to it that the job moves."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            now = time.monotonic()
            for rank, at in list(self._stopped.items()):
                if now >= at:
                    self._continue(rank)
            for rank, (slow_down, at) in list(self._slowed.items()):
                if now >= at:
                    slow_down.stop()
                    del self._slowed[rank]
            self._check()
            time.sleep(0.02)

    def _check(self) -> None:
        self._watch.look()
        for rank, code in enumerate(self._ranks.poll()):
            if code not in (None, -signal.SIGKILL):
                raise SystemExit(f"rank {rank} ended with {code} at step {self._watch.step}")
        idle_s = (time.monotonic_ns() - self._watch.last_ns) / 1e9
        if idle_s > HANG_S:
            raise SystemExit(f"no step for {idle_s:.0f} s after step {self._watch.step}")

    def _strike(self) -> None:
        gone = [g for g, code in enumerate(self._ranks.poll()) if code is not None]
        whole = [g for g in range(sum(DEGREES)) if self._is_whole(g)]
        away = sum(DEGREES) - len(whole)  # with those that are back and not fed yet
        kind = self._draw.choice(KINDS)
        if gone and (away >= MOST_GONE or self._draw.random() < 0.5):
            self._ranks.respawn(self._draw.choice(gone))
            self.done["join"] += 1
        elif kind == "slow" and whole and not self._slowed:
            rank, factor = self._draw.choice(whole), self._draw.uniform(2, 8)
            until = time.monotonic() + self._draw.uniform(0.5, 3.0)
            self._slowed[rank] = DutyCycle(self._ranks.pids[rank], factor), until
            self.done["slow"] += 1
        elif away + (2 if kind == "kill two" else 1) <= MOST_GONE:
            victims = self._draw.sample(whole, 2 if kind == "kill two" else 1)
            for rank in victims:
                self._hit(rank, kind)
            self.done[kind] += 1

    def _is_whole(self, rank: int) -> bool:
        """A member that holds its part of the state: it has made one of the newest steps."""
        pid, step = self._watch.newest.get(rank, (0, 0))
        runs = rank not in self._stopped and self._ranks.processes[rank].poll() is None
        return runs and pid == self._ranks.pids[rank] and step >= self._watch.step - 1

    def _hit(self, rank: int, kind: str) -> None:
        pid = self._ranks.pids[rank]
        if kind == "stop":
            self._stopped[rank] = time.monotonic() + self._draw.uniform(0.1, LONGEST_STOP_S)
            os.kill(pid, signal.SIGSTOP)
        elif kind.startswith("kill"):
            os.kill(pid, signal.SIGKILL)

    def _continue(self, rank: int) -> None:
        del self._stopped[rank]
        if self._ranks.processes[rank].poll() is None:
            os.kill(self._ranks.pids[rank], signal.SIGCONT)


def soak(num_faults: int, seed: int) -> dict[str, Any]:
    """One run; what happened."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        events, inbox = home / "events", home / "inbox"
        events.mkdir()
        inbox.mkdir()
        config = job(home, 10**9)
        (home / "job.json").write_text(config.to_json())
        command = [sys.executable, "-m", "ntp_core.runtime.train", "--config"]
        command += [str(home / "job.json"), "--losses", str(home / "losses.json")]
        env = {
            FOLDER: str(events),
            "NTP_OBSERVER": "benchmarks.elastic_rank:observer",
            "NTP_INBOX": str(inbox),
        }
        ranks = stack.enter_context(LocalRanks(command, sum(DEGREES), env))
        watch = Watch(Tail(events))
        begin = time.monotonic()
        run = Soak(ranks, random.Random(seed), watch)
        while watch.step < 3:
            run._wait(0.1)
        run.run(num_faults)
        (inbox / "stop").touch()
        codes = ranks.wait(HANG_S * 2)
        watch.look()
        losses = json.loads((home / "losses.json").read_text())
        saved = sorted(p.name for p in (home / "saved").iterdir())
        result = {
            "seed": seed,
            "faults": sum(run.done.values()),
            "by_kind": dict(run.done),
            "steps": len(losses),
            "lost_steps": watch.step - len(losses),
            "changes_on_rank_0": dict(watch.changes),
            "divergences": watch.divergences,
            "ended_well": sum(c == 0 for c in codes),
            "saved": saved,
            "seconds": round(time.monotonic() - begin, 1),
        }
        result |= compare(home, config, losses)
        return result


def job(home: Path, steps: int) -> JobConfig:
    """The job; the save at its end compares all replicas bit by bit, and refuses to differ."""
    return JobConfig(
        train=TrainConfig(model=MODEL, seq=16, check_every=1, lr=1e-3),
        plan=even_plan(MODEL, DEGREES, 6),
        steps=steps,
        save=SaveConfig(folder=str(home / "saved")),
        elastic=ELASTIC,
    )


def compare(home: Path, config: JobConfig, losses: list[float]) -> dict[str, Any]:
    """The same steps in one process."""
    plan = even_plan(MODEL, (1,), 6)
    alone = JobConfig(train=config.train, plan=plan, steps=len(losses))
    (home / "alone.json").write_text(alone.to_json())
    command = [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(home / "alone.json")]
    subprocess.run([*command, "--losses", str(home / "alone-losses.json")], check=True)
    theirs = json.loads((home / "alone-losses.json").read_text())
    off = [abs(a - b) / b for a, b in zip(losses, theirs, strict=True)]
    return {"loss_rel_diff_median": statistics.median(off), "loss_rel_diff_first_50": max(off[:50])}


def wrong(result: dict[str, Any]) -> list[str]:
    """What must not be."""
    checks = {
        "a step is lost or made twice": result["lost_steps"] != 0,
        "replicas differed": result["divergences"] != 0,
        "the replicas' last state was not saved as equal": not result["saved"],
        "no rank ended well": result["ended_well"] == 0,
        "the losses are not those of one process": result["loss_rel_diff_first_50"] > 1e-4,
    }
    return [what for what, is_so in checks.items() if is_so]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = soak(args.faults, args.seed)
    result["wrong"] = wrong(result)
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:24} {value}\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
