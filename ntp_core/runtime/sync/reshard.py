"""Gradient sync by resharding (arXiv 2504.06095): to the cores, a sum per lane, and back.

All that goes between two ranks of a replica in one direction travels in one all-to-all, all that a
lane sums in one all-reduce, after backward. Buffers are allocated once per plan. Copies of a block
are added up at its core in the order of their ranks, and the one sum of a lane goes to all holders,
so that all replicas hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ntp_core.errors import ModelMismatch
from ntp_core.paper_sync import Send, lane_blocks, lane_groups, sends
from ntp_core.runtime.comm import Comm, Ranks
from ntp_core.runtime.shards import Shard, Shards, grad_dtype, grad_elements
from ntp_core.runtime.sync.segments import Fused, fused
from ntp_core.segments import launches
from ntp_core.units import ModelUnits

Views = list[torch.Tensor]


class ReshardSync:
    """Sums gradients over replicas under one plan. Build a new one for each plan."""

    def __init__(self, comm: Comm, shards: Shards) -> None:
        _check_one_type(shards)
        self._comm = comm
        self._shards = shards
        replica, place = shards.plan.place(shards.rank)
        self._replica = shards.plan.replicas[replica].ranks
        moved = sends(shards.plan, shards.model, grad_elements(shards))
        todo = [s for s in moved if s.src in self._replica]
        self._moves = bool(todo)
        self._out = _Parcels(shards, self._replica, [s for s in todo if s.src == shards.rank])
        self._in = _Parcels(shards, self._replica, [s for s in todo if s.core == shards.rank])
        is_core = place < len(lane_groups(shards.plan))
        self._lane = _Lane(shards, self._in) if is_core else None
        self._whole = _whole(comm, shards)

    def arm(self) -> None:
        """Nothing happens before `run`."""

    def close(self) -> None:
        """Nothing is held on to."""

    def run(self) -> None:
        """Replace each gradient by its sum over replicas."""
        for param in self._shards.params:
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param, dtype=grad_dtype(param))
        if self._moves:
            self._out.load()
            self._exchange(self._in, self._out)
        if self._lane is not None:
            self._lane.load()
            if self._lane.flat.numel():
                self._comm.all_reduce(self._lane.flat, self._lane.ranks)
            self._lane.unload()
        if self._moves:
            self._exchange(self._out, self._in)
            self._out.unload()
        for f in self._whole:
            f.start()
        for f in self._whole:
            f.finish()

    def _exchange(self, into: _Parcels, source: _Parcels) -> None:
        self._comm.exchange(into.flat, source.flat, into.sizes, source.sizes, self._replica)


class _Parcels:
    """What this rank exchanges with each rank of its replica, in one buffer.

    Attributes:
        sizes: elements, by rank of the replica.
        pieces: (send, its spans inside the buffer), in the buffer's order.
    """

    def __init__(self, shards: Shards, replica: Ranks, todo: Sequence[Send]) -> None:
        self._shards = shards
        mine = shards.rank
        self.sizes: list[int] = []
        shapes: list[tuple[Send, list[tuple[int, ...]]]] = []
        for peer in replica:
            with_peer = [s for s in todo if peer == (s.core if s.src == mine else s.src)]
            found = [(s, _shapes(shards.model, s.tensor, s.blocks)) for s in with_peer]
            self.sizes.append(sum(_numel(x) for _, xs in found for x in xs))
            shapes += found
        self.flat = _buffer(shards, sum(self.sizes))
        places = iter(_places(self.flat, [x for _, xs in shapes for x in xs]))
        self.pieces = [(s, [next(places) for _ in xs]) for s, xs in shapes]

    def load(self) -> None:
        """From this rank's gradients."""
        for s, places in self.pieces:
            torch._foreach_copy_(places, self._views(s))

    def unload(self) -> None:
        """Into this rank's gradients."""
        for s, places in self.pieces:
            torch._foreach_copy_(self._views(s), places)

    def _views(self, s: Send) -> Views:
        shard, grad = self._shards.shards[s.tensor], self._shards.params[s.tensor].grad
        assert grad is not None
        return _narrow(shard, grad, s.blocks)


