"""Files of a checkpoint: safetensors, each of bounded size, read with suspicion."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ntp_core.errors import CheckpointError
from ntp_core.manifest import BlockRun, PartFile, entry_name
from ntp_core.runtime.checkpoint.folder import Disk
from ntp_core.runtime.shards import Shard

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORED = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}

PART_BYTES = 256 << 20
"""A file is closed once it has this many bytes: what a save holds in memory beside the state."""


class PartWriter:
    """Collects one rank's arrays into files `part-<rank>-<number>.safetensors`.

    Attributes:
        files: those written.
    """

    def __init__(self, folder: Path, rank: int, disk: Disk, part_bytes: int) -> None:
        self.files: list[PartFile] = []
        self._folder = folder
        self._rank = rank
        self._disk = disk
        self.part_bytes = part_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """Take an array; the number of the file it will be in. Raises OSError."""
        size = tensor.numel() * tensor.element_size()
        if self._size and self._size + size > self.part_bytes:
            self.flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._size += size
        return len(self.files)

    def flush(self) -> None:
        """Write what is collected. Raises OSError."""
        if not self._pending:
            return
        path = self._folder / f"part-{self._rank:05d}-{len(self.files):05d}.safetensors"
        try:
            self._disk.save_tensors(path, self._pending)
        except SafetensorError as error:  # what the library makes of the system's errors
            raise OSError(f"{path}: {error}") from error
        size = path.stat().st_size
        self.files.append(PartFile(path.name, size, header_digest(path, size)))
        self._pending, self._size = {}, 0


class PartReader:
    """Reads blocks out of a checkpoint's files, each checked when it is first opened."""

    def __init__(self, folder: Path, files: tuple[PartFile, ...]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[int, Any] = {}

    def read(
        self, plane: str, stored: Shard, run: BlockRun, block: int, dtype: str
    ) -> list[torch.Tensor]:
        """One block, part after part.

        Args:
            stored: the run's blocks of the tensor.

        Raises:
            CheckpointError: naming file, plane, tensor and block.
        """
        name = entry_name(plane, stored.spec.name, run)
        part = self._files[run.file]
        where = f"{part.name}: plane '{plane}', tensor '{stored.spec.name}', block {block}"
        try:
            array = self._file(run.file).get_slice(name)
            shape, kind = tuple(array.get_shape()), array.get_dtype()
            if shape != stored.shape or kind != _STORED[dtype]:
                raise CheckpointError(
                    f"{where}: the file has {kind} {list(shape)} where the manifest has "
                    f"{_STORED[dtype]} {list(stored.shape)}"
                )
            before = (slice(None),) * stored.spec.dim
            return [array[(*before, slice(a, z))] for a, z in stored.spans((block,))]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{where}: {error}") from error

    def _file(self, number: int) -> Any:
        if number not in self._open:
            part = self._files[number]
            path = self._folder / part.name
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError("is not a plain file")
            if status.st_size != part.size_bytes:
                raise OSError(f"has {status.st_size} bytes, the manifest says {part.size_bytes}")
            if header_digest(path, part.size_bytes) != part.header_digest:
                raise OSError("its header is not the one that was written")
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]


def header_digest(path: Path, size_bytes: int) -> str:
    """sha256 of a safetensors file's header, hex; its arrays have fingerprints of their own.

    Raises:
        OSError: when the header is longer than the file.
    """
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size_bytes - 8:
            raise OSError(f"a header of {length} bytes in a file of {size_bytes}")
        return hashlib.sha256(head + file.read(length)).hexdigest()
