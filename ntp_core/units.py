"""Units: the smallest things that move between ranks, and how they lie inside tensors.

A unit owns matching slices of several tensors, so that a rank that holds it can compute with it
alone: one KV head with its query heads (rows of q, k, v; columns of o), one block of FFN columns
(rows of gate and up; columns of down), one block of vocab rows. Units of one kind are numbered from
0 in the whole model's order; any set of them may live on any rank (arXiv 2504.06095, section 4).

This module knows numbers only. It does no I/O and imports no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ntp_core.errors import ModelMismatch
from ntp_core.inbound.ranges import check_flag, check_whole

MAX_SIZE = 1 << 48  # elements along one dim; no array is longer
MAX_DIMS = 8


class UnitKind(StrEnum):
    """What a unit is made of."""

    ATTENTION = "attention"
    MLP = "mlp"
    VOCAB = "vocab"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One logical tensor and how units cut it.

    Attributes:
        name: the parameter's name in the whole model.
        shape: logical shape.
        kind: which units cut it, or None for a tensor that every rank holds whole.
        layer: index of its layer, or -1 outside layers.
        dim: the dim that is cut.
        parts: number of equal stacked parts along `dim` (3 for fused QKV, 2 for fused gate-up);
            a unit owns one block in each part.
        sharing: number of consecutive units that use the same block (query heads of one KV head).
            Ranks that hold any of them hold a copy of the block.
        partial_grad: of a tensor that every rank holds whole: True when each rank's gradient covers
            only its own units (norms of single heads), so that they add up over the replica; False
            when all ranks of a replica compute the same, whole gradient.
    """

    name: str
    shape: tuple[int, ...]
    kind: UnitKind | None = None
    layer: int = -1
    dim: int = 0
    parts: int = 1
    sharing: int = 1
    partial_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnits:
    """All tensors of a model and how many units of each kind it has.

    Attributes:
        counts: kind -> number of units (per layer, where the kind lives in layers).
        tensors: every parameter once; a tied weight appears under its first name.
        dtype_bytes: size of one element of the parameters.
    """

    counts: dict[UnitKind, int]
    tensors: tuple[TensorSpec, ...]
    dtype_bytes: int = 4

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ModelMismatch(f"tensors listed twice: {twice}. List a tied weight once.")
        for t in self.tensors:
            self._check(t)

    def _check(self, t: TensorSpec) -> None:
        if t.kind is None:
            return
        if not 0 <= t.dim < len(t.shape) or t.parts < 1 or t.sharing < 1:
            raise ModelMismatch(
                f"tensor '{t.name}' of shape {t.shape}: dim {t.dim}, {t.parts} parts, sharing "
                f"{t.sharing}; the dim must exist, the others be 1 at least"
            )
        if t.kind not in self.counts:
            raise ModelMismatch(f"tensor '{t.name}' is cut by {t.kind} units, but none are counted")
        num_units = self.counts[t.kind]
        if num_units % t.sharing or t.shape[t.dim] % t.parts:
            raise ModelMismatch(
                f"tensor '{t.name}': {num_units} {t.kind} units do not divide by sharing "
                f"{t.sharing}, or dim {t.dim} of size {t.shape[t.dim]} by {t.parts} parts"
            )
        block = block_size(t, num_units)
        blocks = num_units // t.sharing
        if block * (blocks - 1) >= t.shape[t.dim] // t.parts:
            raise ModelMismatch(
                f"tensor '{t.name}': {blocks} blocks of {block} leave the last unit empty: "
                f"dim {t.dim} has {t.shape[t.dim] // t.parts}; use fewer {t.kind} units"
            )

    def tensor(self, name: str) -> TensorSpec:
        """The tensor of that name. Raises ModelMismatch when there is none."""
        for t in self.tensors:
            if t.name == name:
                return t
        raise ModelMismatch(f"no tensor '{name}' in this model")

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "counts": {str(k): n for k, n in self.counts.items()},
            "dtype_bytes": self.dtype_bytes,
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "kind": None if t.kind is None else str(t.kind),
                    "layer": t.layer,
                    "dim": t.dim,
                    "parts": t.parts,
                    "sharing": t.sharing,
                    "partial_grad": t.partial_grad,
                }
                for t in self.tensors
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelUnits:
        """Inverse of `to_json`. Raises ModelMismatch on data of another form."""
        try:
            tensors = tuple(_tensor_from_json(t) for t in data["tensors"])
            counts = {
                UnitKind(k): check_whole(f"counts of {k}", n, 1, MAX_SIZE, ModelMismatch)
                for k, n in data["counts"].items()
            }
            dtype_bytes = check_whole("dtype_bytes", data["dtype_bytes"], 1, 64, ModelMismatch)
        except ModelMismatch as error:
            raise ModelMismatch(f"not a description of a model's units: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelMismatch(f"not a description of a model's units: {error!r}") from error
        return cls(counts=counts, tensors=tensors, dtype_bytes=dtype_bytes)


def _tensor_from_json(data: dict[str, Any]) -> TensorSpec:
    name, shape = data["name"], tuple(data["shape"])
    kind = None if data["kind"] is None else UnitKind(data["kind"])
    if not isinstance(name, str) or len(shape) > MAX_DIMS:
        raise ModelMismatch(f"tensor {name!r} of {len(shape)} dims; give a name and 8 dims at most")
    least = 0 if kind is None else 1
    return TensorSpec(
        name=name,
        shape=tuple(_whole(name, "shape", size, least, MAX_SIZE) for size in shape),
        kind=kind,
        layer=_whole(name, "layer", data["layer"], -1, MAX_SIZE),
        dim=_whole(name, "dim", data["dim"], 0, max(0, len(shape) - 1)),
        parts=_whole(name, "parts", data["parts"], 1, MAX_SIZE),
        sharing=_whole(name, "sharing", data["sharing"], 1, MAX_SIZE),
        partial_grad=check_flag("partial_grad", data.get("partial_grad", False), ModelMismatch),
    )


def _whole(tensor: str, field: str, value: object, least: int, most: int) -> int:
    return check_whole(f"tensor {tensor!r}: {field}", value, least, most, ModelMismatch)


def block_size(t: TensorSpec, num_units: int) -> int:
    """Rows (or columns) of one block along the cut dim; the last block may be shorter."""
    blocks = num_units // t.sharing
    return -(-(t.shape[t.dim] // t.parts) // blocks)


def block_slices(t: TensorSpec, num_units: int, block: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) along the cut dim of block number `block`, one pair for each part.

    >>> qkv = TensorSpec(name="qkv", shape=(24, 8), kind=UnitKind.ATTENTION, parts=3)
    >>> block_slices(qkv, 4, 1)
    ((2, 4), (10, 12), (18, 20))
    """
    part = t.shape[t.dim] // t.parts
    size = block_size(t, num_units)
    start, stop = block * size, min((block + 1) * size, part)
    return tuple((p * part + start, p * part + stop) for p in range(t.parts))


def block_numel(t: TensorSpec, num_units: int, block: int) -> int:
    """Number of elements in one block, all parts together."""
    rows = sum(stop - start for start, stop in block_slices(t, num_units, block))
    return rows * (t.numel // t.shape[t.dim])


def blocks_of_units(t: TensorSpec, units: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that a rank needs for these units, ascending, each once."""
    return tuple(sorted({u // t.sharing for u in units}))


def local_slices(
    t: TensorSpec, num_units: int, blocks: tuple[int, ...]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Where each held block lies in the rank's own tensor: block -> [start, stop) for each part.

    A rank keeps its blocks in ascending order, part after part.

    >>> qkv = TensorSpec(name="qkv", shape=(24, 8), kind=UnitKind.ATTENTION, parts=3)
    >>> local_slices(qkv, 4, (1, 3))
    {1: ((0, 2), (4, 6), (8, 10)), 3: ((2, 4), (6, 8), (10, 12))}
    """
    sizes = [
        block_slices(t, num_units, b)[0][1] - block_slices(t, num_units, b)[0][0] for b in blocks
    ]
    part = sum(sizes)
    places: dict[int, tuple[tuple[int, int], ...]] = {}
    start = 0
    for block, size in zip(blocks, sizes, strict=True):
        places[block] = tuple((p * part + start, p * part + start + size) for p in range(t.parts))
        start += size
    return places


def local_shape(t: TensorSpec, num_units: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the rank's own tensor when it holds these blocks."""
    size = sum(b - a for block in blocks for a, b in block_slices(t, num_units, block))
    return tuple(size if d == t.dim else s for d, s in enumerate(t.shape))
