"""Manifests: read back equal, and nothing that was not written is believed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core import manifest as module
from ntp_core.errors import CheckpointError
from ntp_core.manifest import (
    BlockRun,
    Manifest,
    PartFile,
    StoredPlane,
    StoredTensor,
    num_blocks,
    runs_of_blocks,
)
from tests.support.random_plans import random_model

SEEDS = range(20)
ODD = [None, "x", "../x", -1, 0.5, True, [], {}, [[]], 10**9, 10**30, "\u00e9", ["a", 1, "b"]]


def drawn(seed: int) -> Manifest:
    """A manifest of a random model: blocks in random files, strides of all kinds."""
    draw = random.Random(seed)
    model = random_model(draw)
    files = tuple(
        PartFile(f"part-{i}.safetensors", draw.randrange(10**6), f"{draw.getrandbits(256):064x}")
        for i in range(3)
    )
    planes = []
    for name in ("param", "exp_avg"):
        tensors = []
        for count in num_blocks(model):
            owner = [draw.randrange(3) for _ in range(count)]
            runs = tuple(
                BlockRun(r.start, r.stop, r.step, f)
                for f in range(3)
                for r in runs_of_blocks([b for b in range(count) if owner[b] == f], 4)
            )
            prints = tuple(draw.getrandbits(64) for _ in range(count))
            tensors.append(StoredTensor("float32", prints, runs))
        planes.append(StoredPlane(name, tuple(tensors)))
    return Manifest(
        step=draw.randrange(10**6),
        optimizer_steps=draw.randrange(10**6),
        seed=(1 << 63) - 1,
        plan_digest="0123456789abcdef",
        epoch=2,
        key=5,
        model=model,
        files=files,
        planes=tuple(planes),
        config={"lr": 1e-5, "betas": [0.9, 0.95], "name": "caf\u00e9"},
    )


def signed(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    """A manifest's text after a change of its body, with a right digest."""
    body = json.loads(text)["body"]
    change(body)
    return module._render(body)


@pytest.mark.parametrize("seed", SEEDS)
def test_manifest_round_trip(seed: int) -> None:
    """What was written is read back equal, and is ASCII JSON."""
    manifest = drawn(seed)
    text = manifest.to_text()
    assert manifest == Manifest.from_text(text)
    assert text.isascii()
    assert json.loads(text)["format"] == "ntp-checkpoint"


@pytest.mark.parametrize("seed", SEEDS)
def test_manifest_any_changed_bit_is_refused(seed: int) -> None:
    """Also in white space, letter case of numbers, names and the digest itself."""
    draw = random.Random(seed)
    data = drawn(seed).to_text().encode()
    for _ in range(25):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        with pytest.raises(CheckpointError):
            Manifest.from_text(damaged.decode("latin-1"))


@pytest.mark.parametrize("size", [0, 1, 50, -1, -2])
def test_manifest_cut_off_is_refused(size: int) -> None:
    """A file that ends too early is no manifest."""
    with pytest.raises(CheckpointError):
        Manifest.from_text(drawn(0).to_text()[:size])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 10**5, '{"format":1}', "{" * 10**4, '{"a":NaN}', "1" * 10**5],
    ids=lambda t: t[:8],
)
def test_manifest_other_text_is_refused(text: str) -> None:
    """Whatever else stands in the file: one kind of error."""
    with pytest.raises(CheckpointError, match="manifest"):
        Manifest.from_text(text)


def test_manifest_unknown_version_or_format_is_named() -> None:
    """A newer program's manifest is refused with both versions."""
    text = drawn(0).to_text()
    with pytest.raises(CheckpointError, match=r"version '?2'?; this program reads 1"):
        Manifest.from_text(text.replace('"version":1', '"version":2'))
    with pytest.raises(CheckpointError, match="format"):
        Manifest.from_text(text.replace("ntp-checkpoint", "other"))


def _file_name(name: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["files"][0].__setitem__(0, name)


def _run(run: list[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["planes"][0]["tensors"][0].__setitem__("runs", [run])


def _tensor(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["planes"][0]["tensors"][0].__setitem__(key, value)


def _model(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["model"]["tensors"][0].__setitem__(key, value)


HOSTILE = [
    *(_file_name(n) for n in ("../a.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b", "")),
    _file_name("A.safetensors"),
    _file_name("part-1.safetensors"),  # another's name
    *(_run(r) for r in ([0, 10**15, 1, 0], [0, 1, 0, 0], [0, 1, 1, 99], [-1, 1, 1, 0], [0, 1])),
    *(_run(r) for r in ([0, 1, 1, True], [0, 1.0, 1, 0], ["0", 1, 1, 0], [0, 2**60, 2**60, 0])),
    _tensor("runs", []),
    _tensor("fingerprints", "0" * 15),
    _tensor("fingerprints", ""),
    _tensor("fingerprints", "zz" * 8),
    _tensor("dtype", "int64"),
    *(_model(k, v) for k, v in (("sharing", 0), ("parts", 0), ("dim", 9), ("shape", [10**40]))),
    lambda body: body["model"]["counts"].update(mlp=10**12),
    lambda body: body["fingerprint"].update(algorithm="md5"),
    lambda body: body.update(step=-1),
    lambda body: body.update(step=2**60),
    lambda body: body.update(config=[]),
    lambda body: body["planes"].append(body["planes"][0]),
    lambda body: body["planes"][0]["tensors"].pop(),
    lambda body: body["planes"][0].update(name="../param"),
    lambda body: body.pop("seed"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_manifest_hostile_content_with_a_right_digest_is_refused(number: int) -> None:
    """Paths that lead out, numbers without end, blocks twice or never: refused, and fast."""
    with pytest.raises(CheckpointError):
        Manifest.from_text(signed(drawn(1).to_text(), HOSTILE[number]))


@given(data=st.data(), value=st.sampled_from(ODD))
@settings(deadline=None)
def test_manifest_odd_value_anywhere_is_refused_or_read(data: st.DataObject, value: Any) -> None:
    """No value in any place raises anything but CheckpointError."""
    body = json.loads(drawn(2).to_text())["body"]
    target: Any = body
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            target[key] = value
            break
        target = target[key]
    try:
        Manifest.from_text(module._render(body))
    except CheckpointError:
        return


def test_manifest_of_another_model_names_the_first_difference() -> None:
    """A tensor of another shape is shown as it is and as it should be."""
    manifest = drawn(3)
    manifest.check_model(manifest.model)
    first = manifest.model.tensors[0]
    other = replace(first, shape=(first.shape[0], first.shape[1] + 1))
    model = replace(manifest.model, tensors=(other, *manifest.model.tensors[1:]))
    with pytest.raises(CheckpointError, match=r"another model.*embed"):
        manifest.check_model(model)
    with pytest.raises(CheckpointError, match="another model"):
        manifest.check_model(random_model(random.Random(99)))


def test_manifest_missing_plane_says_which_there_are() -> None:
    """A job with masters does not take a checkpoint without."""
    with pytest.raises(CheckpointError, match=r"no plane 'master', only \['param', 'exp_avg'\]"):
        drawn(0).plane("master")


@given(st.sets(st.integers(0, 40)), st.integers(1, 9))
def test_runs_cover_blocks_in_order_and_none_is_longer(blocks: set[int], longest: int) -> None:
    """Together they are the blocks, ascending, each run of at most `longest`."""
    runs = runs_of_blocks(sorted(blocks), longest)
    assert sorted(blocks) == [b for r in runs for b in r]
    assert all(1 <= len(r) <= longest for r in runs)
