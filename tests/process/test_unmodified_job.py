"""A script that knows nothing of us, under torchrun, two gloo ranks: both are seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ntp_core.observe import Op, Phase
from sidecar.ingest.job import JobIngest
from tests.support.rings import run_dir_in

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
    loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context=sys.argv[1])
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
STEPS, TENSORS, TENSOR_BYTES = 5, 2, 4 * (8 + 1)

# run_command forwards signals, so it runs in a process of its own here
LAUNCH = """
import sys
from sidecar.launch import run_command
env = {"NTP_SIDECAR_RUN_DIR": sys.argv[1], "OMP_NUM_THREADS": "1"}
sys.exit(run_command(sys.argv[2:], env))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", ["fork", "spawn"])
def test_steps_and_collectives_of_both_ranks_are_seen(tmp_path: Path, workers: str):
    """Data loader workers, of either kind, and the torchrun agent are no ranks."""
    run_dir = run_dir_in(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LAUNCH,
            str(run_dir),
            sys.executable,
            *torchrun,
            script,
            workers,
            str(tmp_path / "saved.pt"),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "ntp-sidecar" not in done.stderr
    ingest = JobIngest(run_dir)
    ingest.tick()
    job = ingest.job
    assert sorted(job.ranks) == [0, 1]
    assert len(list(run_dir.iterdir())) == 2
    assert (job.ranks[0].saved_ns > 0, job.ranks[1].saved_ns) == (True, 0)
    assert not job.ranks[0].is_saving
    for rank in job.ranks.values():
        assert [s.step for s in rank.steps] == list(range(1, STEPS + 1))
        assert rank.ops[Op.ALL_REDUCE].count == STEPS * TENSORS
        assert rank.ops[Op.ALL_REDUCE].num_bytes == STEPS * TENSOR_BYTES
        assert rank.ops[Op.BARRIER].count == 1
        assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(
            rank.phase_ns_total
        )
        assert all(0 < s.busy_ns <= s.duration_ns for s in rank.steps)
        assert (rank.exited, rank.alive, rank.collective) == (0, False, None)
    assert (job.bad_rings, job.bad_records) == (0, 0)
