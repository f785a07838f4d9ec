"""What comes of a round of meeting: who goes on, under which plan, from what. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ntp_core.cost import Work
from ntp_core.errors import NtpError, StateLost
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.planning.regroup import RegroupPolicy, regroup
from ntp_core.runtime.elastic.membership import Hello, Round
from ntp_core.units import ModelUnits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The decision of a round.

    Attributes:
        members: ranks of the new generation: those of `plan`.
        speaker: the member that tells newcomers how things stand; -1 when all is lost.
        plan: comes into force.
        present_epoch: of the plan in force until now, the same for all.
        restore: the state comes from the last checkpoint: the survivors do not hold all of it.
        lost: why the job cannot go on at all; "" when it can.
        detected_ns, decided_ns: wall clock.
    """

    members: tuple[int, ...]
    speaker: int
    plan: Plan
    present_epoch: int
    reason: Reason
    restore: bool = False
    lost: str = ""
    detected_ns: int = 0
    decided_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "members": list(self.members),
            "speaker": self.speaker,
            "plan": self.plan.to_json(),
            "present_epoch": self.present_epoch,
            "reason": int(self.reason),
            "restore": self.restore,
            "lost": self.lost,
            "detected_ns": self.detected_ns,
            "decided_ns": self.decided_ns,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Outcome:
        """Inverse of `to_json`."""
        plan, reason = Plan.from_json(body["plan"]), Reason(body["reason"])
        members = tuple(body["members"])
        return cls(**{**body, "plan": plan, "reason": reason, "members": members})


def decide(
    found: Round,
    *,
    present: Plan,
    home: Plan,
    before: Collection[int],
    units: ModelUnits,
    work: Work,
    speeds: Mapping[int, float],
    policy: RegroupPolicy,
    has_checkpoint: bool,
    is_divided: bool,
    is_planned: bool,
    detected_ns: int,
    decided_ns: int,
) -> Outcome:
    """Who goes on, and under which plan.

    Args:
        present: the plan in force, after the last decision.
        before: members until now.
        has_checkpoint: the job has one to go back to.
        is_divided: state is kept once in the job, so that with any rank a part of it is lost.
        is_planned: all stood between steps, nobody was lost.
    """
    holders = {h.rank for h in found.hellos.values() if holds_state(h, found)}
    epoch = max([present.epoch, *(found.hellos[g].epoch for g in holders)])
    base = present.with_epoch(epoch)
    next_epoch = max(h.tried for h in found.hellos.values()) + 1
    gone = set(before) - holders
    restore, lost, plan = False, "", base
    try:
        if any(found.hellos[g].is_torn for g in holders):
            raise StateLost("a rank was lost while the job went back to a checkpoint")
        if is_divided and not is_planned:
            raise StateLost("optimizer state is kept once in the job, a part of it went or is torn")
        plan = regroup(
            base,
            found.hellos,
            home,
            units,
            work,
            survivors=holders,
            speeds=speeds,
            policy=policy,
        ).plan
    except StateLost as error:
        restore, lost = has_checkpoint, "" if has_checkpoint else _hopeless(error)
        if restore:
            plan = regroup(base, found.hellos, home, units, work, survivors=base.ranks).plan
    except NtpError as error:
        lost = str(error)
    newcomers = set(plan.ranks) - holders
    reason = Reason.RANK_DIED if gone else Reason.RANK_RETURNED
    if not gone and not newcomers:
        reason = Reason.CONNECTION_LOST
    return Outcome(
        members=plan.ranks,
        speaker=min(holders.intersection(plan.ranks), default=-1),
        plan=plan.with_epoch(max(plan.epoch, next_epoch)),
        present_epoch=epoch,
        reason=reason,
        restore=restore,
        lost=lost,
        detected_ns=detected_ns,
        decided_ns=decided_ns,
    )


def holds_state(hello: Hello, found: Round) -> bool:
    """Whether a rank holds what the plan in force gives it, once it has caught up."""
    return not hello.is_new or (hello.is_pending and hello.decided < found.newest)


def stage_after(found: Round) -> int:
    """How far all are with what follows the last step, once all have caught up: the least of any.

    A rank that has only now heard of a step has done nothing of what follows it.
    """
    ahead = [h for h in found.survivors if h.decided == found.newest]
    newest = max(h.step for h in ahead)
    return min(h.stage if h.step == newest else 0 for h in found.survivors)


def _hopeless(error: StateLost) -> str:
    return f"{error}; the job saves no checkpoints, so there is nothing to go on from"
