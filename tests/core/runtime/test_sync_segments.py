"""When sums start, in which order, and through which memory; no other process takes part."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ntp_core.errors import InvalidInput, ModelMismatch
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.shards import Shards, shards_of
from ntp_core.runtime.sync.modes import SyncMode, SyncOptions, gradient_sync, groups_of
from ntp_core.runtime.sync.segments import SegmentSync
from ntp_core.segments import launches
from ntp_core.units import ModelUnits, TensorSpec, UnitKind
from tests.support.fake_comm import DoublingComm
from tests.support.logical import cut
from tests.support.random_plans import random_model, random_plan

M = UnitKind.MLP
LAYERS = 4
UNITS = ModelUnits(
    counts={M: 4},
    tensors=(
        TensorSpec(name="gain", shape=(6,)),
        *(
            TensorSpec(name=f"{n}.{i}", shape=shape, kind=M, layer=i, dim=dim)
            for i in range(LAYERS)
            for n, shape, dim in (("up", (8, 6), 0), ("down", (6, 8), 1))
        ),
    ),
)


def plan_of(*degrees: int) -> Plan:
    """Even contiguous layouts over consecutive ranks."""
    replicas, first = [], 0
    for d in degrees:
        layout = Layout.contiguous([4 // d] * d)
        ranks = tuple(range(first, first + d))
        replicas.append(ReplicaPlan(ranks=ranks, layouts={M: layout}, batch=1))
        first += d
    return Plan.build(UNITS.counts, replicas)


def shards_for(plan: Plan) -> Shards:
    """Rank 0's parameters, ones."""
    shapes = {s.spec.name: s.shape for s in shards_of(UNITS, plan, 0)}
    params = {n: nn.Parameter(torch.ones(shape)) for n, shape in shapes.items()}
    return Shards(UNITS, plan, 0, params)


def forward(shards: Shards, *, skip: str = "") -> torch.Tensor:
    """A chain of layers, so that backward completes them from the last to the first."""
    w = {s.spec.name: p for s, p in shards}
    x = torch.ones(2, 6) * w["gain"]
    for i in range(LAYERS):
        if f"up.{i}" != skip:
            x = x + 1e-3 * (x @ w[f"up.{i}"].T) @ w[f"down.{i}"].T
    return x.sum()


def made(plan: Plan, **options: object) -> tuple[DoublingComm, Shards, SegmentSync]:
    """A sync of one bucket for each tensor, with what it talks to."""
    comm, shards = DoublingComm(len(plan.ranks)), shards_for(plan)
    sync = SegmentSync(comm, shards, 1, **options)  # type: ignore[arg-type]
    return comm, shards, sync


def grads(shards: Shards) -> list[torch.Tensor]:
    """Copies of all gradients."""
    return [p.grad.clone() for p in shards.params if p.grad is not None]


def test_overlap_starts_sums_during_backward_last_layer_first() -> None:
    """All but the sums of the first layer's last gradients are under way before backward ends."""
    comm, shards, sync = made(plan_of(1, 1), overlap=True)
    started_by: dict[str, int] = {}

    def watch(name: str, param: nn.Parameter) -> None:
        def note(_: torch.Tensor) -> None:
            started_by[name] = len(comm.started)

        param.register_post_accumulate_grad_hook(note)

    for shard, param in shards:
        watch(shard.spec.name, param)
    sync.arm()
    forward(shards).backward()
    assert started_by["down.3"] < started_by["up.2"] < started_by["up.0"]
    assert len(comm.started) == 2 * LAYERS + 1
    assert comm.finished == []
    sync.run()
    assert comm.started == comm.finished


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1)])
@pytest.mark.parametrize("overlap", [False, True])
def test_sums_reach_all_gradients_and_nothing_starts_unarmed(
    degrees: tuple[int, ...], overlap: bool
) -> None:
    """Micro-batches before the last only accumulate; then each gradient is summed once."""
    comm, shards, sync = made(plan_of(*degrees), overlap=overlap)
    for _ in range(2):  # buffers are used again
        comm.started.clear()
        for param in shards.params:
            param.grad = None
        forward(shards).backward()
        assert comm.started == []
        (single,) = [grads(shards)]
        sync.arm()
        forward(shards).backward()
        sync.run()
        for one, now in zip(single, grads(shards), strict=True):
            torch.testing.assert_close(now, 4 * one)


