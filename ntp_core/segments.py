"""Segments: how uneven replicas sum their gradients without resharding.

Cut the units at the union of all replicas' boundaries. Every segment then has exactly one owner in
each replica; those owners form a group, and one all-reduce in that group sums the segment. No bytes
are staged on other ranks, and replicas may have any mix of degrees.

Blocks that several units share (a KV head copied to each rank that holds some of its query heads)
are held by more than one rank of a replica. Each holder's gradient covers its own query heads, so
the group of such a block is all its holders: one sum adds each contribution once and reaches every
copy.

Tensors that every rank holds whole are summed over the world, in buckets after all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ntp_core.elements import Elements
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec, UnitKind, block_numel

DEFAULT_BUCKET_BYTES = 25 << 20
"""As in torch's DistributedDataParallel: large enough for bandwidth, small enough to overlap."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Units [start, stop) of one kind and layer, and their owner's global rank in each replica."""

    start: int
    stop: int
    owners: Ranks


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one tensor that one group sums; `tensor` indexes the model's tensors."""

    tensor: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """Ranks and all pieces they sum together, in one fixed order.

    The ranks stand replica by replica, in each by tp_rank; one per replica where units do not share
    blocks.
    """

    ranks: Ranks
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One all-reduce of a step: a group's pieces of one element type that lie in one bucket."""

    bucket: int
    ranks: Ranks
    dtype: str
    pieces: tuple[Piece, ...]


def unit_owners(plan: Plan, tensor: TensorSpec) -> list[list[int]]:
    """For each replica the global rank that owns each unit of this tensor's kind and layer."""
    assert tensor.kind is not None
    owners = []
    for r in plan.replicas:
        places = r.layout(tensor.kind, tensor.layer).owners(plan.counts[tensor.kind])
        owners.append([r.ranks[p] for p in places])
    return owners


def block_holders(plan: Plan, tensor: TensorSpec) -> list[Ranks]:
    """For each block of a cut tensor all ranks that hold it, replica by replica, by tp_rank.

    >>> from ntp_core.plan import Layout, ReplicaPlan
    >>> K = UnitKind.ATTENTION
    >>> r = ReplicaPlan(ranks=(0, 1), layouts={K: Layout.contiguous((3, 1))}, batch=1)
    >>> kv = TensorSpec(name="k", shape=(2, 1), kind=K, sharing=2)
    >>> block_holders(Plan.build({K: 4}, [r]), kv)
    [(0,), (0, 1)]
    """
    owners, n = unit_owners(plan, tensor), tensor.sharing
    if n == 1:
        return list(zip(*owners, strict=True))
    places = [{g: p for p, g in enumerate(r.ranks)} for r in plan.replicas]
    return [
        tuple(
            g
            for of_unit, place in zip(owners, places, strict=True)
            for g in sorted(set(of_unit[start : start + n]), key=place.__getitem__)
        )
        for start in range(0, len(owners[0]), n)
    ]


def segments(plan: Plan, tensor: TensorSpec) -> tuple[Segment, ...]:
    """The segments of this tensor's kind and layer, ascending.

    >>> from ntp_core.plan import Layout, ReplicaPlan
    >>> K = UnitKind.MLP
    >>> def rep(ranks, shares):
    ...     return ReplicaPlan(ranks=ranks, layouts={K: Layout.contiguous(shares)}, batch=1)
    >>> plan = Plan.build({K: 6}, [rep((0, 1, 2), (2, 2, 2)), rep((3, 4), (3, 3))])
    >>> [(s.start, s.stop, s.owners) for s in segments(plan, TensorSpec(
    ...     name="w", shape=(6, 1), kind=K))]
    [(0, 2, (0, 3)), (2, 3, (1, 3)), (3, 4, (1, 4)), (4, 6, (2, 4))]
    """
    columns = list(zip(*unit_owners(plan, tensor), strict=True))
    found: list[Segment] = []
    for u, owners in enumerate(columns):
        if found and found[-1].owners == owners:
            found[-1] = Segment(found[-1].start, u + 1, owners)
        else:
            found.append(Segment(u, u + 1, owners))
    return tuple(found)


def sync_groups(
    plan: Plan, model: ModelUnits, tensors: Iterable[int] | None = None
) -> tuple[SyncGroup, ...]:
    """All groups with what each sums, sorted by their ranks: one global launch order.

    Args:
        tensors: indices of the tensors to sum, in the order of the pieces; None: all.

    Tensors without units are not here: every rank holds them whole.
    """
    chosen = range(len(model.tensors)) if tensors is None else tensors
    return _Cells(plan).groups(model, chosen)