class _Lane:
    """The buffer that a core sums in its lane: each tensor as a rank would hold the lane's blocks.

    Attributes:
        ranks: the lane's cores.
    """

    def __init__(self, shards: Shards, incoming: _Parcels) -> None:
        plan, model = shards.plan, shards.model
        place = plan.place(shards.rank)[1]
        self._shards = shards
        self.ranks = lane_groups(plan)[place]
        cut = {
            i: Shard(i, t, model.counts[t.kind], lane_blocks(plan, t)[place])
            for i, t in enumerate(model.tensors)
            if t.kind is not None and shards.params[i].requires_grad
        }
        self.flat = _buffer(shards, sum(_numel(s.shape) for s in cut.values()))
        tensors = dict(zip(cut, _places(self.flat, [s.shape for s in cut.values()]), strict=True))
        self._own: list[tuple[int, tuple[int, ...], Views]] = []
        for i, shard in cut.items():
            blocks = tuple(b for b in shards.shards[i].blocks if b in shard.blocks)
            self._own.append((i, blocks, _narrow(shard, tensors[i], blocks)))
        self._others = [
            (places, _narrow(cut[s.tensor], tensors[s.tensor], s.blocks))
            for s, places in incoming.pieces
        ]

    def load(self) -> None:
        """Add up what this rank holds and what came in."""
        self.flat.zero_()
        for i, blocks, places in self._own:
            self._add(places, self._grads(i, blocks))
        for came, places in self._others:
            self._add(places, came)

    def unload(self) -> None:
        """Sums into this rank's gradients and into what goes back."""
        for i, blocks, places in self._own:
            if places:
                torch._foreach_copy_(self._grads(i, blocks), places)
        for came, places in self._others:
            torch._foreach_copy_(came, places)

    def _grads(self, index: int, blocks: tuple[int, ...]) -> Views:
        grad = self._shards.params[index].grad
        assert grad is not None
        return _narrow(self._shards.shards[index], grad, blocks)

    @staticmethod
    def _add(places: Views, what: Views) -> None:
        if places:
            torch._foreach_add_(places, what)


def _whole(comm: Comm, shards: Shards) -> list[Fused]:
    """Sums of the tensors that every rank holds whole, as in segment mode."""
    tensors = shards.model.tensors
    order = [
        launch
        for launch in launches(shards.plan, shards.model, elements=grad_elements(shards))
        if tensors[launch.pieces[0].tensor].kind is None
    ]
    return [f for launch in order for f in fused(comm, shards, launch)]


def _shapes(model: ModelUnits, index: int, blocks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the spans of some blocks, the same on whichever rank holds them."""
    t = model.tensors[index]
    assert t.kind is not None
    shard = Shard(index, t, model.counts[t.kind], blocks)
    return [(*t.shape[: t.dim], b - a, *t.shape[t.dim + 1 :]) for a, b in shard.spans(blocks)]


def _check_one_type(shards: Shards) -> None:
    kinds = {(grad_dtype(p), p.device) for p in shards.params if p.requires_grad}
    if len(kinds) > 1:
        raise ModelMismatch(
            f"reshard mode needs one element type, the model has {len(kinds)}; use segments"
        )


def _buffer(shards: Shards, numel: int) -> torch.Tensor:
    like = next((p for p in shards.params if p.requires_grad), shards.params[0])
    return torch.zeros(numel, dtype=grad_dtype(like), device=like.device)


def _narrow(shard: Shard, tensor: torch.Tensor, blocks: tuple[int, ...]) -> Views:
    return [tensor.narrow(shard.spec.dim, a, b - a) for a, b in shard.spans(blocks)]


def _places(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Views:
    """Consecutive views of a buffer."""
    sizes = [_numel(shape) for shape in shapes]
    parts = torch.split(flat, sizes) if sizes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
