"""Saving on one rank: a crash or a full disk at any operation, and damage to any byte."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ntp_core.errors import CheckpointError
from ntp_core.job import even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.runtime.checkpoint.folder import Disk
from ntp_core.runtime.checkpoint.store import Checkpoints
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import planes_of
from tests.support.disks import CountingDisk, FullDisk, Stopped, StoppingDisk
from tests.support.logical import is_equal
from tests.support.tiny_job import text_for, train_config
from tests.support.whole_files import whole_planes

MODEL = LlamaConfig(
    vocab=13, layers=1, width=8, heads=2, kv_heads=1, ffn=8, mlp_block=2, vocab_block=4
)
CONFIG = train_config(MODEL, seq=4)
PLAN = even_plan(MODEL, (1,), 1)
PART_BYTES = 700
"""Less than the embedding has: several files, and tensors split over them."""


def trainer_of(steps: int, config: object = CONFIG) -> Trainer:
    """A job of one rank, after some steps."""
    torch.set_num_threads(1)
    trainer = Trainer(config, PLAN, Comm(0, 1), text_for(CONFIG))  # type: ignore[arg-type]
    for _ in range(steps):
        trainer.train_step()
    return trainer


def checkpoints_of(trainer: Trainer, folder: Path, disk: Disk | None = None) -> Checkpoints:
    """Its checkpoints, of which two stay."""
    return Checkpoints(
        folder,
        trainer.comm,
        trainer.model,
        trainer.optimizer,
        keep=2,
        part_bytes=PART_BYTES,
        disk=disk,
    )


def state(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Copies of all planes."""
    return planes_of(trainer)


