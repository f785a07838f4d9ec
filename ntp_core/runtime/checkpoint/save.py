"""What a save writes: each block once, by the rank that keeps it, and how the manifest lists it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ntp_core.errors import CheckpointError
from ntp_core.manifest import (
    BlockRun,
    PartFile,
    StoredPlane,
    StoredTensor,
    entry_name,
    num_blocks,
    runs_of_blocks,
)
from ntp_core.runtime.checkpoint.parts import DTYPES, PartWriter
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.optim.adamw import pick
from ntp_core.runtime.optim.planes import Plane
from ntp_core.runtime.shards import KeptPlacement, Shard
from ntp_core.units import ModelUnits, block_numel

Vectors = npt.NDArray[np.int64]  # [copies, blocks of the model]
Runs = dict[tuple[int, int], list[BlockRun]]  # (plane, tensor) -> where its blocks are


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of an element type. Raises CheckpointError for one it has not."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"tensors of {dtype} cannot be saved; only {sorted(DTYPES)}")


def write_planes(planes: Sequence[Plane], writer: PartWriter) -> Runs:
    """Write the blocks that this rank keeps, a file's worth of them at a time. Raises OSError.

    Returns:
        Runs whose `file` counts this rank's own files.
    """
    params = planes[0].placement
    kept = KeptPlacement(params.model, params.plan, params.rank).counted()
    found: Runs = {}
    for p, plane in enumerate(planes):
        for i, (shard, tensor) in enumerate(
            zip(plane.placement.shards, plane.tensors, strict=True)
        ):
            longest = max(1, writer.part_bytes // _block_bytes(shard, tensor))
            for blocks in runs_of_blocks(kept[i], longest):
                part = Shard(i, shard.spec, shard.num_units, tuple(blocks))
                run = BlockRun(blocks.start, blocks.stop, blocks.step, 0)
                name = entry_name(plane.name, shard.spec.name, run)
                file = writer.add(name, pick(shard, part, tensor))
                run = BlockRun(run.first, run.stop, run.stride, file)
                found.setdefault((p, i), []).append(run)
    writer.flush()
    return found


def gather(comm: Comm, files: list[PartFile], runs: Runs) -> tuple[list[PartFile], Runs]:
    """All ranks' files and runs, with files numbered through the checkpoint; on the leader."""
    listed = [[p, i, r.first, r.stop, r.stride, r.file] for (p, i), of in runs.items() for r in of]
    record = {"files": [[f.name, f.size_bytes, f.header_digest] for f in files], "runs": listed}
    data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.uint8)
    received = comm.all_to_all([data if g == comm.world[0] else nothing for g in comm.world])
    all_files: list[PartFile] = []
    all_runs: Runs = {}
    for part in received if comm.is_leader else []:
        record = json.loads(part.numpy().tobytes())
        for p, i, first, stop, stride, file in record["runs"]:
            run = BlockRun(first, stop, stride, len(all_files) + file)
            all_runs.setdefault((p, i), []).append(run)
        all_files += [PartFile(*f) for f in record["files"]]
    return all_files, all_runs


def stored_planes(
    planes: Sequence[Plane], values: Sequence[Vectors], index: BlockIndex, runs: Runs
) -> tuple[StoredPlane, ...]:
    """The manifest's list of planes."""
    counts = num_blocks(planes[0].placement.model)
    found = []
    for p, (plane, vectors) in enumerate(zip(planes, values, strict=True)):
        tensors = []
        for i, tensor in enumerate(plane.tensors):
            own = vectors[0, index.start[i] : index.start[i] + counts[i]].view(np.uint64)
            prints = tuple(int(v) for v in own)
            tensors.append(StoredTensor(dtype_name(tensor.dtype), prints, tuple(runs[p, i])))
        found.append(StoredPlane(plane.name, tuple(tensors)))
    return tuple(found)


def check_copies(
    planes: Sequence[Plane], values: Sequence[Vectors], index: BlockIndex, model: ModelUnits
) -> None:
    """Raises CheckpointError when replicas differ: nobody knows which of them to save."""
    for plane, vectors in zip(planes, values, strict=True):
        wrong = (vectors != vectors[0]).any(axis=0)
        if wrong.any():
            tensor, block = index.tensor_of(int(wrong.argmax()))
            raise CheckpointError(
                f"replicas differ in {int(wrong.sum())} blocks of plane '{plane.name}', first in "
                f"tensor '{model.tensors[tensor].name}', block {block}; such a state is not saved"
            )


def _block_bytes(shard: Shard, tensor: torch.Tensor) -> int:
    return max(1, block_numel(shard.spec, shard.num_units, 0) * tensor.element_size())
