"""Gradient sync by segments: each group of owners sums its pieces in one fused buffer per bucket.

All launches follow one global order (bucket, then ranks), so that communicators cannot wait for
each other in a circle. Tensors that every rank holds whole (norm gains) are counted once per
replica: its first rank adds them, the others add zero, and one sum over the world gives all the
same bits. Where each rank's gradient of such a tensor covers its own units only, all ranks add.

Buffers are allocated once per plan. A gradient that lies in one buffer whole is not copied back: it
becomes a view of the buffer. A group that sums one contiguous range of one gradient uses no buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ntp_core.errors import ModelMismatch
from ntp_core.runtime.comm import Comm, Pending, Ranks
from ntp_core.runtime.shards import Shards, grad_dtype, grad_elements
from ntp_core.segments import DEFAULT_BUCKET_BYTES, Launch, launches

Span = tuple[int, int]  # local start, local stop along the cut dim


class Slice:
    """What one launch sums of one gradient: spans along the cut dim, in canonical order.

    Attributes:
        param: the parameter whose gradient it is.
        shapes: of the spans, in the order in which they lie in the buffer.
        is_whole: the spans together are the whole gradient, in its own order.
        counts: False: this rank adds zeros, another one of its replica speaks.
    """

    def __init__(self, param: nn.Parameter, dim: int, spans: list[Span], *, counts: bool) -> None:
        self.param = param
        self.counts = counts
        self._dim = dim
        if dim == 0:  # rows: flat order is the same however touching spans are joined
            spans = list(_joined(spans))
        self._spans = spans
        size = param.shape[dim]
        self.shapes = [(*param.shape[:dim], b - a, *param.shape[dim + 1 :]) for a, b in spans]
        self.is_whole = spans == [(0, size)]
        self.is_contiguous = len(spans) == 1 and (dim == 0 or self.is_whole)

    def views(self) -> list[torch.Tensor]:
        """The spans inside the gradient; one that is missing is made, of zeros."""
        grad = self.param.grad
        if grad is None:
            grad = self.param.grad = torch.zeros_like(self.param, dtype=grad_dtype(self.param))
        return [grad.narrow(self._dim, a, b - a) for a, b in self._spans]


class Fused:
    """One launch on this rank: the slices it sums, and the buffer it sums them in.

    Attributes:
        params: parameters whose gradients must be complete before `start`.
    """

    def __init__(self, comm: Comm, ranks: Ranks, slices: list[Slice]) -> None:
        self._comm = comm
        self._ranks = ranks
        self._slices = slices
        self.params = [s.param for s in slices]
        self._straight = len(slices) == 1 and slices[0].is_contiguous
        self._flat: torch.Tensor | None = None
        self._places: list[list[torch.Tensor]] = []  # of each slice's spans, inside the buffer
        self._back: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._pending: Pending | None = None

    def start(self) -> None:
        """Begin the sum; its gradients must be complete."""
        assert self._pending is None
        if self._straight:
            (view,) = self._slices[0].views()
            if view.is_contiguous():
                if not self._slices[0].counts:
                    view.zero_()
                self._pending = self._comm.start_all_reduce(view, self._ranks)
                return
        self._pending = self._comm.start_all_reduce(self._stage(), self._ranks)

    def finish(self) -> None:
        """Wait for the sum and bring it into the gradients."""
        assert self._pending is not None
        self._comm.finish(self._pending)
        self._pending = None
        for views, places in self._back:
            torch._foreach_copy_(views, places)
        self._back.clear()

    def _stage(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._allocate()
        for s, places in zip(self._slices, self._places, strict=True):
            if s.is_whole:
                _take(s, places[0])
                continue
            views = s.views()
            torch._foreach_copy_(places, views)
            self._back.append((views, places))
        return self._flat

    def _allocate(self) -> torch.Tensor:
        like = self._slices[0].param
        numel = sum(_numel(shape) for s in self._slices for shape in s.shapes)
        flat = torch.empty(numel, dtype=grad_dtype(like), device=like.device)
        start = 0
        for s in self._slices:
            places = []
            for shape in s.shapes:
                places.append(flat[start : start + _numel(shape)].view(shape))
                start += _numel(shape)
            self._places.append(places)
        return flat


class SegmentSync:
    """Sync by segments, at the end of backward or while it runs. Build a new one for each plan.

    With overlap a launch starts as soon as its gradients are complete and all launches before it
    have started: the order is the same on all ranks, whatever order their gradients come in. A
    gradient that never comes (its parameter was not used) holds the rest back until `run`.

    With one replica nothing overlaps: its sums may use the group in which the layers, too, sum.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Shards,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        overlap: bool = False,
    ) -> None:
        order = launches(shards.plan, shards.model, bucket_bytes, grad_elements(shards))
        self._fused = [f for launch in order for f in fused(comm, shards, launch)]
        self._started = 0
        self._is_armed = False
        self._missing: list[int] = []  # gradients that each launch still waits for
        self._users: dict[nn.Parameter, list[int]] = {}  # launches that sum a parameter's gradient
        self._hooks: list[RemovableHandle] = []
        if overlap and len(shards.plan.replicas) > 1:
            self._watch()

    def arm(self) -> None:
        """The next backward completes the step's gradients."""
        self._missing = [len(f.params) for f in self._fused]
        self._started = 0
        self._is_armed = True

    def run(self) -> None:
        """Replace each gradient by its sum over replicas."""
        self._is_armed = False
        self._start_until(len(self._fused))
        for f in self._fused:
            f.finish()
        self._started = 0

    def close(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self) -> None:
        for number, f in enumerate(self._fused):
            for param in f.params:
                self._users.setdefault(param, []).append(number)
        for param in self._users:
            register = param.register_post_accumulate_grad_hook
            self._hooks.append(register(self._is_complete))  # type: ignore[no-untyped-call]

    def _is_complete(self, param: torch.Tensor) -> None:
        """A parameter's gradient is there."""
        if not self._is_armed:
            return
        for number in self._users[cast(nn.Parameter, param)]:
            self._missing[number] -= 1
            if self._missing[number] < 0:
                raise ModelMismatch(
                    f"a gradient of shape {tuple(param.shape)} came twice in one backward, after "
                    "its sum may have begun; switch overlap off for this model"
                )
        stop = self._started
        while stop < len(self._fused) and not self._missing[stop]:
            stop += 1
        self._start_until(stop)

    def _start_until(self, stop: int) -> None:
        for f in self._fused[self._started : stop]:
            f.start()
        self._started = max(self._started, stop)


