"""Saves a job's state once, whatever its layout, and loads it into any other.

Every rank writes the blocks it keeps for the job, reads the blocks it holds, and checks each block
after it is in place against the fingerprint that was taken before it was written. All ranks come to
the same verdict; a refused checkpoint changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ntp_core.errors import CheckpointError
from ntp_core.manifest import Manifest
from ntp_core.runtime.checkpoint.agree import agreed, from_first
from ntp_core.runtime.checkpoint.folder import MANIFEST, CheckpointFolder, Disk
from ntp_core.runtime.checkpoint.load import read_plane, read_text
from ntp_core.runtime.checkpoint.parts import PART_BYTES, PartReader, PartWriter
from ntp_core.runtime.checkpoint.save import (
    Runs,
    check_copies,
    gather,
    stored_planes,
    write_planes,
)
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.optim.planes import (
    PARAM,
    Plane,
    adopt_state,
    optimizer_steps,
    planes_of,
    shared_fingerprints,
    state_dtype,
    state_of,
)
from ntp_core.runtime.parallel_model import ParallelModel

T = TypeVar("T")

KEY = 0x6E7470
"""Of a checkpoint's fingerprints; written into it, so any other would do as well."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint: where it is, and the bytes that this rank wrote into it."""

    path: Path
    bytes_written: int


class Checkpoints:
    """One rank's part in saving and loading. All ranks build it alike, over one shared folder.

    Args:
        keep: how many checkpoints stay; the oldest beyond that are removed after a save.
        part_bytes: largest file, but for one whose only block is larger. A save holds about this
            much in memory beside the state itself.
        disk: the file operations; tests put their own in.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int = 2,
        part_bytes: int = PART_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self.folder = CheckpointFolder(folder, disk)
        self._comm = comm
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._part_bytes = part_bytes
        self._index = BlockIndex(model.units)

    def save(self, step: int, seed: int, config: dict[str, Any] | None = None) -> Saved:
        """Save the state after `step`. Every rank takes part, between steps.

        Args:
            seed: of data, dropout and initial weights.
            config: JSON of the job's own, given back by `load`.

        Raises:
            CheckpointError: on every rank, when replicas differ or any rank could not write; the
                older checkpoints stay as they are.
        """
        comm, shards = self._comm, self._model.shards
        planes = planes_of(shards, self._optimizer)
        steps = optimizer_steps(comm, self._optimizer)
        values = shared_fingerprints(comm, planes, self._index, seed=KEY)
        check_copies(planes, values, self._index, self._model.units)  # the same on every rank
        draft = self.folder.draft(step)
        writer = PartWriter(draft, comm.rank, self.folder.disk, self._part_bytes)
        runs = self._write(step, planes, writer)
        all_files, all_runs = gather(comm, writer.files, runs)

        def publish() -> str:
            manifest = Manifest(
                step=step,
                optimizer_steps=steps,
                seed=seed,
                plan_digest=shards.plan.digest,
                epoch=shards.plan.epoch,
                key=KEY,
                model=self._model.units,
                files=tuple(all_files),
                planes=stored_planes(planes, values, self._index, all_runs),
                config=config or {},
            )
            text = manifest.to_text()
            Manifest.from_text(text)  # what would not be read must not be written
            return str(self.folder.publish(step, text, self._keep))

        path = self._or_discard(step, lambda: from_first(comm, publish))
        return Saved(Path(path), sum(f.size_bytes for f in writer.files))

    def latest(self) -> Path | None:
        """The checkpoint to go on from, the same on every rank; None when there is none."""
        found = from_first(self._comm, lambda: str(self.folder.latest() or ""))
        return Path(found) if found else None

    def load(self, path: Path | None = None) -> Manifest:
        """Take the state of a checkpoint (default: the latest). Every rank takes part.

        Raises:
            CheckpointError: on every rank the same, naming file, plane, tensor and block where one
                is wrong; nothing was changed.
        """
        path = path or self.latest()
        if path is None:
            raise CheckpointError(f"{self.folder.path} holds no checkpoint to load")
        source = path / MANIFEST
        text = from_first(self._comm, lambda: read_text(source))
        manifest = agreed(self._comm, lambda: self._manifest(source, text))
        reader = PartReader(path, manifest.files)
        planes = agreed(self._comm, lambda: self._read(manifest, reader))
        self._model.adopt(self._model.shards.plan, planes[0].tensors)
        adopt_state(self._model.shards, self._optimizer, planes[1:], manifest.optimizer_steps)
        return manifest

    def _write(self, step: int, planes: list[Plane], writer: PartWriter) -> Runs:
        comm, folder = self._comm, self.folder
        agreed(comm, lambda: folder.begin(step) if comm.is_leader else None)
        return self._or_discard(step, lambda: agreed(comm, lambda: write_planes(planes, writer)))

    def _or_discard(self, step: int, act: Callable[[], T]) -> T:
        try:
            return act()
        except CheckpointError:
            if self._comm.is_leader:
                with suppress(OSError):  # what is left does no harm; the next save removes it
                    self.folder.discard(step)
            raise

    def _manifest(self, source: Path, text: str) -> Manifest:
        try:
            manifest = Manifest.from_text(text)
            manifest.check_model(self._model.units)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return manifest

    def _read(self, manifest: Manifest, reader: PartReader) -> list[Plane]:
        shards = self._model.shards
        names, placement = state_of(shards, self._optimizer)
        params = [p.dtype for p in shards.params]
        state = [state_dtype(p, self._optimizer) for p in shards.params]
        device = shards.params[0].device
        planes = [read_plane(manifest, reader, PARAM, shards, params, device)]
        planes += [read_plane(manifest, reader, n, placement, state, device) for n in names]
        return planes
