"""Checkpoints between layouts: the same bits at any, and training goes on as if it never ended."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ntp_core.job import TrainConfig
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits
from tests.support import bodies_checkpoint as bodies
from tests.support.bodies_checkpoint import Ran
from tests.support.logical import Whole, assemble, is_equal
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import GROUPED, A, M, V, even, plan_of, scattered, train_config
from tests.support.whole_files import manifest_body, whole_planes

HALF, STEPS = 3, 6
LOSS_TOLERANCE = 1e-6  # relative; another layout adds in another order
UNITS: ModelUnits = GROUPED.units()
FIRST = even(GROUPED, (2, 1), (3, 3))
CONFIGS = {
    "fp32": train_config(GROUPED),
    "bf16": train_config(GROUPED, param_dtype="bfloat16"),
    "zero": train_config(GROUPED, zero=True),
    "bf16-zero": train_config(GROUPED, param_dtype="bfloat16", zero=True),
}
OTHERS = {
    "1": even(GROUPED, (1,), (6,)),
    "3": scattered(random.Random(3), GROUPED, (3,), (6,)),
    "2+1": scattered(random.Random(1), GROUPED, (2, 1), (5, 1)),
    "1+1+1": even(GROUPED, (1, 1, 1), (1, 2, 3)),
    "empty": plan_of(GROUPED, [{A: (0, 4, 2), M: (12, 0, 0), V: (0, 0, 12)}], (6,)),
}


def run(
    pool: RankPool, config: TrainConfig, plan: Plan, steps: int, folder: Path, every: int = 0
) -> list[Ran]:
    """Go on from the folder's latest checkpoint up to a step, and save there."""
    ran: list[Ran] = pool.run(
        bodies.run,
        len(plan.ranks),
        config=config,
        plan=plan,
        steps=steps,
        folder=folder,
        every=every,
    )
    return ran


@pytest.fixture(scope="module")
def halves(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Ran]]]:
    """For each config a folder saved in the middle, and the run that never stopped."""
    root = tmp_path_factory.mktemp("halves")
    found = {}
    for name, config in CONFIGS.items():
        run(rank_pool, config, FIRST, HALF, root / name)
        found[name] = root / name, run(rank_pool, config, FIRST, STEPS, root / f"{name}-whole")
    return found


def newest(folder: Path) -> Path:
    """The checkpoint that `latest` names."""
    return folder / (folder / "latest").read_text().strip()


def check_counts(ran: list[Ran], steps: int) -> None:
    """The optimizer's count is the job's on every rank, for shares that were empty too."""
    for r in ran:
        assert set(r.counts) == {steps}


@pytest.mark.parametrize("name", CONFIGS)
def test_resume_at_the_same_layout_is_bit_equal(
    rank_pool: RankPool, halves: dict[str, tuple[Path, list[Ran]]], name: str, tmp_path: Path
) -> None:
    """Losses and every bit of every plane are those of the run that never stopped."""
    folder = Path(shutil.copytree(halves[name][0], tmp_path / "job"))
    whole = halves[name][1]
    ran = run(rank_pool, CONFIGS[name], FIRST, STEPS, folder)
    assert {r.error for r in ran} == {""}
    for a, b in zip(whole, ran, strict=True):
        assert a.losses[HALF:] == b.losses
    check_counts(ran, STEPS)
    ours, theirs = newest(folder), newest(halves[name][0].with_name(f"{name}-whole"))
    body, expected = manifest_body(ours), manifest_body(theirs)
    assert expected["planes"] == body["planes"]
    assert (ours / "manifest.json").read_bytes() == (theirs / "manifest.json").read_bytes()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_resume_at_another_layout_goes_on_alike(
    rank_pool: RankPool,
    halves: dict[str, tuple[Path, list[Ran]]],
    name: str,
    other: str,
    tmp_path: Path,
) -> None:
    """Any degrees, replicas, shares and batch shares: all bits first, then the same losses."""
    if name not in ("fp32", "bf16-zero") and other not in ("3", "1+1+1"):
        return  # the other pairs differ in nothing that is not seen here
    config, plan = CONFIGS[name], OTHERS[other]
    folder = Path(shutil.copytree(halves[name][0], tmp_path / "job"))
    source = whole_planes(newest(folder))
    still = run(rank_pool, config, plan, HALF, folder)
    assert {r.error for r in still} == {""}
    check_counts(still, HALF)
    params = assemble(plan, UNITS, [r.planes[0] for r in still])
    assert all(_is_equal(source["param"], replica) for replica in params)
    if not config.zero:
        for number, plane in enumerate(source.values()):
            states = assemble(plan, UNITS, [r.planes[number] for r in still])
            assert all(is_equal(plane, s) for s in states if number)
    ran = run(rank_pool, config, plan, STEPS, folder)
    tolerance = LOSS_TOLERANCE if config.param_dtype == "float32" else 5e-3
    assert pytest.approx(halves[name][1][0].losses[HALF:], rel=tolerance) == ran[0].losses
    check_counts(ran, STEPS)