def test_overlap_waits_for_a_gradient_that_never_comes() -> None:
    """Order is kept: what follows an unused parameter starts in `run`, which gives it zeros."""
    comm, shards, sync = made(plan_of(1, 1), overlap=True)
    sync.arm()
    forward(shards, skip="up.2").backward()
    assert len(comm.started) == 2, "both of layer 3"
    sync.run()
    assert len(comm.finished) == 2 * LAYERS + 1
    w = {s.spec.name: p for s, p in shards}
    assert torch.equal(torch.zeros(8, 6), w["up.2"].grad)


def test_overlap_refuses_a_gradient_that_comes_twice() -> None:
    """A layer whose backward runs twice would change a sum under way: an error, not a wrong sum."""
    _, shards, sync = made(plan_of(1, 1), overlap=True)
    up = next(p for s, p in shards if s.spec.name == "up.3")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x @ up.T

    sync.arm()
    x = torch.ones(2, 6, requires_grad=True)
    parts = [checkpoint(layer, x, use_reentrant=True) for _ in range(2)]
    with pytest.raises(ModelMismatch, match="came twice"):
        (parts[0].sum() + parts[1].sum()).backward()


def test_overlap_of_one_replica_waits_for_the_end() -> None:
    """Its sums may use the layers' own group, where only one order is safe."""
    units = ModelUnits(
        counts=UNITS.counts,
        tensors=(TensorSpec(name="q_norm", shape=(6,), partial_grad=True), *UNITS.tensors[1:]),
    )
    plan = plan_of(2)
    params = {s.spec.name: nn.Parameter(torch.ones(s.shape)) for s in shards_of(units, plan, 0)}
    comm, shards = DoublingComm(), Shards(units, plan, 0, params)
    sync = SegmentSync(comm, shards, 1, overlap=True)
    sync.arm()
    (params["q_norm"].sum() * 3).backward()
    assert comm.started == []
    sync.run()
    assert comm.finished == [(0, 1)]
    assert torch.equal(torch.full((6,), 6.0), params["q_norm"].grad)


def test_closed_sync_leaves_parameters_alone() -> None:
    """After a change of plan the old hooks are gone."""
    comm, shards, sync = made(plan_of(1, 1), overlap=True)
    sync.arm()
    sync.close()
    forward(shards).backward()
    assert comm.started == []


def test_single_contiguous_range_is_summed_in_place() -> None:
    """One range of one gradient needs no buffer: the sum runs in the gradient's own memory."""
    comm, shards, sync = made(plan_of(1, 2))
    forward(shards).backward()
    first = next(p for s, p in shards if s.spec.name == f"up.{LAYERS - 1}")
    own, half = first.grad.data_ptr(), first.grad[4:].data_ptr()
    down = next(p for s, p in shards if s.spec.name == f"down.{LAYERS - 1}")
    sync.run()
    up_sums = comm.addresses[2:4]  # the two groups' sums of up.3 follow those of down.3
    assert [own, half] == up_sums
    memory = range(down.grad.data_ptr(), down.grad.data_ptr() + 4 * down.numel())
    assert not [a for a in comm.addresses[:2] if a in memory], "columns go through a buffer"


def test_buffers_are_allocated_once_and_become_the_gradients() -> None:
    """In one bucket, whole gradients are views of one buffer, the same in every step."""
    comm, shards = DoublingComm(), shards_for(plan_of(1, 1))
    sync = SegmentSync(comm, shards)
    places = []
    for _ in range(3):
        for param in shards.params:
            param.grad = None
        forward(shards).backward()
        sync.run()
        places.append([p.grad.data_ptr() for s, p in shards if s.spec.kind is not None])
    assert all(a == b for a, b in pairwise(places))
    cut = sorted(p.grad.data_ptr() for s, p in shards if s.spec.kind is not None)
    assert [b - a for a, b in pairwise(cut)] == [48 * 4] * (2 * LAYERS - 1)


