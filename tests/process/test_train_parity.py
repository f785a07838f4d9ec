"""Any layout trains the same model: beside a dense oracle, and beside an even layout."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan
from tests.support.bodies_train import Told, train
from tests.support.dense_llama import DenseTrainer
from tests.support.logical import Whole, assemble, is_equal, largest_difference, rms_difference
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import (
    GROUPED,
    WIDE,
    A,
    M,
    V,
    even,
    plan_of,
    scattered,
    text_for,
    train_config,
)

Ints = tuple[int, ...]

STEPS = 8
LOSS_TOLERANCE = 1e-6  # relative
# Adam divides by the gradient's size, so where a gradient is almost nothing its rounding decides.
PARAM_TOLERANCE = 2e-5  # absolute; parameters are about 0.1, a step is at most lr = 3e-3


@dataclass(frozen=True, slots=True)
class Error:
    """Distance from the oracle: of the losses, relative; of the parameters, absolute."""

    loss: float
    param: float  # largest
    param_rms: float


class Bench:
    """Runs jobs beside the oracle; oracle and even controls run once for all tests."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._dense: dict[tuple[LlamaConfig, int], tuple[list[float], list[float], Whole]] = {}
        self._controls: dict[tuple[LlamaConfig, Ints, Ints], Error] = {}

    def dense(self, model: LlamaConfig, batch: int) -> tuple[list[float], list[float], Whole]:
        """(losses, gradient norms, final weights) of the oracle in float64."""
        if (model, batch) not in self._dense:
            torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
            config = train_config(model)
            oracle = DenseTrainer(config, text_for(config), torch.float64)
            losses, norms = [], []
            for _ in range(STEPS):
                losses.append(oracle.train_step(batch))
                norms.append(oracle.grad_norm)
            weights = {n: w.detach() for n, w in oracle.weights.items()}
            self._dense[model, batch] = losses, norms, weights
        return self._dense[model, batch]

    def control(self, model: LlamaConfig, degrees: Ints, batches: Ints) -> Error:
        """Distance of the even layout of the same degrees and batches."""
        key = (model, degrees, batches)
        if key not in self._controls:
            self._controls[key] = self.error(model, even(model, degrees, batches))
        return self._controls[key]

    def error(self, model: LlamaConfig, plan: Plan) -> Error:
        """Distance of a plan; on the way, its replicas must be bit-identical after each step."""
        config = train_config(model)
        told: list[Told] = self._pool.run(
            train, len(plan.ranks), config=config, plan=plan, steps=STEPS
        )
        losses, norms, weights = self.dense(model, plan.global_batch)
        for step in range(STEPS):
            replicas = assemble(plan, model.units(), [t.params[step] for t in told])
            assert all(is_equal(replicas[0], other) for other in replicas[1:]), f"step {step + 1}"
        for t in told:
            assert told[0].losses == t.losses
            assert told[0].norms == t.norms
        assert pytest.approx(norms, rel=1e-5) == told[0].norms
        return Error(
            max(abs(a - b) / a for a, b in zip(losses, told[0].losses, strict=True)),
            largest_difference(weights, replicas[0]),
            rms_difference(weights, replicas[0]),
        )


@pytest.fixture(scope="module")
def bench(rank_pool: RankPool) -> Bench:
    """The oracle's and the controls' runs, shared by this file's tests."""
    return Bench(rank_pool)


def check_parity(ours: Error, control: Error | None = None) -> None:
    """Close to the oracle, and not further than a few times the even control is."""
    assert ours.loss <= LOSS_TOLERANCE
    assert ours.param <= PARAM_TOLERANCE
    if control is not None:
        assert ours.loss <= 4 * control.loss + 1e-7
        assert ours.param_rms <= 4 * control.param_rms + 1e-8


def test_parity_oracle_learns_and_clips(bench: Bench) -> None:
    """The oracle's run is worth comparing with: the loss falls, and gradients are clipped."""
    losses, norms, _ = bench.dense(GROUPED, 4)
    assert losses[-1] < losses[0] - 0.1
    assert min(norms) > train_config().clip_norm


@pytest.mark.parametrize("model", [GROUPED, WIDE], ids=["gqa", "mha"])
def test_parity_one_rank_equals_dense(bench: Bench, model: LlamaConfig) -> None:
    """One rank that holds all units trains like the oracle."""
    ours = bench.error(model, even(model, (1,), (4,)))
    check_parity(ours)


@pytest.mark.parametrize(
    ("model", "degrees", "batches"),
    [
        (GROUPED, (2,), (4,)),
        (GROUPED, (3, 2), (3, 1)),
        (WIDE, (4, 2), (3, 1)),
        (GROUPED, (2, 2, 1), (2, 1, 1)),
        (WIDE, (1, 1, 1), (1, 1, 2)),
    ],
    ids=["2", "3+2", "4+2", "2+2+1", "1+1+1"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_parity_random_uneven_layout_equals_dense(
    bench: Bench,
    model: LlamaConfig,
    degrees: Ints,
    batches: Ints,
    seed: int,
) -> None:
    """Random shares and scattered units, at any mix of degrees, train like the oracle."""
    ours = bench.error(model, scattered(random.Random(seed), model, degrees, batches))
    control = bench.control(model, degrees, batches)
    check_parity(ours, control)


@pytest.mark.parametrize("empty", [A, M, V])
def test_parity_rank_without_units_of_a_kind_equals_dense(bench: Bench, empty: str) -> None:
    """A rank may hold no heads, no columns or no vocab rows at all, also when it is the first."""
    full = {A: (3, 3), M: (5, 7), V: (5, 7)}
    lacking = {k: (0, sum(v)) if k == empty else v for k, v in full.items()}
    ours = bench.error(GROUPED, plan_of(GROUPED, [lacking, full], (1, 3)))
    check_parity(ours, bench.control(GROUPED, (2, 2), (1, 3)))


def test_parity_rank_without_any_unit_equals_dense(bench: Bench) -> None:
    """A rank that holds nothing but whole tensors takes part and changes nothing."""
    shares = {A: (4, 0, 2), M: (5, 0, 7), V: (6, 0, 6)}
    ours = bench.error(GROUPED, plan_of(GROUPED, [shares], (4,)))
    check_parity(ours, bench.control(GROUPED, (3,), (4,)))


@pytest.mark.parametrize("layer", [0, 1])
def test_parity_override_of_one_layer_equals_dense(bench: Bench, layer: int) -> None:
    """A layer may have a layout of its own, in one replica only."""
    plain = even(GROUPED, (2, 1), (2, 2))
    own = {
        (A, layer): Layout.of_units([[5, 0], [1, 2, 3, 4]]),
        (M, layer): Layout.contiguous((12, 0)),
    }
    plan = Plan.build(plain.counts, [replace(plain.replicas[0], overrides=own), plain.replicas[1]])
    check_parity(bench.error(GROUPED, plan), bench.control(GROUPED, (2, 1), (2, 2)))
