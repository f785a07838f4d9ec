"""A training job as data: what to train, under which plan, for how long. No tensor library."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from ntp_core.errors import InvalidInput
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, min_max_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train and how.

    Attributes:
        seq: tokens per sequence.
        lr, betas, weight_decay: of AdamW; norm gains are not decayed.
        clip_norm: largest gradient norm, 0 for no clipping.
        check_every: steps between comparisons of replicas, 0 for none.
        warmup: steps over which lr rises from 0.
    """

    model: LlamaConfig
    seq: int = 128
    seed: int = 0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    check_every: int = 10
    warmup: int = 10

    def __post_init__(self) -> None:
        least = {"seq": 1, "check_every": 0, "warmup": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < smallest:
                raise InvalidInput(f"{name} = {value!r}; give a whole number >= {smallest}")
        for name in ("lr", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} = {value!r}; give a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job, the same on every rank.

    Attributes:
        steps: most steps to train.
        obey_faults: carry out faults left in the inbox; for tests and the demo only.
        calibrate: measure what units cost before the first step (about a second), so that ranks are
            judged and shares made by real costs; otherwise operations are counted.
    """

    train: TrainConfig
    plan: Plan
    steps: int
    obey_faults: bool = False
    calibrate: bool = False

    def to_json(self) -> str:
        """Text for a config file."""
        train = {f.name: getattr(self.train, f.name) for f in fields(TrainConfig)}
        train["model"] = {f.name: getattr(self.train.model, f.name) for f in fields(LlamaConfig)}
        body = {
            "train": train,
            "plan": self.plan.to_json(),
            "steps": self.steps,
            "obey_faults": self.obey_faults,
            "calibrate": self.calibrate,
        }
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> JobConfig:
        """Inverse of `to_json`. Raises InvalidInput naming what is wrong."""
        try:
            body: dict[str, Any] = json.loads(text)
            train = dict(body["train"])
            train["model"] = LlamaConfig(**train["model"])
            train["betas"] = tuple(train.get("betas", (0.9, 0.95)))
            return cls(
                train=TrainConfig(**train),
                plan=Plan.from_json(body["plan"]),
                steps=int(body["steps"]),
                obey_faults=bool(body.get("obey_faults", False)),
                calibrate=bool(body.get("calibrate", False)),
            )
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"not a job config: {error!r}") from error


def even_plan(model: LlamaConfig, degrees: tuple[int, ...], batch: int) -> Plan:
    """A plan for ranks of equal speed: replica i has `degrees[i]` ranks, batch by degree."""
    units = model.units()
    batches = min_max_shares(batch, [RankCost(unit_s=1 / d) for d in degrees], least=1)
    replicas, first = [], 0
    for degree, share in zip(degrees, batches, strict=True):
        layouts = {
            kind: Layout.contiguous(min_max_shares(n, [RankCost(unit_s=1.0)] * degree))
            for kind, n in units.counts.items()
        }
        ranks = tuple(range(first, first + degree))
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=share))
        first += degree
    return Plan.build(units.counts, replicas)
