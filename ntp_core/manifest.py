"""What a checkpoint is, in numbers: which file holds which blocks of which plane, and fingerprints.

A manifest knows tensors and blocks, never ranks or shares: a job of any layout can read it. Its
text is canonical JSON that carries a digest of itself, so any byte that is not as it was written is
refused. Nothing in a manifest is believed: it may come from another model, or from an enemy.

A run (first, stop, stride) of a tensor's blocks is stored as one array named by `entry_name`: the
blocks ascending along the cut dim, part after part (as a rank holds them, `ntp_core.units`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ntp_core.elements import DTYPE_BYTES
from ntp_core.errors import CheckpointError
from ntp_core.units import ModelUnits

FORMAT = "ntp-checkpoint"
VERSION = 1
ALGORITHM = "splitmix64-separable"
MAX_BYTES = 256 << 20
"""Largest manifest read: 16 bytes a block and plane, so some ten million blocks."""
MAX_NUMBER = 1 << 53
MAX_SEED = (1 << 63) - 1

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.safetensors")
_PLANE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of the checkpoint's folder; `header_digest` is the sha256 of its header, hex."""

    name: str
    size_bytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks first, first + stride, ... below stop of one tensor, in file number `file`."""

    first: int
    stop: int
    stride: int
    file: int

    @property
    def blocks(self) -> range:
        """The blocks, ascending."""
        return range(self.first, self.stop, self.stride)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One plane of one tensor: element type, a fingerprint for each block, where the blocks are."""

    dtype: str
    fingerprints: tuple[int, ...]
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """One plane; `tensors` in the order of the model's. Plane p's fingerprints have key + p."""

    name: str
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: last committed step of the job.
        optimizer_steps: updates that the optimizer's state has seen.
        seed: of data, dropout and initial weights: all draws are functions of it, of the step and
            of logical numbers, so that no generator's state needs to be kept.
        plan_digest, epoch: of the plan that was in force when it was saved.
        key: of the fingerprints.
        config: the job's own JSON, given back as it was.
    """

    step: int
    optimizer_steps: int
    seed: int
    plan_digest: str
    epoch: int
    key: int
    model: ModelUnits
    files: tuple[PartFile, ...]
    planes: tuple[StoredPlane, ...]
    config: dict[str, Any] = field(default_factory=dict)

    def plane(self, name: str) -> tuple[int, StoredPlane]:
        """(number, plane) of that name. Raises CheckpointError when there is none."""
        for number, plane in enumerate(self.planes):
            if plane.name == name:
                return number, plane
        raise CheckpointError(
            f"the checkpoint has no plane '{name}', only {[p.name for p in self.planes]}; "
            "load it with the optimizer and parameter type it was saved with"
        )

    def check_model(self, model: ModelUnits) -> None:
        """Raises CheckpointError naming the first difference unless it is of this model."""
        have, want = self.model.to_json(), model.to_json()
        if have == want:
            return
        what = f"units {have['counts']}, here {want['counts']}"
        for a, b in zip(have["tensors"], want["tensors"], strict=False):
            if a != b:
                what = f"tensor {a}, here {b}"
                break
        raise CheckpointError(f"the checkpoint is of another model: it has {what}")

    def to_text(self) -> str:
        """Canonical text; `from_text` takes no other."""
        return _render(self._body())

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Inverse of `to_text`.

        Raises:
            CheckpointError: saying what is wrong with the text.
        """
        body = _open(text)
        try:
            manifest = cls._from_body(body)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"not a manifest: {str(error)[:200]!r}") from error
        _check(manifest)
        return manifest

    def _body(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            "seed": self.seed,
            "plan_digest": self.plan_digest,
            "epoch": self.epoch,
            "fingerprint": {"algorithm": ALGORITHM, "key": self.key},
            "model": self.model.to_json(),
            "config": self.config,
            "files": [[f.name, f.size_bytes, f.header_digest] for f in self.files],
            "planes": [
                {
                    "name": p.name,
                    "tensors": [
                        {
                            "dtype": t.dtype,
                            "fingerprints": "".join(f"{v:016x}" for v in t.fingerprints),
                            "runs": [[r.first, r.stop, r.stride, r.file] for r in t.runs],
                        }
                        for t in p.tensors
                    ],
                }
                for p in self.planes
            ],
        }

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        if body["fingerprint"]["algorithm"] != ALGORITHM:
            raise CheckpointError(
                f"fingerprints are of algorithm {body['fingerprint']['algorithm']!r}, "
                f"this version knows {ALGORITHM!r}"
            )
        if not isinstance(body["config"], dict):
            raise CheckpointError("config is not an object")
        return cls(
            step=_number(body["step"], "step"),
            optimizer_steps=_number(body["optimizer_steps"], "optimizer_steps"),
            seed=_number(body["seed"], "seed", MAX_SEED),
            plan_digest=_text(body["plan_digest"]),
            epoch=_number(body["epoch"], "epoch"),
            key=_number(body["fingerprint"]["key"], "key", MAX_SEED),
            model=ModelUnits.from_json(body["model"]),
            config=body["config"],
            files=tuple(_file(f) for f in body["files"]),
            planes=tuple(_plane(p) for p in body["planes"]),
        )


def entry_name(plane: str, tensor: str, run: BlockRun) -> str:
    """Name of a run's array inside its file."""
    return f"{plane}|{tensor}|{run.first}:{run.stop}:{run.stride}"


