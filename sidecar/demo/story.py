"""The acts of the demo. Each waits for something the sidecar says; nothing is assumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ntp_core.faults import leave_fault, slow
from sidecar.demo.client import Api, Data, StoryBroken
from sidecar.demo.duty import DutyCycle
from sidecar.demo.scenario import Scenario
from sidecar.demo.stage import Stage, end_process, reference_process
from sidecar.demo.teller import Bar, Teller
from sidecar.top.units import size

STOP_FILE = "stop"
SIGNALS = (
    "slowness",
    "busy_time",
    "peers_median",
    "evidence",
    "extent",
    "fingerprints",
    "proposal",
)
"""What of an incident's evidence the story shows; the page shows all."""


class Story:
    """Runs the acts in order against one stage."""

    def __init__(self, scenario: Scenario, stage: Stage, teller: Teller) -> None:
        self._scenario = scenario
        self._stage = stage
        self._tell = teller
        self._api = Api(stage.url, stage.wrong)

    def run(self) -> Data:
        """All acts; returns the report.

        Raises:
            StoryBroken: when something that should have happened did not.
        """
        try:
            self._healthy()
            self._slow_rank()
            self._flipped_bit()
            steps = self._end_job()
            parity = self._parity(steps)
            return self._report(parity)
        finally:
            self._api.close()

    # -- acts

    def _healthy(self) -> None:
        goal = self._scenario.healthy_steps
        with self._tell.waiting("starting the ranks", goal) as bar:
            self._wait_for_step(goal, bar, "the job trains")
        for r in self._api.get("/api/v1/plan")["replicas"]:
            ranks = " ".join(str(g) for g in r["ranks"])
            self._tell.line(
                f"replica {r['id']}",
                f"ranks {ranks} (TP {r['tp_degree']}), {r['batch']} sequences a step, "
                + _shares(r["shares"]),
            )
        job = self._api.job()
        self._tell.line("healthy", step_line(job), "green")

    def _slow_rank(self) -> None:
        s, rank = self._scenario, self._scenario.slow_rank
        pid = next(r["pid"] for r in self._api.get("/api/v1/ranks")["ranks"] if r["rank"] == rank)
        units = self._units_of(rank)
        with DutyCycle(pid, s.slow_factor):
            since = self._api.job()["step"]
            leave_fault(self._stage.run_dir, slow(rank))
            self._tell.line(
                "fault",
                f"rank {rank} is made {s.slow_factor:g} times slower (pid {pid} is stopped, again "
                f"and again, by SIGSTOP); the job has committed step {since}",
                "yellow",
            )
            incident = self._await_incident("slow_rank", rank, since)
            self._name(incident)
            self._await_webhook(incident["id"])
            change = self._await_change("rank_slow", lambda: self._units_of(rank) < units)
            self._await_judgement(change["epoch"])
        self._tell.line("fault over", f"rank {rank} runs freely again", "yellow")
        self._await_resolved(incident["id"])

    def _flipped_bit(self) -> None:
        fault, since = self._scenario.flip, self._api.job()["step"]
        leave_fault(self._stage.run_dir, fault)
        self._tell.line(
            "fault",
            f"bit {fault.bit} of element {fault.element} of {fault.tensor} is flipped on rank "
            f"{fault.rank}; the job has committed step {since}",
            "yellow",
        )
        incident = self._await_incident("replica_divergence", fault.rank, since)
        self._name(incident)
        self._await_change("repair")
        self._tell.more(
            "the step's gradients were computed again: nothing built on the wrong bit was kept"
        )
        self._await_resolved(incident["id"])
        goal = self._api.job()["step"] + self._scenario.calm_steps
        with self._tell.waiting("training on", goal) as bar:
            self._wait_for_step(goal, bar, "the job trains on")
        self._tell.line("healthy", step_line(self._api.job()), "green")

    def _end_job(self) -> int:
        (self._stage.run_dir / STOP_FILE).touch()
        with self._tell.waiting("ending the job"):
            code = self._stage.job.wait(self._scenario.act_s)
        if code != 0:
            raise StoryBroken(f"the job ended with {code} when asked to stop")
        return len(json.loads(self._stage.losses.read_text()))

    def _parity(self, steps: int) -> float:
        losses = self._stage.work_dir / "reference-losses.json"
        process = reference_process(self._scenario.reference(steps), self._stage.work_dir, losses)
        try:
            with self._tell.waiting(f"the same {steps} steps in one process, for comparison"):
                code = process.wait(self._scenario.act_s + steps)
        finally:
            end_process(process)
        if code != 0:
            raise StoryBroken(f"the reference run ended with {code}")
        ours = json.loads(self._stage.losses.read_text())
        theirs = json.loads(losses.read_text())
        if None in (*ours, *theirs):
            raise StoryBroken("a loss is not finite; there is nothing to compare")
        worst: float = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        self._tell.line(
            "parity",
            f"largest relative loss difference to one process over {steps} steps: {worst:.1e}",
            "green",
        )
        return worst

    def _report(self, parity: float) -> Data:
        received = self._stage.receiver.received
        facts = {
            "max_rel_loss_diff_vs_single_process": parity,
            "signature_verified": bool(received) and not any(r.error for r in received),
        }
        draft = self._stage.run_dir / "facts.draft"
        draft.write_text(json.dumps(facts))
        draft.replace(self._stage.run_dir / "facts.json")
        return self._api.wait(
            "the report counts all webhooks",
            self._scenario.act_s,
            lambda: _settled(self._api.get("/api/v1/report")),
        )

    # -- waiting

    def _wait_for_step(self, goal: int, bar: Bar, what: str) -> None:
        def look() -> Data | None:
            job = self._api.job()
            step = job["step"] or 0
            bar.show(min(step, goal), _short(job))
            return job if step >= goal else None

        self._api.wait(what, self._scenario.act_s, look)

    def _await_incident(self, check: str, rank: int, since: int) -> Data:
        def look() -> Data | None:
            fired = [
                i
                for i in self._api.incidents()
                if i["check"] == check and i["fired_unix_s"] and i["opened_step"] >= since
            ]
            wrong = [i for i in fired if i["rank"] != rank]
            if wrong:
                raise StoryBroken(f"{check} blames rank {wrong[0]['rank']}, the fault is on {rank}")
            return fired[0] if fired else None

        return self._while_waiting(f"{check} names rank {rank}", look)

    def _await_change(self, reason: str, is_it: Callable[[], bool] = lambda: True) -> Data:
        """The newest change for a reason, once it is over.

        Args:
            is_it: whether it is the one that is meant. On a crowded host a neighbour may slow
                another rank too, which is answered first.
        """

        def look() -> Data | None:
            done = [
                c for c in self._api.changes() if c["reason"] == reason and c["status"] != "running"
            ]
            return done[-1] if done and is_it() else None

        change = self._while_waiting(f"allocation change '{reason}'", look)
        if change["status"] != "committed" or not change["verified"]:
            raise StoryBroken(f"the change '{reason}' ended {change['status']}, not verified")
        label = "repaired" if reason == "repair" else "new shares"
        if reason != "repair":
            for r in self._api.get("/api/v1/plan")["replicas"]:
                self._tell.more(
                    f"replica {r['id']}: {r['batch']} sequences, {_shares(r['shares'])}"
                )
        self._tell.line(
            label,
            f"epoch {change['epoch']}: {size(change['bytes_moved'])} moved, lower bound "
            f"{size(change['bytes_lower_bound'])}; {change['units_verified']} fingerprints "
            f"right; as a trace: {self._stage.url}/api/v1/changes",
            "green",
        )
        return change

    def _units_of(self, rank: int) -> int:
        """Units of all kinds that the plan in force gives a rank."""
        for r in self._api.get("/api/v1/plan")["replicas"]:
            if rank in r["ranks"]:
                place = r["ranks"].index(rank)
                return sum(shares[place] for shares in r["shares"].values())
        return 0

    def _await_judgement(self, epoch: int) -> Data:
        def look() -> Data | None:
            done = [c for c in self._api.changes() if c["epoch"] >= epoch and c["judged"]]
            return done[-1] if done else None

        change = self._while_waiting("the change is judged", look)
        kept = change["judged"] == "kept"
        self._tell.line(
            "judged",
            ("kept" if kept else "undone, the old plan comes back")
            + f": a step took {_seconds(change['step_time_before_s'])}, takes "
            f"{_seconds(change['step_time_after_s'])}; ideal "
            f"{_seconds(change['step_time_ideal_s'])}",
            "green" if kept else "red",
        )
        return change

    def _await_resolved(self, incident: str) -> None:
        def look() -> Data | None:
            found = [i for i in self._api.incidents() if i["id"] == incident]
            return found[0] if found and found[0]["state"] == "resolved" else None

        self._while_waiting(f"incident {incident} resolves", look)
        self._tell.line("resolved", f"incident {incident}", "green")

    def _await_webhook(self, incident: str) -> None:
        def arrived(kept: list[Any]) -> bool:
            return any(incident.encode() in r.body and not r.error for r in kept)

        try:
            kept = self._stage.receiver.wait_for(arrived, 20.0)
        except TimeoutError as error:
            raise StoryBroken(f"no webhook about {incident}: {error}") from error
        first = next(r for r in kept if incident.encode() in r.body)
        kind = json.loads(first.body)["type"]
        self._tell.line("webhook", f"{kind} received, its signature is right", "green")

    def _while_waiting(self, what: str, look: Any) -> Data:
        with self._tell.waiting(what) as bar:
            return self._api.wait(
                what, self._scenario.act_s, look, lambda job: bar.show(0, _short(job))
            )

    def _name(self, incident: Data) -> None:
        self._tell.line("named", f"{incident['check']}: {incident['summary']}", "red")
        for name in SIGNALS:
            if name in incident["signals"]:
                self._tell.more(f"{name.replace('_', ' ')}: {incident['signals'][name]}")


def shortened(scenario: Scenario) -> Scenario:
    """The same story with fewer quiet steps, for tests."""
    return replace(scenario, healthy_steps=6, calm_steps=3)


def _settled(report: Data) -> Data | None:
    hooks = report["webhooks"]
    return report if hooks["sent"] and hooks["sent"] == hooks["delivered"] else None


def _shares(shares: dict[str, list[int]]) -> str:
    return ", ".join(f"{k} {'/'.join(str(n) for n in v)}" for k, v in shares.items())


def step_line(job: Data) -> str:
    """Where a job is, in one line; it may not know its loss or the time of a step yet."""
    return (
        f"step {job['step'] or 0}, loss {_loss(job['loss_first'])} -> {_loss(job['loss'])}, "
        f"{_seconds(job['step_time_s'])} a step; replicas bit-identical in "
        f"{job['replicas_identical_steps']} of {job['replicas_checked_steps']} checked steps"
    )


def _short(job: Data) -> str:
    if not job["step"] or job["loss"] is None:
        return "loading torch, joining"
    return f"step {job['step']}  loss {job['loss']:.2f}  {job['step_time_s'] or 0:.2f} s a step"


def _loss(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.2f} s"
