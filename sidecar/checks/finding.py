"""What a check says: a finding, with the signals that agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sidecar.ingest.state import JobState


class Severity(StrEnum):
    """How loud. Critical wakes a person."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something is wrong now.

    Attributes:
        check: name of the check, as in the catalog.
        subject: what it is about, stable while it lasts ("rank 2", "replica 0"); dedup key with
            `check`.
        summary: one sentence that names the culprit.
        signals: the measurements that agree, name -> text with unit.
        rank, replica, tensor, step: where known.
    """

    check: str
    subject: str
    severity: Severity
    summary: str
    signals: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    replica: int | None = None
    tensor: str | None = None
    unit: int | None = None
    step: int | None = None


class Check(Protocol):
    """One check. `run` looks at the state and returns what is wrong now; empty when nothing is.

    `ready` is False while the check has too little to judge: then its silence means unknown.
    `applies` is False where it can never judge the job as it is, whatever data may come.
    """

    name: str

    def applies(self, job: JobState) -> bool:
        """Whether this job is one that the check can judge; True while that is not known."""

    def ready(self, job: JobState) -> bool:
        """Whether there is enough data to judge."""

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """Findings that hold now."""
