"""What the engine needs of a model that is spread over a replica's ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from ntp_core.plan import Plan
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.shards import Shards
from ntp_core.units import ModelUnits


class ParallelModel(Protocol):
    """One rank's part of a model. Made by `parallelize`, or written by hand (`Llama`).

    Attributes:
        units: all tensors of the whole model.
        shards: this rank's parameters under the plan in force.
        group: the ranks of its replica.
    """

    units: ModelUnits
    shards: Shards
    group: TensorParallelGroup

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take the local tensors of a new plan, and the group of this rank's replica in it."""
