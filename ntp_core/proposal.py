"""A proposal: a new plan that the sidecar leaves for the job, and why.

The job takes it at a step boundary or refuses it; nothing waits for it. The file is small JSON in
the job's run directory and may be hostile, so every field is checked and its size is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ntp_core.errors import InvalidInput, StaleEpoch
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits

FILE_NAME = "proposal.json"
MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan for the next epoch.

    Attributes:
        base_digest: digest of the plan it was made from; the job refuses it under any other.
        plan: the new plan; its epoch is the base epoch plus one.
        reason: why.
        incident: id of the incident behind it, "" when none.
        detected_unix_ns: when the cause was first seen; 0 when not known.
        decided_unix_ns: when this proposal was made.
        promised_step_s: predicted step time, 0 when nothing is promised.
        ideal_step_s: step time if work could be cut into any fraction, 0 when not known.
        speeds: global rank -> speed that the shares are made for, only ratios matter; empty when
            all are equal. A rank is judged against what was expected of it at this speed.
    """

    base_digest: str
    plan: Plan
    reason: Reason
    incident: str = ""
    detected_unix_ns: int = 0
    decided_unix_ns: int = 0
    promised_step_s: float = 0.0
    ideal_step_s: float = 0.0
    speeds: Mapping[int, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's text."""
        body = {
            "base_digest": self.base_digest,
            "plan": self.plan.to_json(),
            "reason": int(self.reason),
            "incident": self.incident,
            "detected_unix_ns": self.detected_unix_ns,
            "decided_unix_ns": self.decided_unix_ns,
            "promised_step_s": self.promised_step_s,
            "ideal_step_s": self.ideal_step_s,
            "speeds": {str(g): v for g, v in self.speeds.items()},
        }
        return json.dumps(body, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Proposal:
        """Inverse of `to_json`. Raises InvalidInput on anything else."""
        if len(text) > MAX_BYTES:
            raise InvalidInput(f"proposal of {len(text)} bytes refused; at most {MAX_BYTES}")
        try:
            body: dict[str, Any] = json.loads(text)
            return cls(
                base_digest=str(body["base_digest"]),
                plan=Plan.from_json(body["plan"]),
                reason=Reason(body["reason"]),
                incident=str(body["incident"])[:128],
                detected_unix_ns=int(body["detected_unix_ns"]),
                decided_unix_ns=int(body["decided_unix_ns"]),
                promised_step_s=float(body["promised_step_s"]),
                ideal_step_s=float(body["ideal_step_s"]),
                speeds={int(g): float(v) for g, v in body.get("speeds", {}).items()},
            )
        except InvalidInput:
            raise
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise InvalidInput(f"not a proposal: {error!r}") from error


def check_proposal(proposal: Proposal, present: Plan, model: ModelUnits | None = None) -> None:
    """Raises unless `proposal` fits the plan in force, and the model where it is given.

    Raises:
        StaleEpoch: made for another plan or epoch.
        InvalidInput: names ranks, units or a batch that the job does not have.
    """
    if proposal.base_digest != present.digest or proposal.plan.epoch != present.epoch + 1:
        raise StaleEpoch(
            f"proposal for epoch {proposal.plan.epoch} from plan {proposal.base_digest} refused; "
            f"in force is epoch {present.epoch}, plan {present.digest}"
        )
    if proposal.plan.ranks != present.ranks:
        raise InvalidInput(
            f"proposal names ranks {list(proposal.plan.ranks)}, the job has {list(present.ranks)}"
        )
    if proposal.plan.counts != present.counts:
        raise InvalidInput(
            f"proposal counts units {proposal.plan.counts}, the job {present.counts}"
        )
    if proposal.speeds and (
        set(proposal.speeds) != set(present.ranks)
        or not all(0 < v < float("inf") for v in proposal.speeds.values())
    ):
        raise InvalidInput(
            f"proposal gives speeds {dict(proposal.speeds)}; it must give one positive speed for "
            f"each of the ranks {list(present.ranks)}, or none"
        )
    if proposal.plan.global_batch != present.global_batch:
        raise InvalidInput(
            f"proposal changes the global batch from {present.global_batch} to "
            f"{proposal.plan.global_batch}; it must stay"
        )
    if model is not None:
        proposal.plan.check_model(model)
