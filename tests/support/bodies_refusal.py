"""Bodies that hand `parallelize` what does not fit, and tell what each rank was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ntp_core.errors import InvalidInput
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.modules.hf import parallelize_hf
from ntp_core.runtime.modules.parallelize import parallelize
from tests.support.hf_models import build
from tests.support.recording_observer import RecordingObserver, calls_of

WIDTH = 12


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank was told.

    Attributes:
        kind, words: of the error; empty when there was none.
        groups: that exist afterwards, by the numbers the observer hears.
        is_whole: the model has the shapes and values it had.
        met: sum over all ranks of 1, taken afterwards: they are all still in step.
    """

    kind: str
    words: str
    groups: set[int]
    is_whole: bool
    met: int


class Block(nn.Module):
    """An embedding, two linear layers, a convolution to be refused."""

    def __init__(self, columns: int = 24) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(10, WIDTH)
        self.up = nn.Linear(WIDTH, columns)
        self.down = nn.Linear(columns, WIDTH)
        self.conv = nn.Conv1d(1, 1, 3)
        self.drop = nn.Dropout(0.0)


RULES = {
    "embed": "embedding_rowwise:vocab",
    "up": "colwise:mlp",
    "down": "rowwise:mlp",
    "conv": "replicated",
}


def parallelize_block(
    comm: Comm,
    plan: Plan,
    rules: dict[str, str],
    odd_rank: int = -1,
    odd_rules: dict[str, str] | None = None,
    odd_columns: int = 24,
    drop: float = 0.0,
) -> Told:
    """One rank may have other rules or another model than the rest."""
    is_odd = comm.rank == odd_rank
    block = Block(odd_columns if is_odd else 24)
    block.drop.p = drop
    given = (odd_rules or rules) if is_odd else rules
    return refused(comm, block, lambda: parallelize(block, plan, given, comm))


def parallelize_model(
    comm: Comm,
    name: str,
    plan: Plan,
    split_heads: bool = False,
    config: dict[str, Any] | None = None,
    modules: dict[str, float] | None = None,
) -> Told:
    """A Hugging Face model whose configuration or modules are changed first."""
    model = build(name)
    for key, value in (config or {}).items():
        setattr(model.config, key, value)
    for key, rate in (modules or {}).items():
        owner, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(owner), attribute, rate)
    return refused(comm, model, lambda: parallelize_hf(model, plan, comm, split_heads=split_heads))


def refused(comm: Comm, model: nn.Module, act: Callable[[], object]) -> Told:
    """What `act` raises, and what it left behind."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    comm.observer = observer = RecordingObserver()
    kind = words = ""
    try:
        act()
    except InvalidInput as error:
        kind, words = type(error).__name__, str(error)
    after = dict(model.named_parameters())
    wrapped = [n for n, m in model.named_modules() if "forward" in m.__dict__]
    is_whole = not wrapped and all(torch.equal(p, after[n]) for n, p in before.items())
    met = comm.all_reduce(torch.ones(1), comm.world)
    groups = {call[1] for call in calls_of(observer.calls, "collective_begin")}
    return Told(kind, words, groups | set(comm._numbers.values()), is_whole, int(met))
