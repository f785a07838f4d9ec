"""What a load reads: the blocks this rank holds, into new tensors, each checked in its place."""

from __future__ import annotations

from pathlib import Path

import torch

from ntp_core.errors import CheckpointError
from ntp_core.inbound.regular_file import read_regular
from ntp_core.manifest import MAX_BYTES, BlockRun, Manifest, StoredTensor
from ntp_core.runtime.checkpoint.parts import DTYPES, PartReader
from ntp_core.runtime.content import block_fingerprints
from ntp_core.runtime.optim.planes import Plane
from ntp_core.runtime.shards import Placement, Shard


def read_text(path: Path) -> str:
    """A manifest's text. Raises OSError, or CheckpointError when it cannot be one."""
    data = read_regular(path, MAX_BYTES)
    if not data.isascii():
        raise CheckpointError(f"{path}: {len(data)} bytes that are no manifest")
    return data.decode("ascii")


def read_plane(
    manifest: Manifest,
    reader: PartReader,
    name: str,
    placement: Placement,
    dtypes: list[torch.dtype],
    device: torch.device,
) -> Plane:
    """This rank's blocks of one plane, all of them checked.

    Args:
        dtypes: element type due for each tensor.
        device: where the tensors go once they are checked.

    Raises:
        CheckpointError: naming file, plane, tensor and block.
    """
    number, plane = manifest.plane(name)
    tensors = []
    for shard, stored, dtype in zip(placement.shards, plane.tensors, dtypes, strict=True):
        if DTYPES[stored.dtype] != dtype:
            raise CheckpointError(
                f"plane '{name}', tensor '{shard.spec.name}' was saved as {stored.dtype}, the job "
                f"has {dtype}; load it with the parameter type it was saved with"
            )
        tensor = torch.empty(shard.shape, dtype=dtype)
        source = _place(reader, name, shard, stored, tensor)
        _check(manifest, number, name, shard, stored, tensor, source)
        tensors.append(tensor.to(device))
    return Plane(name, placement, tensors)


def _place(
    reader: PartReader, plane: str, shard: Shard, stored: StoredTensor, into: torch.Tensor
) -> dict[int, BlockRun]:
    """Read the shard's blocks; the run that each came from."""
    wanted = set(shard.blocks)
    source: dict[int, BlockRun] = {}
    for run in stored.runs:
        part: Shard | None = None
        for block in run.blocks:
            if block not in wanted:
                continue
            part = part or Shard(shard.index, shard.spec, shard.num_units, tuple(run.blocks))
            values = reader.read(plane, part, run, block, stored.dtype)
            for view, value in zip(shard.views(into, block), values, strict=True):
                view.copy_(value)
            source[block] = run
    return source


def _check(
    manifest: Manifest,
    number: int,
    plane: str,
    shard: Shard,
    stored: StoredTensor,
    tensor: torch.Tensor,
    source: dict[int, BlockRun],
) -> None:
    for block, value in block_fingerprints(
        shard, tensor, seed=manifest.key + number, check=0
    ).items():
        if value != stored.fingerprints[block]:
            raise CheckpointError(
                f"{manifest.files[source[block].file].name}: plane '{plane}', tensor "
                f"'{shard.spec.name}', block {block}: fingerprint {value:016x}, saved was "
                f"{stored.fingerprints[block]:016x}; the bytes are not those that were saved"
            )
