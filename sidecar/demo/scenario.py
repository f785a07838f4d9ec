"""What the demo does, as data: the job, its faults, and how long each act may take."""

from __future__ import annotations

from dataclasses import dataclass

from ntp_core.faults import Fault, flip_bit
from ntp_core.job import JobConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig

FLIP = flip_bit(rank=4, tensor="layers.1.down.weight", element=77, bit=18)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The demo's numbers.

    Attributes:
        degrees: ranks of each replica.
        healthy_steps: steps before the first fault.
        slow_rank: the rank that is slowed.
        slow_factor: how many times longer its own work takes then. With five ranks on two cores a
            step takes 2.5 times a rank's work anyway; it must be well over that for the rank to be
            the one that holds the others up.
        flip: the bit that is flipped.
        calm_steps: steps after the repair.
        act_s: longest time an act may take before the demo gives up.
    """

    degrees: tuple[int, ...] = (3, 2)
    batch: int = 10
    seq: int = 64
    healthy_steps: int = 30
    slow_rank: int = 1
    slow_factor: float = 6.0
    flip: Fault = FLIP
    calm_steps: int = 10
    act_s: float = 90.0
    max_steps: int = 2000

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        return sum(self.degrees)

    def job(self) -> JobConfig:
        """The uneven job."""
        return self._config(self.degrees, self.max_steps, obey_faults=True)

    def reference(self, steps: int) -> JobConfig:
        """The same training in one process, for as many steps as the job made."""
        return self._config((1,), steps, obey_faults=False)

    def _config(self, degrees: tuple[int, ...], steps: int, *, obey_faults: bool) -> JobConfig:
        # Wide for its depth: most of a step is matrix products, which shares can divide.
        model = LlamaConfig(width=384, ffn=1536, mlp_block=32)
        return JobConfig(
            train=TrainConfig(model=model, seq=self.seq, lr=1e-3, check_every=1),
            plan=even_plan(model, degrees, self.batch),
            steps=steps,
            obey_faults=obey_faults,
            calibrate=obey_faults,
        )