def runs_of_blocks(blocks: Sequence[int], longest: int) -> list[range]:
    """Ascending blocks as runs of equal stride, none of more than `longest` blocks.

    >>> runs_of_blocks([0, 2, 4, 5, 6, 9], 9)
    [range(0, 5, 2), range(5, 7), range(9, 10)]
    >>> runs_of_blocks([0, 2, 4, 6, 8], 2)
    [range(0, 3, 2), range(4, 7, 2), range(8, 9)]
    """
    runs = []
    start = 0
    while start < len(blocks):
        stop = start + 1
        stride = blocks[stop] - blocks[start] if stop < len(blocks) else 1
        while (
            stop < len(blocks)
            and blocks[stop] - blocks[stop - 1] == stride
            and stop - start < longest
        ):
            stop += 1
        if stop == start + 1:
            stride = 1
        runs.append(range(blocks[start], blocks[stop - 1] + 1, stride))
        start = stop
    return runs


def num_blocks(model: ModelUnits) -> list[int]:
    """Blocks of each tensor; one that units do not cut is one."""
    return [1 if t.kind is None else model.counts[t.kind] // t.sharing for t in model.tensors]


def _render(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":"{FORMAT}","version":{VERSION},"digest":"{digest}","body":{text}}}\n'


def _open(text: str) -> dict[str, Any]:
    """The body of a manifest's text, after format, version and digest."""
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"a manifest of {len(text)} characters; at most {MAX_BYTES} are read")
    try:
        head = json.loads(text, parse_constant=_refuse_constant)
        kind, version, body = head["format"], head["version"], head["body"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"not a manifest: {str(error)[:200]}") from None
    if kind != FORMAT:
        raise CheckpointError(f"not a manifest: its format is {str(kind)[:80]!r}, not {FORMAT!r}")
    if version != VERSION:
        raise CheckpointError(
            f"a manifest of version {str(version)[:20]!r}; this program reads {VERSION}. "
            "Load it with the version of the program that wrote it."
        )
    try:
        is_whole = isinstance(body, dict) and _render(body) == text
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError("the manifest is damaged: its digest is not that of its content")
    return dict(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _number(value: object, name: str, most: int = MAX_NUMBER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise CheckpointError(f"{name} = {str(value)[:40]}; a whole number 0 to {most} is due")
    return value


def _text(value: object, shape: Callable[[str], object] = bool) -> str:
    if not isinstance(value, str) or len(value) > MAX_BYTES or not shape(value):
        raise CheckpointError(f"{str(value)[:80]!r} in the manifest is not a name that can be")
    return value


def _file(data: Iterable[Any]) -> PartFile:
    name, size, digest = data
    return PartFile(
        _text(name, _FILE_NAME.fullmatch), _number(size, "size"), _text(digest, _HEX.fullmatch)
    )


def _plane(data: dict[str, Any]) -> StoredPlane:
    tensors = []
    for t in data["tensors"]:
        hexes = t["fingerprints"]
        if not isinstance(hexes, str) or not _HEX.fullmatch(hexes) or len(hexes) % 16:
            raise CheckpointError(f"fingerprints {str(hexes)[:40]!r} are not 16 hex digits each")
        values = tuple(int(hexes[i : i + 16], 16) for i in range(0, len(hexes), 16))
        runs = tuple(BlockRun(*(_number(n, "run") for n in run)) for run in t["runs"])
        dtype = _text(t["dtype"], DTYPE_BYTES.__contains__)
        tensors.append(StoredTensor(dtype, values, runs))
    return StoredPlane(_text(data["name"], _PLANE_NAME.fullmatch), tuple(tensors))


def _check(manifest: Manifest) -> None:
    names = [f.name for f in manifest.files]
    planes = [p.name for p in manifest.planes]
    for what, listed in (("files", names), ("planes", planes)):
        if len(set(listed)) != len(listed):
            raise CheckpointError(f"the manifest lists {what} twice: {listed[:20]}")
    for t in manifest.model.tensors:
        if not 0 <= t.numel <= MAX_NUMBER:
            raise CheckpointError(f"tensor '{t.name[:80]}' of {str(t.numel)[:40]} elements")
    counts = num_blocks(manifest.model)
    for plane in manifest.planes:
        if len(plane.tensors) != len(counts):
            raise CheckpointError(
                f"plane '{plane.name}' has {len(plane.tensors)} tensors, the model {len(counts)}"
            )
        for spec, count, stored in zip(manifest.model.tensors, counts, plane.tensors, strict=True):
            where = f"plane '{plane.name}', tensor '{spec.name}'"
            if len(stored.fingerprints) != count:
                raise CheckpointError(
                    f"{where}: {len(stored.fingerprints)} fingerprints for {count} blocks"
                )
            _check_runs(stored.runs, count, len(names), where)


def _check_runs(runs: Sequence[BlockRun], count: int, num_files: int, where: str) -> None:
    """Every block in one run; work is bounded by `count`, whatever the numbers are."""
    seen = bytearray(count)
    for r in runs:
        if r.stride < 1 or not r.first < r.stop <= count or r.file >= num_files:
            raise CheckpointError(f"{where}: {r} is outside {count} blocks or {num_files} files")
        for block in r.blocks:
            if seen[block]:
                raise CheckpointError(f"{where}: block {block} is stored twice")
            seen[block] = 1
    if not all(seen):
        raise CheckpointError(f"{where}: block {seen.index(0)} is not stored")