def fused(comm: Comm, shards: Shards, launch: Launch) -> Iterator[Fused]:
    """This rank's part of a launch; none when it takes no part."""
    if shards.rank not in launch.ranks:
        return
    is_first = shards.plan.place(shards.rank)[1] == 0
    slices = []
    for piece in launch.pieces:
        shard, param = shards.shards[piece.tensor], shards.params[piece.tensor]
        counts = shard.spec.kind is not None or shard.spec.partial_grad or is_first
        slices.append(Slice(param, shard.spec.dim, shard.spans(piece.blocks), counts=counts))
    yield Fused(comm, launch.ranks, slices)


def _take(s: Slice, place: torch.Tensor) -> None:
    """Copy a whole gradient into its place, and let the place be the gradient."""
    grad = s.param.grad
    if grad is None or not s.counts:
        place.zero_()
    elif grad is not place:  # it is when gradients are zeroed in place between steps
        place.copy_(grad)
    s.param.grad = place


def _joined(spans: list[Span]) -> Iterator[Span]:
    """Neighbours that touch, as one."""
    start = stop = None
    for a, b in spans:
        if a == stop:
            stop = b
            continue
        if start is not None and stop is not None:
            yield start, stop
        start, stop = a, b
    if start is not None and stop is not None:
        yield start, stop


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