def test_gradients_of_earlier_steps_are_let_go() -> None:
    """What somebody kept of a step stays as it was: later sums are not copied into it."""
    _, shards, sync = made(plan_of(1, 2))
    down = next(p for s, p in shards if s.spec.name == "down.0")  # columns: copied there and back
    kept = []
    for _ in range(2):
        for param in shards.params:
            param.grad = None
        forward(shards).backward()
        sync.run()
        kept.append((down.grad, down.grad.clone()))
        down.data.mul_(3)
        shards.params[0].data.add_(1)  # other gradients in the next step
    assert not torch.equal(kept[0][1], kept[1][1])
    assert torch.equal(kept[0][0], kept[0][1])


def test_frozen_parameters_are_left_out() -> None:
    """A parameter that is not trained has no gradient to sum."""
    comm, shards = DoublingComm(), shards_for(plan_of(1, 1))
    for shard, param in shards:
        param.requires_grad_(shard.spec.name.startswith("up"))
    sync = SegmentSync(comm, shards, 1, overlap=True)
    sync.arm()
    forward(shards).backward()
    sync.run()
    assert len(comm.finished) == LAYERS
    assert len(grads(shards)) == LAYERS


def test_groups_of_each_mode_are_what_its_sync_uses() -> None:
    """Replicas always; then owners of segments, or lanes."""
    shards = shards_for(plan_of(4, 2))
    replicas = {(0, 1, 2, 3), (4, 5)}
    segments = {(0, 4), (1, 4), (2, 5), (3, 5)}
    assert replicas | segments == set(groups_of(shards))
    assert replicas | {(0, 4), (1, 5)} == set(groups_of(shards, SyncMode.RESHARD))


def test_options_refuse_a_bucket_of_nothing() -> None:
    """The error says what to give."""
    with pytest.raises(InvalidInput, match="bucket_bytes"):
        SyncOptions(bucket_bytes=0)


def test_reshard_refuses_mixed_element_types() -> None:
    """One buffer has one type; segments take them apart."""
    shards = shards_for(plan_of(1, 1))
    shards.params[1].data = shards.params[1].data.double()
    with pytest.raises(ModelMismatch, match="one element type"):
        gradient_sync(DoublingComm(), shards, SyncOptions(mode=SyncMode.RESHARD))
    forward_sum = sum(p.double().sum() for p in shards.params)
    comm = DoublingComm()
    sync = SegmentSync(comm, shards)
    forward_sum.backward()
    sync.run()
    assert all(bool((p.grad == 2).all()) for p in shards.params)
    assert comm.finished == [(0, 1)] * 3, "float32, float64, whole"


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("seed", range(30))
def test_every_rank_of_a_sum_lays_the_same_elements_at_the_same_places(
    seed: int, bucket_bytes: int
) -> None:
    """Element by element, at any layouts: fused parts, columns, shared blocks, holes."""
    draw = random.Random(seed)
    base = random_model(draw)
    mlp = 2 * base.counts[M]
    more = (
        TensorSpec(name="down_fused", shape=(3, 2 * mlp), kind=M, dim=1, parts=2),
        TensorSpec(name="down_three", shape=(2, 3 * mlp), kind=M, dim=1, parts=3),
        TensorSpec(name="shared", shape=(mlp, 3), kind=M, sharing=base.counts[M]),
    )
    model = ModelUnits(counts=base.counts, tensors=(*base.tensors, *more))
    plan = random_plan(draw, model, [draw.randint(1, 3) for _ in range(draw.randint(2, 3))])
    first, whole = 0, {}
    for t in model.tensors:  # each element of the model is a number of its own
        whole[t.name] = torch.arange(first, first + t.numel, dtype=torch.float32).view(t.shape)
        first += t.numel
    order = [x.ranks for x in launches(plan, model, bucket_bytes)]
    given: dict[int, list[torch.Tensor]] = {}
    for rank in plan.ranks:
        local = cut(plan, model, rank, whole)
        shards = Shards(
            model, plan, rank, {n: nn.Parameter(torch.zeros_like(g)) for n, g in local.items()}
        )
        for shard, param in shards:
            param.grad = local[shard.spec.name]
        comm = DoublingComm(len(plan.ranks))
        SegmentSync(comm, shards, bucket_bytes).run()
        assert [ranks for ranks in order if rank in ranks] == comm.started
        given[rank] = comm.given
    for ranks in order:
        together = [given[g].pop(0) for g in ranks]
        assert all(len(x) == len(together[0]) for x in together)
        for x in together:  # zeros: where another rank of the replica speaks
            assert bool(((x == together[0]) | (x == 0) | (together[0] == 0)).all())
