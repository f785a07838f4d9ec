"""The folder of a job's checkpoints: what is complete, which is the latest, how many are kept.

    <folder>/step-00000040/             complete, never written again
    <folder>/step-00000080/
    <folder>/latest                     the name of one of them
    <folder>/.saving-step-00000120/     being written, or left by a crash

A checkpoint is written beside the others, synced to disk, and appears by one rename; then `latest`
is replaced, by another. Whenever the job or the machine stops, `latest` names a complete one.
One job at a time may save into a folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ntp_core.errors import CheckpointError
from ntp_core.inbound.regular_file import read_regular

MANIFEST = "manifest.json"
LATEST = "latest"
SAVING, REMOVING = ".saving-", ".removing-"
MAX_SAME_STEP = 1000
MAX_POINTER_BYTES = 4096

_SAVED = re.compile(r"step-\d{8,16}(\.\d{1,4})?")


class Disk:
    """The file operations of a save. Each leaves its result on the disk before it returns."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; it must not exist."""
        path.mkdir(parents=True)

    def save_tensors(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write a safetensors file."""
        save_file(tensors, path)
        self._sync(path)

    def write_text(self, path: Path, text: str) -> None:
        """Write a file."""
        path.write_text(text, encoding="utf-8")
        self._sync(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename inside one folder, at once; the entry is on the disk afterwards."""
        old.replace(new)
        self.sync_folder(new.parent)

    def sync_folder(self, path: Path) -> None:
        """Bring a folder's entries to the disk."""
        self._sync(path)

    def remove(self, path: Path) -> None:
        """Remove a folder and all in it."""
        shutil.rmtree(path)

    def _sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointFolder:
    """Names and moves checkpoints; used by rank 0, but for reading names."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = disk or Disk()

    def draft(self, step: int) -> Path:
        """Where a checkpoint of this step is written."""
        return self.path / f"{SAVING}{_name(step)}"

    def begin(self, step: int) -> None:
        """Make an empty draft; what crashes have left is removed. Raises OSError."""
        if self.path.is_dir():
            for left in (*self.path.glob(f"{SAVING}*"), *self.path.glob(f"{REMOVING}*")):
                self.disk.remove(left)
        self.disk.make_folder(self.draft(step))

    def publish(self, step: int, manifest: str, keep: int) -> Path:
        """Complete a draft whose other files are on the disk. Raises OSError."""
        draft, final = self.draft(step), self._free(step)
        self.disk.write_text(draft / MANIFEST, manifest)
        self.disk.sync_folder(draft)
        self.disk.rename(draft, final)
        pointer = self.path / f".{LATEST}"
        self.disk.write_text(pointer, final.name + "\n")
        self.disk.rename(pointer, self.path / LATEST)
        self._prune(final, keep)
        return final

    def discard(self, step: int) -> None:
        """Remove a draft that will not be completed."""
        if self.draft(step).exists():
            self.disk.remove(self.draft(step))

    def saved(self) -> list[Path]:
        """All complete checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _SAVED.fullmatch(p.name)]
        complete = [p for p in found if (p / MANIFEST).is_file()]
        return sorted(complete, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))[::-1]

    def latest(self) -> Path | None:
        """The checkpoint to go on from; None when there is none.

        Raises:
            CheckpointError: when `latest` names what is not there.
            OSError: when it is no plain, short file.
        """
        saved = self.saved()
        pointer = self.path / LATEST
        if not os.path.lexists(pointer):
            return saved[0] if saved else None
        name = read_regular(pointer, MAX_POINTER_BYTES).decode("ascii", "replace").strip()
        for path in saved:
            if path.name == name:
                return path
        raise CheckpointError(
            f"{pointer} names {name!r}, which is no complete checkpoint; there are "
            f"{[p.name for p in saved]}. Write one of these names into it."
        )

    def _free(self, step: int) -> Path:
        """A name not taken: a job that went back to an older step may save a step again."""
        names = (_name(step) + (f".{n}" if n else "") for n in range(MAX_SAME_STEP))
        for name in names:
            if not (self.path / name).exists():
                return self.path / name
        raise CheckpointError(f"{self.path} holds step {step} {MAX_SAME_STEP} times; remove some")

    def _prune(self, newest: Path, keep: int) -> None:
        others = [p for p in self.saved() if p != newest]
        for old in others[max(0, keep - 1) :]:
            doomed = self.path / f"{REMOVING}{old.name}"
            try:
                # Out of the way first: a folder half removed must not look complete.
                self.disk.rename(old, doomed)
                self.disk.remove(doomed)
            except OSError:
                continue  # the new one is safe; the next save tries again


def _name(step: int) -> str:
    return f"step-{step:08d}"