def _is_equal(a: Whole, b: Whole) -> bool:
    return a.keys() == b.keys() and all(bool((a[n] == b[n]).all()) for n in a)


def test_saved_again_at_another_layout_has_the_same_bits(
    rank_pool: RankPool, halves: dict[str, tuple[Path, list[Ran]]], tmp_path: Path
) -> None:
    """Fingerprints and, read by other code, values stay through three layouts in a row."""
    folder = Path(shutil.copytree(halves["bf16-zero"][0], tmp_path / "job"))
    first = whole_planes(newest(folder)), manifest_body(newest(folder))
    for plan in (OTHERS["3"], OTHERS["1+1+1"], OTHERS["2+1"]):
        rank_pool.run(bodies.resave, 3, config=CONFIGS["bf16-zero"], plan=plan, folder=folder)
        body = manifest_body(newest(folder))
        assert body["plan_digest"] == plan.digest
        for a, b in zip(first[1]["planes"], body["planes"], strict=True):
            for x, y in zip(a["tensors"], b["tensors"], strict=True):
                assert x["fingerprints"] == y["fingerprints"]
        for name, whole in whole_planes(newest(folder)).items():
            assert _is_equal(first[0][name], whole)


def test_files_are_balanced_over_replicas(halves: dict[str, tuple[Path, list[Ran]]]) -> None:
    """Each of two replicas writes about half; nothing is written twice."""
    path = newest(halves["fp32"][0])
    sizes = {p.name[:10]: p.stat().st_size for p in path.glob("part-*")}
    replicas = sizes["part-00000"] + sizes["part-00001"], sizes["part-00002"]
    assert max(replicas) < 1.1 * min(replicas)
    state = 3 * 4 * sum(t.numel for t in UNITS.tensors)
    assert state < sum(sizes.values()) < 1.2 * state


def test_job_keeps_the_last_two_of_its_saves(rank_pool: RankPool, tmp_path: Path) -> None:
    """Saves every two steps and at the end; the older ones go."""
    ran = run(rank_pool, CONFIGS["fp32"], FIRST, 5, tmp_path / "job", every=2)
    assert ran[0].error == ""
    names = {p.name for p in (tmp_path / "job").iterdir()}
    assert names == {"latest", "step-00000004", "step-00000005"}


def _truncate(path: Path) -> None:
    part = max(path.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-100])


