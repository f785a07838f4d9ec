"""What the sidecar knows about one job, built from records only by `sidecar.ingest`.

Times named `_ns` are the node's monotonic clock unless the name says `unix`. Everything has a
bound: the deques below, and `MAX_CHANGES` changes. None means "unknown", which is neither good nor
bad.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ntp_core.observe import Blame, ChangePhase, ChangeStatus, Reason
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits

STEPS_KEPT = 512
MAX_CHANGES = 256


@dataclass(slots=True, kw_only=True)
class StepSample:
    """One committed step of one rank. `work` is the share of the job's own time that the
    plan then in force expects of the rank."""

    step: int
    end_ns: int
    duration_ns: int
    busy_ns: int
    tokens: int
    loss: float
    epoch: int
    work: float | None
    queued_ns: int = 0

    @property
    def own_ns(self) -> int:
        """Busy time without what went by waiting for a processor of the host."""
        return max(0, self.busy_ns - self.queued_ns)


@dataclass(slots=True, kw_only=True)
class OpenCollective:
    """A collective this rank has entered and not left."""

    op: int
    group: int
    seq: int
    num_bytes: int
    begin_ns: int


@dataclass(slots=True, kw_only=True)
class OpTotals:
    """Totals of one collective operation."""

    count: int = 0
    num_bytes: int = 0
    duration_ns: int = 0


@dataclass(slots=True, kw_only=True)
class RankState:
    """One watched rank."""

    rank: int
    pid: int
    world_size: int = 0
    start_ns: int = 0
    start_unix_ns: int = 0
    alive: bool | None = None
    exited: int | None = None  # exit status it announced; None while it runs or if it was killed
    epoch: int = 0
    replica: int | None = None
    tp_rank: int | None = None
    work: float | None = None
    step: int = 0  # last committed step
    step_open: int | None = None  # step in progress
    last_progress_ns: int = 0  # time of its newest record
    is_saving: bool = False  # writes a checkpoint
    saved_ns: int = 0  # end of its newest checkpoint
    collective: OpenCollective | None = None
    collective_seq: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    steps_total: int = 0
    tokens_total: int = 0
    busy_ns_total: int = 0
    step_ns_total: int = 0
    phase_ns_total: dict[int, int] = field(default_factory=dict)  # Phase -> ns
    ops: dict[int, OpTotals] = field(default_factory=dict)  # Op -> totals
    gc_ns_total: int = 0
    events_total: int = 0
    events_lost: int = 0
    probe_cost_ns: int = 0
    probe_cost_events: int = 0
    pid_start_ticks: int = 0  # start time of its process; 0 when not known
    killed_after_s: float | None = None  # the sidecar killed it when it had stood still for so long


@dataclass(slots=True, kw_only=True)
class PhaseSpan:
    """One phase of a change on one rank."""

    rank: int
    phase: ChangePhase
    begin_ns: int
    end_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The sidecar killed a rank that had stood still."""

    rank: int
    t_ns: int
    stopped_s: float


@dataclass(slots=True, kw_only=True)
class Change:
    """One allocation change. `spans` holds every rank's phases; `driver` is its lowest rank."""

    epoch: int
    reason: Reason
    step: int
    old_digest: str
    new_digest: str
    begin_ns: int
    end_ns: int | None = None
    status: ChangeStatus | None = None
    bytes_moved: int = 0
    bytes_lower_bound: int = 0
    units_verified: int = 0
    spans: list[PhaseSpan] = field(default_factory=list)
    driver: int = 0
    trace_id: str | None = None  # 32 hex digits, given when the change is first seen
    incident: str | None = None  # the incident that asked for it
    kills: list[Kill] = field(default_factory=list)  # by the sidecar, which it answers
    error: str = ""  # why the sidecar ended it, when no rank did
    step_time_before_s: float | None = None
    step_time_after_s: float | None = None
    step_time_ideal_s: float | None = None
    judged: str | None = None  # "kept", "undone", None while not judged


@dataclass(slots=True, kw_only=True)
class Divergence:
    """Replicas were reported different by the job itself."""

    step: int
    t_ns: int
    blame: Blame
    replica: int | None
    rank: int | None
    tensor: str
    unit: int
    epoch: int = 0


@dataclass(slots=True, kw_only=True)
class Fault:
    """A deliberate fault that took effect."""

    step: int
    t_ns: int
    fault: int
    rank: int
    detail: int


@dataclass(slots=True, kw_only=True)
class JobState:
    """One job as far as this node sees it."""

    job_id: str
    ranks: dict[int, RankState] = field(default_factory=dict)
    plan: Plan | None = None
    model: ModelUnits | None = None
    plans: dict[str, Plan] = field(default_factory=dict)  # digest -> plan, all seen
    changes: list[Change] = field(default_factory=list)
    divergences: deque[Divergence] = field(default_factory=lambda: deque(maxlen=256))
    fingerprints: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # step -> replica -> value
    identical_steps: int = 0  # checked steps at which all replicas were equal
    checked_steps: int = 0
    faults: deque[Fault] = field(default_factory=lambda: deque(maxlen=256))
    kills: deque[Kill] = field(default_factory=lambda: deque(maxlen=256))
    killed_total: int = 0
    proposals_refused: int = 0  # set aside by the job, whoever left them
    refusal: str = ""  # why, of the newest
    loss_first: float | None = None  # mean loss per token of the first step that was read
    bad_rings: int = 0
    bad_records: int = 0
    _places: tuple[Plan | None, frozenset[int]] = (None, frozenset())

    @property
    def members(self) -> list[RankState]:
        """Ranks that the job counts on: those with a place in the plan in force; before a plan is
        known, all. Ranks that were left behind, stand by or ask to be let in are not among them."""
        if self.plan is None:
            return list(self.ranks.values())
        return [self.ranks[g] for g in self.plan.ranks if g in self.ranks]

    def counts_on(self, rank: int) -> bool:
        """Whether the rank has a place in the plan in force; true while no plan is known."""
        if self.plan is None:
            return True
        if self._places[0] is not self.plan:
            self._places = self.plan, frozenset(self.plan.ranks)
        return rank in self._places[1]

    @property
    def step(self) -> int:
        """Newest step that every living member has committed; one that was let in just now and has
        committed none does not count yet."""
        living = [r.step for r in self.members if r.alive is not False]
        return min((s for s in living if s), default=0)

    @property
    def lead(self) -> RankState | None:
        """The rank that speaks for the job: of the members the furthest, then the lowest. All of
        them report its loss; one that has gone tells what was, which a job may have gone back on.
        """
        known = [r for r in self.ranks.values() if r.loss is not None]
        inside = [r for r in known if self.counts_on(r.rank)] or known
        living = [r for r in inside if r.alive is not False] or inside
        return max(living, key=lambda r: (r.step, -r.rank), default=None)

    @property
    def has_trained(self) -> bool:
        """Whether any rank has committed a step; a job that has a plan announces it before."""
        return any(r.steps_total for r in self.ranks.values())