def whole_tensors(plan: Plan, model: ModelUnits) -> tuple[int, ...]:
    """Tensors without units whose gradients must be summed over the world.

    With one replica only those whose gradient is partial on each rank: others are whole already.
    """
    return tuple(
        i
        for i, t in enumerate(model.tensors)
        if t.kind is None and (t.partial_grad or len(plan.replicas) > 1)
    )


def launches(
    plan: Plan,
    model: ModelUnits,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    elements: Elements | None = None,
) -> tuple[Launch, ...]:
    """Every all-reduce of a step in the order in which all ranks launch theirs.

    Buckets run against the order in which the model lists its tensors, which is about the order in
    which backward finishes them; in a bucket groups are sorted by ranks, then by element type.
    Groups of one are left out.

    Args:
        bucket_bytes: a bucket is closed once an even share of the smallest replica has this many.
        elements: of the gradients; None: all of the model's size.
    """
    elements = elements or Elements.of_model(model)
    degree = min(len(r.ranks) for r in plan.replicas)
    trained = [i for i in reversed(range(len(model.tensors))) if elements.is_summed(i)]
    cut = [i for i in trained if model.tensors[i].kind is not None]
    over_world = set(whole_tensors(plan, model))
    found: list[Launch] = []
    number = 0
    cells = _Cells(plan)
    for tensors in _buckets(model, cut, bucket_bytes * degree, elements):
        for group in cells.groups(model, tensors):
            found += _by_dtype(number, group.ranks, group.pieces, elements)
        number += 1
    whole = [i for i in trained if i in over_world]
    for tensors in _buckets(model, whole, bucket_bytes, elements):
        found += _by_dtype(number, plan.ranks, [Piece(i, (0,)) for i in tensors], elements)
        number += 1
    return tuple(launch for launch in found if len(launch.ranks) > 1)


def launch_bytes(launch: Launch, model: ModelUnits, elements: Elements | None = None) -> int:
    """Bytes that each rank of a launch puts into its sum."""
    elements = elements or Elements.of_model(model)
    total = 0
    for piece in launch.pieces:
        t = model.tensors[piece.tensor]
        numel = t.numel
        if t.kind is not None:
            numel = sum(block_numel(t, model.counts[t.kind], b) for b in piece.blocks)
        total += elements.num_bytes(piece.tensor, numel)
    return total


class _Cells:
    """Blocks by the group that sums them; worked out once for tensors that are cut alike."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._own = {key for r in plan.replicas for key in r.overrides}
        self._known: dict[tuple[UnitKind, int, int], dict[Ranks, tuple[int, ...]]] = {}

    def groups(self, model: ModelUnits, tensors: Iterable[int]) -> tuple[SyncGroup, ...]:
        """Groups of some tensors with their pieces, sorted by ranks; whole tensors are left out."""
        pieces: dict[Ranks, list[Piece]] = {}
        for index in tensors:
            if model.tensors[index].kind is not None:
                for ranks, blocks in self.of(model.tensors[index]).items():
                    pieces.setdefault(ranks, []).append(Piece(index, blocks))
        return tuple(SyncGroup(ranks, tuple(pieces[ranks])) for ranks in sorted(pieces))

    def of(self, t: TensorSpec) -> dict[Ranks, tuple[int, ...]]:
        """Group -> its blocks of the tensor, ascending."""
        assert t.kind is not None
        layer = t.layer if (t.kind, t.layer) in self._own else -1
        key = (t.kind, t.sharing, layer)
        if key not in self._known:
            cells: dict[Ranks, list[int]] = {}
            for block, ranks in enumerate(block_holders(self._plan, t)):
                cells.setdefault(ranks, []).append(block)
            self._known[key] = {ranks: tuple(blocks) for ranks, blocks in cells.items()}
        return self._known[key]


def _by_dtype(
    bucket: int, ranks: Ranks, pieces: Iterable[Piece], elements: Elements
) -> list[Launch]:
    """One launch for each element type among the pieces: a sum has one."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(elements.kind_of(piece.tensor), []).append(piece)
    return [Launch(bucket, ranks, dtype, tuple(found[dtype])) for dtype in sorted(found)]


def _buckets(
    model: ModelUnits, tensors: Iterable[int], limit: int, elements: Elements
) -> Iterator[list[int]]:
    """Consecutive tensors until they have `limit` bytes together."""
    bucket: list[int] = []
    size = 0
    for i in tensors:
        bucket.append(i)
        size += elements.num_bytes(i, model.tensors[i].numel)
        if size >= limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