def is_same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    """Bit by bit."""
    return all(is_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A folder with one checkpoint of step 2, and the state in it."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = trainer_of(2)
    checkpoints_of(trainer, folder).save(2, CONFIG.seed, {"name": "first"})
    return folder, state(trainer)


@pytest.fixture
def copied(saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def test_saved_files_hold_each_tensor_once_and_are_small(
    saved: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    """Read by other code, the files are the state; none is larger than was allowed."""
    folder = saved[0] / "step-00000002"
    for plane, whole in zip(saved[1], whole_planes(folder).values(), strict=True):
        assert is_equal(plane, whole)
    parts = list(folder.glob("*.safetensors"))
    assert len(parts) > 5
    for part in parts:
        header = int.from_bytes(part.read_bytes()[:8], "little")
        assert part.stat().st_size - 8 - header <= PART_BYTES


def test_load_gives_back_state_steps_and_config(
    saved: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    """Every plane bit by bit, the optimizer's count and the job's own words."""
    trainer = trainer_of(0)
    manifest = checkpoints_of(trainer, saved[0]).load()
    assert (manifest.step, manifest.optimizer_steps, manifest.seed) == (2, 2, CONFIG.seed)
    assert manifest.config == {"name": "first"}
    assert manifest.plan_digest == PLAN.digest
    assert is_same(saved[1], state(trainer))
    counts = {int(s["step"]) for s in trainer.optimizer.state.values()}
    assert counts == {2}


def operations(folder: Path) -> int:
    """Operations of the third save into a folder, which removes the first checkpoint."""
    trainer, disk = trainer_of(3), CountingDisk()
    checkpoints_of(trainer, folder).save(3, 0)
    checkpoints_of(trainer, folder, disk).save(4, 0)
    return disk.count


@pytest.mark.parametrize("is_torn", [False, True], ids=["before", "torn"])
def test_crash_at_any_operation_leaves_a_checkpoint_that_loads(
    saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path, is_torn: bool
) -> None:
    """Before or amid each: the newest or the one before loads, and a later save cleans up."""
    total = operations(Path(shutil.copytree(saved[0], tmp_path / "count")))
    assert total > 10
    other, loaded = trainer_of(3), trainer_of(0)
    newest = state(other)
    seen = set()
    for at in range(total):
        folder = Path(shutil.copytree(saved[0], tmp_path / str(at)))
        checkpoints_of(other, folder).save(3, 0)
        with pytest.raises(Stopped):
            checkpoints_of(other, folder, StoppingDisk(at, is_torn=is_torn)).save(4, 0)
        after = checkpoints_of(loaded, folder)
        step = after.load().step
        seen.add(step)
        assert step in (3, 4)
        assert is_same(newest, state(loaded))
        after.save(5, 0)
        assert sorted(p.name for p in folder.iterdir())[0] == "latest", "no draft is left"
        assert len(after.folder.saved()) == 2
    assert seen == {3, 4}


def test_full_disk_at_any_operation_is_told_and_keeps_the_old_one(
    saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    """The error says what the system said; what `latest` names loads; the next save succeeds."""
    total = operations(Path(shutil.copytree(saved[0], tmp_path / "count")))
    other, loaded = trainer_of(3), trainer_of(0)
    told = 0
    for at in range(total):
        folder = Path(shutil.copytree(saved[0], tmp_path / str(at)))
        checkpoints_of(other, folder).save(3, 0)
        try:
            checkpoints_of(other, folder, FullDisk(at)).save(4, 0)
        except CheckpointError as error:
            told += 1
            assert "No space left on device" in str(error)
            assert checkpoints_of(loaded, folder).load().step == 3
        else:  # only old ones could not be removed
            assert checkpoints_of(loaded, folder).load().step == 4
        checkpoints_of(other, folder).save(5, 0)
        assert checkpoints_of(loaded, folder).load().step == 5
    assert 8 < told < total


def test_any_flipped_bit_in_any_file_is_refused_and_nothing_changes(
    saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    """Headers and data, any bit: the message names the file, and the job's state stays."""
    draw = random.Random(5)
    trainer = trainer_of(1)
    before = state(trainer)
    source = saved[0] / "step-00000002"
    names = sorted(p.name for p in source.iterdir())
    for number in range(40):
        folder = Path(shutil.copytree(saved[0], tmp_path / str(number)))
        victim = folder / "step-00000002" / draw.choice(names)
        data = bytearray(victim.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        victim.write_bytes(data)
        with pytest.raises(CheckpointError, match=victim.name):
            checkpoints_of(trainer, folder).load()
        assert is_same(before, state(trainer))


def _truncate(folder: Path) -> None:
    path = max(folder.glob("part-*"))
    path.write_bytes(path.read_bytes()[:-1])


def _remove(folder: Path) -> None:
    max(folder.glob("part-*")).unlink()


def _swap(folder: Path) -> None:
    a, b = sorted(folder.glob("part-*"))[:2]
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def _link(folder: Path) -> None:
    path = max(folder.glob("part-*"))
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def _folder(folder: Path) -> None:
    path = max(folder.glob("part-*"))
    path.unlink()
    path.mkdir()


def _long_header(folder: Path) -> None:
    path = max(folder.glob("part-*"))
    data = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + data[8:])


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGE = {
    _truncate: r"part-00000-\d+\.safetensors: plane 'exp_avg_sq', tensor '[\w.]+', block \d.*bytes",
    _remove: r"part-.* block \d+: .*No such file",
    _swap: r"part-0000.*(header|bytes)",
    _link: r"part-.*not a plain file",
    _folder: r"part-.*not a plain file",
    _long_header: r"part-.*header of \d+ bytes",
    _no_manifest: r"latest names 'step-00000002', which is no complete checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__[1:])
def test_damaged_folder_is_refused_by_name(copied: Path, damage: Callable[[Path], None]) -> None:
    """Cut off, gone, swapped, replaced: the message says which file and what is wrong with it."""
    damage(copied / "step-00000002")
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        checkpoints_of(trainer_of(0), copied).load()


def test_checkpoint_of_another_model_or_type_is_refused(copied: Path) -> None:
    """Other shapes, other parameter types, no masters: each is named."""
    wide = replace(CONFIG, model=replace(MODEL, ffn=16))
    plan = even_plan(wide.model, (1,), 1)
    other = Trainer(wide, plan, Comm(0, 1), text_for(CONFIG))
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints_of(other, copied).load()
    low = trainer_of(0, replace(CONFIG, param_dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r"'embed.weight' was saved as float32, the job has"):
        checkpoints_of(low, copied).load()


@pytest.mark.parametrize("content", [b"", b"../../etc", b"step-1", b"\xff\x00", b"x" * 4000])
def test_latest_that_names_nothing_is_refused(copied: Path, content: bytes) -> None:
    """A pointer to what is not there is an error, not a fresh start; the message lists what is."""
    (copied / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; there are .*step-00000002"):
        checkpoints_of(trainer_of(0), copied).load()


def test_latest_that_is_no_short_plain_file_is_refused(copied: Path) -> None:
    """A pipe would hold the job up for ever; a link may lead anywhere; a long file is none."""
    latest = copied / "latest"
    latest.write_bytes(b"x" * 10**5)
    with pytest.raises(CheckpointError, match="at most 4096"):
        checkpoints_of(trainer_of(0), copied).load()
    latest.unlink()
    os.mkfifo(latest)
    with pytest.raises(CheckpointError, match="regular file"):
        checkpoints_of(trainer_of(0), copied).load()
    latest.unlink()
    latest.symlink_to(copied / "step-00000002" / "manifest.json")
    with pytest.raises(CheckpointError, match="latest"):
        checkpoints_of(trainer_of(0), copied).load()


def test_latest_missing_means_the_newest(copied: Path, tmp_path: Path) -> None:
    """As after a crash in the first save; an empty folder holds none."""
    (copied / "latest").unlink()
    trainer = trainer_of(0)
    assert checkpoints_of(trainer, copied).load().step == 2
    empty = checkpoints_of(trainer, tmp_path / "empty")
    assert empty.latest() is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        empty.load()


def test_save_keeps_the_newest_and_a_step_twice(copied: Path) -> None:
    """Two stay; a job that went back saves the same step beside the older one."""
    trainer = trainer_of(2)
    kept = checkpoints_of(trainer, copied)
    for step in (3, 4):
        kept.save(step, 0)
    assert {p.name for p in copied.iterdir()} == {"latest", "step-00000003", "step-00000004"}
    path = kept.save(3, 0).path
    assert path.name == "step-00000003.1"
    assert (copied / "latest").read_text() == "step-00000003.1\n"
    assert kept.latest() == path
    assert {p.name for p in kept.folder.saved()} == {"step-00000004", "step-00000003.1"}


def test_save_into_a_file_is_told(tmp_path: Path) -> None:
    """A path that cannot be a folder: one clear error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        checkpoints_of(trainer_of(0), tmp_path / "file").save(1, 0)


def test_disk_syncs_what_it_writes(tmp_path: Path) -> None:
    """A file and a folder can be synced; a file that is gone is an OSError."""
    disk = Disk()
    disk.write_text(tmp_path / "a", "x")
    disk.sync_folder(tmp_path)
    with pytest.raises(OSError, match="none"):
        disk.sync_folder(tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
