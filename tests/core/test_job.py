"""Jobs as data: read back equal, refused with the name of what is wrong."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import InvalidInput
from ntp_core.job import JobConfig, SaveConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.units import UnitKind

MODEL = LlamaConfig(width=48, heads=12, kv_heads=6, ffn=48, mlp_block=4, vocab_block=24)
JOB = JobConfig(train=TrainConfig(model=MODEL), plan=even_plan(MODEL, (3, 2), 10), steps=4)
TRAIN_FIELDS = tuple(f.name for f in fields(TrainConfig))
MODEL_FIELDS = tuple(f.name for f in fields(LlamaConfig))
ODD = st.sampled_from([None, "x", [], {}, -1, 0, 1.5, float("nan"), float("inf"), [1, 2], 10**30])


def test_job_round_trip() -> None:
    """What was written is read back equal."""
    saving = replace(JOB, save=SaveConfig(folder="saved", every=3, keep=1, resume=False))
    low = replace(JOB, train=replace(JOB.train, param_dtype="bfloat16", zero=True, recompute=True))
    for job in (JOB, replace(JOB, obey_faults=True, steps=0), saving, low):
        assert job == JobConfig.from_json(job.to_json())


@given(where=st.sampled_from(["job", "train", "model"]), name=st.data(), value=ODD)
@settings(deadline=None)
def test_job_odd_value_in_any_field_is_refused_or_read(
    where: str, name: st.DataObject, value: Any
) -> None:
    """No value in any field raises anything but InvalidInput."""
    body = json.loads(JOB.to_json())
    names = {"job": tuple(body), "train": TRAIN_FIELDS, "model": MODEL_FIELDS}[where]
    target = {"job": body, "train": body["train"], "model": body["train"]["model"]}[where]
    target[name.draw(st.sampled_from(names))] = value
    try:
        JobConfig.from_json(json.dumps(body))
    except InvalidInput:
        return


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": 0}, "seq = 0"),
        ({"seq": 2.5}, "seq = 2.5"),
        ({"check_every": -1}, "check_every = -1"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0"),
        ({"micro_batch": -1}, "micro_batch = -1"),
        ({"param_dtype": "int8"}, "param_dtype = 'int8'"),
        ({"grad_dtype": ["float32"]}, "grad_dtype = "),
    ],
)
def test_train_config_impossible_value_is_named(changes: dict[str, Any], message: str) -> None:
    """The field and its value stand in the message."""
    with pytest.raises(InvalidInput, match=message):
        TrainConfig(model=MODEL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folder": ""}, "folder = ''"),
        ({"folder": 3}, "folder = 3"),
        ({"every": -1}, "every = -1"),
        ({"keep": 0}, "keep = 0"),
    ],
)
def test_save_config_impossible_value_is_named(changes: dict[str, Any], message: str) -> None:
    """The field and its value stand in the message."""
    with pytest.raises(InvalidInput, match=message):
        SaveConfig(**{"folder": "saved"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": "a"}, "norm_eps = 'a'"),
        ({"norm_eps": 0}, "norm_eps = 0"),
        ({"init_std": float("nan")}, "init_std = nan"),
        ({"init_std": -1.0}, "init_std = -1.0"),
        ({"rope_base": 0}, "rope_base = 0"),
        ({"rope_base": float("inf")}, "rope_base = inf"),
        ({"vocab": 10**12}, f"vocab = {10**12}"),
        ({"vocab": 256.0}, "vocab = 256.0"),
        ({"layers": 10**6}, f"layers = {10**6}"),
        ({"width": True}, "width = True"),
    ],
)
def test_model_impossible_value_is_named(changes: dict[str, Any], message: str) -> None:
    """The field and its value stand in the message, and what to give instead."""
    with pytest.raises(InvalidInput, match=f"^{message}; give "):
        LlamaConfig(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1),
        ("steps", 2.7),
        ("steps", "4"),
        ("steps", True),
        ("obey_faults", "false"),
        ("obey_faults", 0),
        ("calibrate", None),
    ],
)
def test_job_file_with_an_impossible_value_is_refused_by_name(name: str, value: object) -> None:
    """Nothing is rounded, and no text is true."""
    body = json.loads(JOB.to_json())
    body[name] = value
    with pytest.raises(InvalidInput, match=f"^{name} = {value!r}; give "):
        JobConfig.from_json(json.dumps(body))


@pytest.mark.parametrize(
    ("degrees", "batch", "message"),
    [
        ((0, 1), 4, r"degrees\[0\] = 0"),
        ((1, -2), 4, r"degrees\[1\] = -2"),
        ((1.5,), 4, r"degrees\[0\] = 1.5"),
        ((), 4, "degrees = "),
        ((1, 1, 1), 2, "batch = 2"),
        ((1,), 0, "batch = 0"),
    ],
)
def test_even_plan_for_no_ranks_or_too_few_sequences_is_refused(
    degrees: tuple[int, ...], batch: int, message: str
) -> None:
    """Each replica needs a rank and a sequence."""
    with pytest.raises(InvalidInput, match=message):
        even_plan(MODEL, degrees, batch)


def test_even_plan_deals_units_and_batch_by_degree() -> None:
    """3 + 2 ranks take 6 and 4 of 10 sequences, and shares differ by one at most."""
    plan = JOB.plan
    assert [r.batch for r in plan.replicas] == [6, 4]
    assert [r.ranks for r in plan.replicas] == [(0, 1, 2), (3, 4)]
    for r in plan.replicas:
        for layout in r.layouts.values():
            assert max(layout.shares) - min(layout.shares) <= 1
    assert plan.counts == {UnitKind.ATTENTION: 6, UnitKind.MLP: 12, UnitKind.VOCAB: 11}
