"""Finds replicas that hold different parameters.

Two sources: fingerprints that each replica reports for a checked step, and the job's own verdict
with the tensor, the unit and the evidence for the blame. With undecided blame the finding says that
replicas differ and that nothing tells which one is wrong. It ends when a later checked step is
identical in all replicas.

What all replicas share cannot be seen here: an error that went through the gradient sync is the
same everywhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ntp_core.observe import Blame
from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.state import Divergence, JobState

BLAME_WAIT_NS = 500_000_000
"""Fingerprints arrive before the job's verdict; the finding waits this long for a name."""

_EVIDENCE = {
    Blame.UNDECIDED: "none: nothing tells which replica is wrong",
    Blame.AT_REST: "its bits changed while no step was writing them",
    Blame.MAJORITY: "all other replicas agree with each other",
}


@dataclass(slots=True)
class ReplicaDivergence:
    """The check. It remembers since when a difference without a verdict has been known."""

    name: str = "replica_divergence"
    _first_seen: dict[int, int] = field(default_factory=dict)  # step -> now_ns; at most one entry

    def applies(self, job: JobState) -> bool:
        """Two replicas of a plan can be compared; True before the job could have a plan."""
        if job.plan is None:
            return not job.has_trained
        return len(job.plan.replicas) > 1

    def ready(self, job: JobState) -> bool:
        """True once two replicas were compared, by the job or by their fingerprints."""
        return (
            job.checked_steps > 0
            or bool(job.divergences)
            or any(len(values) > 1 for values in job.fingerprints.values())
        )

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """At most one finding: the newest difference that no later identical step has ended."""
        identical, differing = newest_steps(job)
        verdicts = [d for d in job.divergences if d.step > identical]
        if not verdicts and not differing:
            self._first_seen.clear()
            return []
        if verdicts:
            step = max(d.step for d in verdicts)
            return [_told(job, [d for d in verdicts if d.step == step])]
        step = differing[0]
        if step not in self._first_seen:
            self._first_seen = {step: min(self._first_seen.values(), default=now_ns)}
        if now_ns - self._first_seen[step] < BLAME_WAIT_NS:
            return []
        return [_seen(job, step)]


def newest_steps(job: JobState) -> tuple[int, list[int]]:
    """The newest step at which all replicas reported the same value (0 without one), and the steps
    after it at which they differ, newest first."""
    newest_verdict = max((d.step for d in job.divergences), default=-1)
    differing = []
    for step in sorted(job.fingerprints, reverse=True):
        values = _values_of(job, step)
        if len(set(values.values())) > 1:
            differing.append(step)
        # Replicas can be equal again at the very step of the verdict, when the job repaired it
        # before it went on; only a later step proves it.
        elif len(values) >= max(2, _num_replicas(job)) and step != newest_verdict:
            return step, differing
    return 0, differing


def _num_replicas(job: JobState) -> int:
    return len(job.plan.replicas) if job.plan is not None else 2


def _values_of(job: JobState, step: int) -> dict[int, int]:
    """Fingerprints of the replicas that the plan still has: the word of one that is gone may be
    of an earlier run of the same step."""
    values = job.fingerprints.get(step, {})
    if job.plan is None:
        return values
    return {r: v for r, v in values.items() if r < len(job.plan.replicas)}


def _told(job: JobState, verdicts: list[Divergence]) -> Finding:
    """From the job's own verdicts of one step."""
    first = next((d for d in verdicts if d.blame is not Blame.UNDECIDED), verdicts[0])
    units = len({(d.tensor, d.unit) for d in verdicts})
    if first.blame is Blame.UNDECIDED or first.replica is None:
        summary = (
            f"Replicas differ in '{first.tensor}' unit {first.unit} at step {first.step}; "
            "nothing tells which one is wrong."
        )
    else:
        rank = "" if first.rank is None else f" (rank {first.rank})"
        summary = (
            f"Replica {first.replica}{rank} holds different bits in '{first.tensor}' unit "
            f"{first.unit}, found at step {first.step}."
        )
    signals = {
        "verdict": f"reported by the job at step {first.step}",
        "evidence": _EVIDENCE.get(first.blame, "unknown"),
        "extent": f"units: {units}, tensors: {len({d.tensor for d in verdicts})}",
        "fingerprints": _values(job, first.step),
    }
    return _finding(summary, signals, first.step, first)


def _seen(job: JobState, step: int) -> Finding:
    """From fingerprints alone, when the job gave no verdict."""
    odd = _minority(_values_of(job, step))
    if odd is None:
        summary = f"Replicas differ at step {step}; nothing tells which one is wrong."
    else:
        summary = f"Replica {odd} differs from all others at step {step}."
    signals = {
        "verdict": "none from the job",
        "evidence": _EVIDENCE[Blame.UNDECIDED if odd is None else Blame.MAJORITY],
        "fingerprints": _values(job, step),
    }
    return _finding(summary, signals, step, None, odd)


def _finding(
    summary: str,
    signals: dict[str, str],
    step: int,
    verdict: Divergence | None,
    replica: int | None = None,
) -> Finding:
    is_named = verdict is not None and verdict.blame is not Blame.UNDECIDED
    return Finding(
        check="replica_divergence",
        # One subject for all: the name of the culprit may come after the finding.
        subject="replicas",
        severity=Severity.CRITICAL,
        summary=summary,
        signals=signals,
        rank=verdict.rank if verdict and is_named else None,
        replica=verdict.replica if verdict and is_named else replica,
        tensor=verdict.tensor if verdict else None,
        unit=verdict.unit if verdict else None,
        step=step,
    )


def _minority(values: dict[int, int]) -> int | None:
    """The one replica that all others contradict; None when there is none such."""
    counts = Counter(values.values())
    odd = [replica for replica, value in values.items() if counts[value] == 1]
    return odd[0] if len(values) > 2 and len(odd) == 1 and len(counts) == 2 else None


def _values(job: JobState, step: int) -> str:
    values = _values_of(job, step)
    if not values:
        return "not reported for this step"
    return ", ".join(f"replica {r}: {v & (2**64 - 1):016x}" for r, v in sorted(values.items()))
