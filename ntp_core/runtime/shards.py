"""This rank's shards: which blocks of which logical tensor each parameter holds, and where.

Everything that walks over content - initial weights, gradient sync, fingerprints, transfers - goes
through here, so that one mapping between logical and local positions serves all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from ntp_core.elements import Elements
from ntp_core.errors import InvalidInput, ModelMismatch
from ntp_core.keepers import held_by_keepers
from ntp_core.plan import Plan, runs_of
from ntp_core.reshard import Held, blocks_held, held_by_plan
from ntp_core.units import ModelUnits, TensorSpec, block_slices, local_shape, local_slices


class Shard:
    """One parameter on this rank.

    Attributes:
        index: its tensor's index in the model's units.
        blocks: the blocks it holds, ascending; of a tensor without units (0,), or none of it.
    """

    def __init__(
        self, index: int, spec: TensorSpec, num_units: int, blocks: tuple[int, ...]
    ) -> None:
        self.index = index
        self.spec = spec
        self.num_units = num_units
        self.blocks = blocks
        self._places = (
            {0: ((0, spec.shape[0]),)}
            if spec.kind is None
            else local_slices(spec, num_units, blocks)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        if self.spec.kind is None:
            return self.spec.shape if self.blocks else (0, *self.spec.shape[1:])
        return local_shape(self.spec, self.num_units, self.blocks)

    def views(self, tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
        """The parts of a held block inside a local tensor of this shard, as views."""
        dim = self.spec.dim
        return [tensor.narrow(dim, a, b - a) for a, b in self._places[block]]

    def spans(self, blocks: tuple[int, ...]) -> list[tuple[int, int]]:
        """Local [start, stop) along the cut dim that cover these blocks, part after part.

        Only blocks that follow each other in the model are joined: those lie together on every
        rank that holds them. Spans that merely touch on this rank stay apart, so that all owners
        of the same blocks cut a tensor into the same pieces in the same order - otherwise the
        columns of a row-parallel gradient would be summed with other columns.
        """
        parts = self.spec.parts if self.spec.kind is not None else 1
        joined: list[tuple[int, int]] = []
        for part in range(parts):
            for first, stop in runs_of(blocks):
                start = self._places[first][part][0]
                joined.append((start, self._places[stop - 1][part][1]))
        return joined

    def rows(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """Local index along the cut dim of these blocks' rows, part after part, int64."""
        spans = [torch.arange(a, z) for a, z in self.spans(blocks)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def logical_index(self) -> torch.Tensor:
        """Logical index along the cut dim of each local row (or column)."""
        if self.spec.kind is None:
            return torch.arange(self.shape[self.spec.dim])
        ends = [block_slices(self.spec, self.num_units, b) for b in self.blocks]
        parts = [torch.arange(*block[p]) for p in range(self.spec.parts) for block in ends]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


class Placement:
    """Which blocks a rank holds under a plan, in the order of the model's tensors.

    Attributes:
        copies: how many times the whole job holds each block, copies inside a replica not counted.
        copy: which of them this rank's blocks belong to.
    """

    def __init__(self, model: ModelUnits, plan: Plan, rank: int) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.shards = shards_of(model, plan, rank)

    @property
    def copies(self) -> int:
        """One per replica."""
        return len(self.plan.replicas)

    @property
    def copy(self) -> int:
        """The rank's replica."""
        return self.plan.place(self.rank)[0]

    @property
    def held(self) -> Held:
        """What every rank holds."""
        return held_by_plan(self.plan, self.model)

    def under(self, plan: Plan) -> Placement:
        """This rank's blocks under another plan."""
        return Placement(self.model, plan, self.rank)

    def counted(self) -> list[tuple[int, ...]]:
        """For each shard the blocks for which this rank speaks in its replica.

        A block that several ranks of a replica hold is spoken for by the owner of its first unit,
        a whole tensor by the replica's first rank; so each block is counted once per replica.
        """
        replica, tp_rank = self.plan.place(self.rank)
        found: list[tuple[int, ...]] = []
        for s in self.shards:
            if s.spec.kind is None:
                found.append((0,) if tp_rank == 0 else ())
                continue
            layout = self.plan.replicas[replica].layout(s.spec.kind, s.spec.layer)
            mine = set(layout.units(tp_rank))
            found.append(tuple(b for b in s.blocks if b * s.spec.sharing in mine))
        return found


class KeptPlacement(Placement):
    """The blocks that this rank keeps for the whole job (`ntp_core.keepers`).

    With one replica there is nothing to deal out: then it is what the rank holds.
    """

    def __init__(self, model: ModelUnits, plan: Plan, rank: int) -> None:
        super().__init__(model, plan, rank)
        self.is_dealt = len(plan.replicas) > 1
        if self.is_dealt:
            self._held = held_by_keepers(plan, model)
            self.shards = [
                Shard(s.index, s.spec, s.num_units, held[rank])
                for s, held in zip(self.shards, self._held, strict=True)
            ]

    @property
    def copies(self) -> int:
        """One in all."""
        return 1

    @property
    def copy(self) -> int:
        """The only one."""
        return 0

    @property
    def held(self) -> Held:
        """What every rank keeps."""
        return self._held if self.is_dealt else super().held

    def under(self, plan: Plan) -> KeptPlacement:
        """What this rank keeps under another plan."""
        return KeptPlacement(self.model, plan, self.rank)

    def counted(self) -> list[tuple[int, ...]]:
        """Each rank speaks for what it keeps."""
        return [s.blocks for s in self.shards] if self.is_dealt else super().counted()


class Shards(Placement):
    """A placement with its parameters: all content of one rank under the plan in force."""

    def __init__(
        self, model: ModelUnits, plan: Plan, rank: int, params: dict[str, nn.Parameter]
    ) -> None:
        super().__init__(model, plan, rank)
        self.params = [_param(params, t) for t in model.tensors]
        for shard, param in self:
            if tuple(param.shape) != shard.shape:
                raise ModelMismatch(
                    f"tensor '{shard.spec.name}' on rank {rank} has shape {tuple(param.shape)}, "
                    f"the plan of epoch {plan.epoch} gives it {shard.shape}"
                )

    def __iter__(self) -> Iterator[tuple[Shard, nn.Parameter]]:
        return iter(zip(self.shards, self.params, strict=True))

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take new local tensors for a new plan; parameters keep their identity."""
        self.plan = plan
        self.shards = shards_of(self.model, plan, self.rank)
        for shard, param, tensor in zip(self.shards, self.params, tensors, strict=True):
            assert tuple(tensor.shape) == shard.shape
            param.grad = None
            param.data = tensor


def shards_of(model: ModelUnits, plan: Plan, rank: int) -> list[Shard]:
    """The shards of a rank under a plan, in the order of the model's tensors."""
    return [
        Shard(i, t, 1 if t.kind is None else model.counts[t.kind], blocks_held(plan, t, rank))
        for i, t in enumerate(model.tensors)
    ]


def grad_dtype(param: nn.Parameter) -> torch.dtype:
    """The type in which gradients of a parameter are accumulated."""
    return getattr(param, "grad_dtype", None) or param.dtype


def grad_elements(shards: Shards) -> Elements:
    """Types of the gradients, in the order of the model's tensors; frozen ones have none."""
    return Elements.named(
        [
            str(grad_dtype(p)).removeprefix("torch.") if p.requires_grad else None
            for p in shards.params
        ]
    )


def set_grad_dtype(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Accumulate a parameter's gradients in another type.

    Raises:
        InvalidInput: where this torch cannot.
    """
    if dtype == grad_dtype(param):
        return
    if not hasattr(param, "grad_dtype"):
        raise InvalidInput(
            f"torch {torch.__version__} keeps gradients in the parameter's type, {param.dtype}; "
            f"set grad_dtype to that, or use a torch that has Tensor.grad_dtype"
        )
    param.grad_dtype = dtype


def init_shard(shard: Shard, seed: int, std: float) -> torch.Tensor:
    """Initial values, drawn block by block: the same model at any layout.

    Norm gains (1-dim) start at 1; all else is normal with deviation `std`.
    """
    spec = shard.spec
    tensor = torch.ones(shard.shape)
    if len(spec.shape) == 1:
        return tensor
    for block in shard.blocks:
        views = shard.views(tensor, block)
        generator = torch.Generator().manual_seed(_block_seed(seed, spec.name, block))
        for view in views:
            view.copy_(torch.empty(view.shape).normal_(0.0, std, generator=generator))
    return tensor


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _param(params: dict[str, nn.Parameter], t: TensorSpec) -> nn.Parameter:
    if t.name not in params:
        raise ModelMismatch(f"the model has no parameter '{t.name}', its units name it")
    return params[t.name]