def _flip(path: Path) -> None:
    part = min(path.glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 64
    part.write_bytes(data)


def _remove(path: Path) -> None:
    sorted(path.glob("part-*"))[1].unlink()


def _swap(path: Path) -> None:
    a, b, *_ = sorted(path.glob("part-*"))
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def _manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step":3', '"step":4'))


def _version(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version":1', '"version":7'))


DAMAGE: dict[Callable[[Path], None], str] = {
    _truncate: "part-00002-00000.safetensors",
    _flip: "part-00000-00000.safetensors",
    _remove: "part-00001-00000.safetensors",
    _swap: "part-0000",
    _manifest: "manifest.json: the manifest is damaged",
    _version: "manifest.json: a manifest of version '7'",
}


def test_damage_is_the_same_verdict_on_every_rank(
    rank_pool: RankPool, halves: dict[str, tuple[Path, list[Ran]]], tmp_path: Path
) -> None:
    """One rank reads the wrong byte, all ranks say which file it is in, and none has changed."""
    folders = []
    for number, damage in enumerate(DAMAGE):
        folders.append(Path(shutil.copytree(halves["fp32"][0], tmp_path / str(number))))
        damage(newest(folders[-1]))
    told = rank_pool.run(
        bodies.load_each, 3, config=CONFIGS["fp32"], plan=OTHERS["3"], folders=folders
    )
    for number, expected in enumerate(DAMAGE.values()):
        errors = {by_rank[number][0] for by_rank in told}
        assert len(errors) == 1
        assert expected in errors.pop()
        assert all(by_rank[number][1] for by_rank in told)


def test_other_seed_or_model_is_refused_on_every_rank(
    rank_pool: RankPool, halves: dict[str, tuple[Path, list[Ran]]], tmp_path: Path
) -> None:
    """Other data would follow, or other shapes: the job does not go on from it."""
    folder = Path(shutil.copytree(halves["fp32"][0], tmp_path / "job"))
    other = replace(CONFIGS["fp32"], seed=8)
    wide = replace(CONFIGS["fp32"], model=replace(GROUPED, kv_heads=12))
    for config, plan, message in (
        (other, FIRST, "seed"),
        (wide, even(wide.model, (2, 1)), "another model"),
    ):
        told = rank_pool.run(bodies.load_each, 3, config=config, plan=plan, folders=[folder])
        assert len({error for ((error, _),) in told}) == 1
        assert message in told[0][0][0]


@pytest.mark.parametrize("rank", [0, 2])
def test_full_disk_on_one_rank_is_told_to_all_and_the_job_may_go_on(
    rank_pool: RankPool, tmp_path: Path, rank: int
) -> None:
    """The system refuses to write; the older checkpoint is whole and no draft is left."""
    told = rank_pool.run(
        bodies.save_on_full_disk,
        3,
        config=CONFIGS["fp32"],
        plan=FIRST,
        folder=tmp_path / "job",
        rank=rank,
    )
    for error, step, losses in told:
        assert error == told[0][0]
        assert f"rank {rank}: " in error
        assert "File too large" in error
        assert step == 1
        assert losses == told[0][2]
    assert {p.name for p in (tmp_path / "job").iterdir()} == {"latest", "step-00000001"}


@pytest.mark.parametrize(("victim", "seed"), [(0, 1), (2, 2)])
def test_kill_while_saving_leaves_a_checkpoint_that_loads_elsewhere(
    rank_pool: RankPool, tmp_path: Path, victim: int, seed: int
) -> None:
    """SIGKILL at a random moment of a job that saves all the time; another layout goes on."""
    delay_s = random.Random(seed).uniform(0.0, 0.3)
    steps = rank_pool.run(
        bodies.save_until_killed,
        3,
        expect_death={victim},
        config=CONFIGS["fp32"],
        plan=FIRST,
        folder=tmp_path / "job",
        victim=victim,
        delay_s=delay_s,
    )
    assert steps[victim] is None, f"killed after {delay_s} s"
    reached = max(s for s in steps if s is not None)
    saved = manifest_body(newest(tmp_path / "job"))["step"]
    assert 1 <= saved <= reached
    assert reached - saved <= 1
    ran = run(rank_pool, CONFIGS["fp32"], OTHERS["1"], saved + 1, tmp_path / "job")
    assert ran[0].error == ""
    assert len(ran[0].losses) == 1
    assert not list((tmp_path / "job").glob(".*"))
