"""How much work a plan gives each rank.

Only ratios matter, so a unit of work may be a floating-point operation (`work_of_model`) or a
second on an undisturbed rank (`ntp_core.runtime.calibrate`): the planner divides by measured
speeds, the sidecar divides measured times by the share of work.

Operations are counted the usual way (e.g. arXiv 2205.05198, appendix): a multiply-add counts as 2
and backward costs twice the forward, so a weight costs 6 per token; attention scores add 12 * seq *
head_dim per token and query head, halved by the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ntp_core.errors import InvalidInput
from ntp_core.inbound.ranges import check_number
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, UnitKind

FLOPS_PER_WEIGHT = 6
MAX_WORK = 1e30  # of one unit; ratios stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a model per sequence of the batch.

    Attributes:
        unit: kind -> work of one unit, all layers together.
        rank: work that every rank does whatever its share (norms, residuals).
    """

    unit: Mapping[UnitKind, float]
    rank: float = 0.0

    def of_rank(self, plan: Plan, global_rank: int) -> float:
        """Work per step of one rank of a plan."""
        replica, tp_rank = plan.place(global_rank)
        r = plan.replicas[replica]
        units = sum(self.unit[k] * layout.shares[tp_rank] for k, layout in r.layouts.items())
        return r.batch * (self.rank + units)

    def expected_shares(
        self, plan: Plan, speeds: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Each rank's share of the job's own time per step; the sum is 1.

        Args:
            speeds: speed of each rank that the plan was made for; None or empty: all equal.
        """
        times = {g: self.of_rank(plan, g) / (speeds[g] if speeds else 1.0) for g in plan.ranks}
        total = sum(times.values())
        return {g: t / total for g, t in times.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"unit": {str(k): v for k, v in self.unit.items()}, "rank": self.rank}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Work:
        """Inverse of `to_json`. Raises InvalidInput on anything else."""
        try:
            unit = {
                UnitKind(k): float(check_number(f"work of {k}", v, 0, MAX_WORK))
                for k, v in data["unit"].items()
            }
            return cls(unit=unit, rank=float(check_number("rank", data["rank"], 0, MAX_WORK)))
        except InvalidInput as error:
            raise InvalidInput(f"not a description of work: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"not a description of work: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """What the weights alone do not tell about a model's work."""

    seq: int
    extra_per_unit: Mapping[UnitKind, float] = field(default_factory=dict)
    per_rank: float = 0.0


def work_of_model(model: ModelUnits, shape: WorkShape) -> Work:
    """Operations per token, from the weight elements each unit owns and what the shape adds."""
    weights = dict.fromkeys(model.counts, 0.0)
    for t in model.tensors:
        if t.kind is not None:
            weights[t.kind] += t.numel / model.counts[t.kind]
    unit = {k: FLOPS_PER_WEIGHT * w + shape.extra_per_unit.get(k, 0.0) for k, w in weights.items()}
    return Work(unit=unit, rank=shape.per_rank)
