"""A training job as data: what to train, under which plan, for how long. No tensor library."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from typing import Any

from ntp_core.errors import InvalidInput
from ntp_core.inbound.ranges import check_flag, check_number, check_whole
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, min_max_shares

PARAM_DTYPES = ("float32", "bfloat16")
MAX_COUNT = 1 << 31
"""Most sequences, ranks, steps of a rhythm and the like."""
MAX_RANKS = 1 << 20
MAX_STEPS = 1 << 53
MAX_SEED = (1 << 63) - 1
MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train and how.

    Attributes:
        seq: tokens per sequence.
        lr, betas, weight_decay: of AdamW; norm gains are not decayed.
        clip_norm: largest gradient norm, 0 for no clipping.
        check_every: steps between comparisons of replicas, 0 for none.
        warmup: steps over which lr rises from 0.
        micro_batch: sequences that go through the model at a time, 0 for all of a replica's.
        recompute: keep only the layers' inputs for backward and run each layer again.
        param_dtype: of parameters; "bfloat16" ones get float32 masters.
        grad_dtype: of gradients while they are summed, see `ntp_core.runtime.optim.adamw`.
        zero: keep optimizer state once in the job, not once per replica (ZeRO-1).
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
    micro_batch: int = 0
    recompute: bool = False
    param_dtype: str = "float32"
    grad_dtype: str = "float32"
    zero: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, {"seq": 1, "check_every": 0, "warmup": 0, "micro_batch": 0})
        check_whole("seed", self.seed, 0, MAX_SEED)
        for name in ("recompute", "zero"):
            check_flag(name, getattr(self, name))
        for name in ("param_dtype", "grad_dtype"):
            if getattr(self, name) not in PARAM_DTYPES:
                raise InvalidInput(f"{name} = {getattr(self, name)!r}; give one of {PARAM_DTYPES}")
        for name in ("lr", "weight_decay", "clip_norm"):
            check_number(name, getattr(self, name), 0, MAX_FLOAT)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise InvalidInput(f"betas = {self.betas!r}; give two numbers, each from 0 to below 1")
        for beta in self.betas:
            check_number("betas", beta, 0, 1, below=True)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        body = {f.name: getattr(self, f.name) for f in fields(TrainConfig)}
        body["model"] = {f.name: getattr(self.model, f.name) for f in fields(LlamaConfig)}
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """Where and when a job saves its state.

    Attributes:
        folder: of the checkpoints, seen by all ranks; of this job alone.
        every: steps between saves, 0 for only at the end.
        keep: how many checkpoints stay.
        resume: go on from the latest one, if there is one, at whatever layout it was saved.
    """

    folder: str
    every: int = 0
    keep: int = 2
    resume: bool = True

    def __post_init__(self) -> None:
        _check_counts(self, {"every": 0, "keep": 1})
        check_flag("resume", self.resume)
        if not isinstance(self.folder, str) or not self.folder or "\0" in self.folder:
            raise InvalidInput(f"folder = {self.folder!r}; give the path of a folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """How a job bears the loss of ranks, and lets ranks in. All times in seconds.

    Attributes:
        least_part: a replica with less than this part of its first ranks is dropped, from 0 to 1.
        timeout_s: a collective that takes longer counts as the loss of a peer.
        silent_s: longest wait for a survivor that runs, or that cannot be seen, and does not come.
        stopped_s: the same for one that is seen standing still.
        newcomer_s: how long a newcomer waits to be let in.
    """

    least_part: float = 0.0
    timeout_s: float = 60.0
    silent_s: float = 30.0
    stopped_s: float = 2.0
    newcomer_s: float = 600.0

    def __post_init__(self) -> None:
        check_number("least_part", self.least_part, 0, 1)
        for name in ("timeout_s", "silent_s", "stopped_s", "newcomer_s"):
            check_number(name, getattr(self, name), 0.1, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job, the same on every rank.

    Attributes:
        steps: the last step to train, from the first of the job, whenever it was resumed.
        obey_faults: carry out faults left in the inbox; for tests and the demo only.
        calibrate: measure what units cost before the first step (about a second), so that ranks are
            judged and shares made by real costs; otherwise operations are counted.
        save: where to save, None for nowhere.
        elastic: go on when ranks are lost; None: the loss of a rank ends the job.
    """

    train: TrainConfig
    plan: Plan
    steps: int
    obey_faults: bool = False
    calibrate: bool = False
    save: SaveConfig | None = None
    elastic: ElasticConfig | None = None

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 0, MAX_STEPS)
        for name in ("obey_faults", "calibrate"):
            check_flag(name, getattr(self, name))

    def to_json(self) -> str:
        """Text for a config file."""
        save, elastic = self.save, self.elastic
        body = {
            "train": self.train.to_json(),
            "plan": self.plan.to_json(),
            "steps": self.steps,
            "obey_faults": self.obey_faults,
            "calibrate": self.calibrate,
            "save": save and {f.name: getattr(save, f.name) for f in fields(SaveConfig)},
            "elastic": elastic and {f.name: getattr(elastic, f.name) for f in fields(elastic)},
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
            save, elastic = body.get("save"), body.get("elastic")
            return cls(
                train=TrainConfig(**train),
                plan=Plan.from_json(body["plan"]),
                steps=body["steps"],
                obey_faults=body.get("obey_faults", False),
                calibrate=body.get("calibrate", False),
                save=None if save is None else SaveConfig(**save),
                elastic=None if elastic is None else ElasticConfig(**elastic),
            )
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"not a job config: {error!r}") from error


def _check_counts(config: object, least: dict[str, int]) -> None:
    for name, smallest in least.items():
        check_whole(name, getattr(config, name), smallest, MAX_COUNT)


def even_plan(model: LlamaConfig, degrees: tuple[int, ...], batch: int) -> Plan:
    """A plan for ranks of equal speed: replica i has `degrees[i]` ranks, batch by degree.

    Raises:
        InvalidInput: a replica without ranks, or a batch that leaves a replica without sequences.
    """
    if not degrees:
        raise InvalidInput("degrees = (); give the number of ranks of at least one replica")
    for index, degree in enumerate(degrees):
        check_whole(f"degrees[{index}]", degree, 1, MAX_RANKS)
    check_whole("batch", batch, len(degrees), MAX_COUNT)
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
