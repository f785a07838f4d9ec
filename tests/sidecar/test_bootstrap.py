"""The bootstrap in real interpreters: who becomes a rank, what is seen, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.checks.dead_rank import DeadRank
from sidecar.ingest.job import JobIngest
from sidecar.launch import child_environment
from tests.support.rings import run_dir_in

pytest.importorskip("torch")


def _run(run_dir: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    additions = {"NTP_SIDECAR_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, *args, "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
        env=child_environment(additions),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    return run_dir_in(tmp_path)


TRAIN = """
import torch
def train(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.utils.data.DataLoader(torch.ones(8 * steps, 4), batch_size=8)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        other.step()
"""


def test_plain_script_becomes_a_lone_rank_at_its_first_step(run_dir: Path):
    """Steps, losses and phases; a second optimizer does not count steps of its own. Forked
    children, children that only import torch, and children that multiprocessing spawned and that
    train something of their own are no ranks."""
    script = (
        TRAIN
        + """
import os, subprocess, sys
train(3)
if os.fork() == 0:
    train(2)
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""
    )
    done = _run(run_dir, script)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    ingest = JobIngest(run_dir)
    ingest.tick()
    (rank,) = ingest.job.ranks.values()
    assert (rank.rank, rank.world_size, rank.step, rank.exited) == (0, 1, 3, 0)
    assert rank.loss is not None
    assert rank.loss > 0.0
    assert set(rank.phase_ns_total) == {1, 2, 3, 6}
    assert len(list(run_dir.glob("*.ring"))) == 1
    assert (rank.probe_cost_events, ingest.job.bad_records) == (200, 0)


def test_job_that_reports_itself_is_not_counted_twice(run_dir: Path):
    """An explicit attach without hooks silences those that are there, before and after."""
    script = (
        TRAIN
        + """
from sidecar.probe.attach import attach, current
train(2)
hooked = current()
observer = attach(hooks=False)
assert observer is hooked
train(5)
observer.step_begin(10)
observer.step_end(10, 5, 5, 1, 1.0)
"""
    )
    done = _run(run_dir, script)
    assert (done.returncode, done.stderr) == (0, "")
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert [s.step for s in ingest.job.ranks[0].steps] == [1, 2, 10]


def test_failing_hook_never_reaches_the_job(run_dir: Path):
    """A hook that breaks is switched off after a few errors; the job sees none of them."""
    script = (
        TRAIN
        + """
import sidecar.probe.attach as attach
def broken(*args):
    raise RuntimeError("planted")
for hook in attach._process.torch_hooks.hooks.values():
    hook._body = broken
train(12)
hooks = attach._process.torch_hooks.hooks
print(hooks["optimizer end"].errors, "planted" in hooks["backward begin"].first_error)
"""
    )
    done = _run(run_dir, script)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "8 True\n")
    assert list(run_dir.iterdir()) == []


def test_disabled_bootstrap_does_nothing(run_dir: Path):
    """Not even look for torch."""
    script = "import sys; print([f for f in sys.meta_path if 'Torch' in str(f)])"
    assert _run(run_dir, script, NTP_SIDECAR_DISABLE="1").stdout == "[]\n"
    assert "Torch" in _run(run_dir, script).stdout


def test_shadowed_sitecustomize_still_runs(run_dir: Path, tmp_path: Path):
    """Also when it fails: then Python goes on, and says so."""
    place = tmp_path / "theirs"
    place.mkdir()
    (place / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__")
    env = child_environment({}, {**os.environ, "PYTHONPATH": str(place)})
    script = "import sitecustomize; print(theirs == sitecustomize.__file__)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
    (place / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1\n"
    assert "RuntimeError: theirs" in done.stderr


def test_start_of_a_python_without_torch_loads_next_to_nothing(run_dir: Path):
    """Every helper process of a job pays for what the bootstrap imports."""
    script = "import sys; print(*sys.modules)"
    plain = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    added = set(_run(run_dir, script).stdout.split()) - set(plain.stdout.split())
    assert added <= {"sitecustomize", "__future__", "importlib.machinery"}


def test_environment_without_our_package_finds_the_project_last(run_dir: Path, tmp_path: Path):
    """A stand-in for torch in a bare interpreter: the probe comes from the project, at the end."""
    (tmp_path / "torch.py").write_text("")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
before = list(sys.path)
import torch
assert sys.path[:-1] == before, sys.path
print("sidecar.probe.attach" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize\n" + script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=child_environment({"NTP_SIDECAR_RUN_DIR": str(run_dir)}),
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_wrapped_functions_keep_their_names_and_compile_whole(run_dir: Path):
    """The compiler meets the original collective: no graph break."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.all_reduce.__name__ == "all_reduce"
@torch.compile(backend="eager", fullgraph=True)
def f(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1
print(f(torch.ones(2)).tolist())
dist.all_reduce(torch.ones(4))
dist.all_gather([torch.empty(2)], torch.ones(2))
dist.barrier(group=None)
work = dist.all_reduce(torch.ones(1), async_op=True)
work.wait()
try:
    dist.all_reduce("nonsense")
except TypeError:
    pass
dist.destroy_process_group()
"""
    done = _run(run_dir, script, "-W", "ignore")
    assert (done.returncode, done.stdout) == (0, "[3.0, 3.0]\n"), done.stderr
    ingest = JobIngest(run_dir)
    ingest.tick()
    (rank,) = ingest.job.ranks.values()
    got = {op: (t.count, t.num_bytes) for op, t in rank.ops.items()}
    assert got == {1: (2, 20), 2: (1, 8), 6: (1, 0)}
    assert rank.collective is None


CAUGHT = """
try:
    sys.exit(3)
except SystemExit:
    pass
"""
IN_A_THREAD = """
thread = threading.Thread(target=lambda: sys.exit(3))
thread.start()
thread.join()
"""
FORKED = """
import os
if os.fork() == 0:
    raise SystemExit(8)
os.wait()
"""
EMBEDDED = "import ctypes\nctypes.pythonapi.Py_Exit(9)\n"
STEPS_AFTER = CAUGHT + "train(2)\nraise SystemExit(0)\n"


@pytest.mark.parametrize(
    ("end", "status", "is_fault"),
    [
        ("", 0, False),
        ("sys.exit()", 0, False),
        ("sys.exit(None)", 0, False),
        ("sys.exit(0)", 0, False),
        ("sys.exit(3)", 3, True),
        ("sys.exit(-1)", 255, True),
        ("sys.exit('bad')", 1, True),
        ("def f(): train(1); return 8\nsys.exit(f())", 8, True),
        ("exit(4)", 4, True),
        ("raise ValueError('bad')", 1, True),
        ("raise KeyboardInterrupt", 130, True),
        (CAUGHT, 0, False),
        (IN_A_THREAD, 0, False),
        # What Python does not tell, the C library notes.
        ("raise SystemExit(3)", 3, True),
        ("raise SystemExit(-1)", 255, True),
        ("raise SystemExit(None)", 0, False),
        ("raise SystemExit", 0, False),
        ("raise SystemExit('bad')", 1, True),
        ("raise SystemExit(256 + 7)", 7, True),
        (STEPS_AFTER, 0, False),
        (FORKED + "raise SystemExit(5)", 5, True),
        (EMBEDDED, 9, True),
    ],
)
def test_exit_status_is_the_true_one_or_unknown(
    run_dir: Path, end: str, status: int, is_fault: bool
):
    """What the operating system is told is what the ring says, and a failure is a dead rank."""
    done = _run(
        run_dir,
        "import sys, threading\n" + TRAIN + ("" if "train(1)" in end else "train(1)\n") + end,
    )
    assert status in (-1, done.returncode % 256) or done.returncode == -2
    ingest = JobIngest(run_dir)
    ingest.tick()
    (rank,) = ingest.job.ranks.values()
    assert (rank.exited, rank.alive) == (status, False)
    assert is_fault == bool(DeadRank().run(ingest.job, 0))


@pytest.mark.parametrize(
    ("has_bootstrap", "last_line"),
    [(True, "sys.exit(main())"), (False, "code = main(); sys.exit(code)")],
    ids=["run", "own launcher"],
)
def test_exit_status_of_a_program_on_the_engine_is_known(
    run_dir: Path, tmp_path: Path, has_bootstrap: bool, last_line: str
):
    """Attached inside `main` by NTP_OBSERVER's function; run as a module, as the engine's is.

    Without the bootstrap `sys.exit` must be looked up after `main`, as in `runtime.train`."""
    program = (
        "import sys\n"
        "from sidecar.probe.attach import attach_engine\n"
        "def main():\n"
        "    attach_engine().step_begin(1)\n"
        "    return 5\n"
        f"if __name__ == '__main__':\n    {last_line}\n"
    )
    (tmp_path / "program.py").write_text(program)
    additions = {"NTP_SIDECAR_RUN_DIR": str(run_dir)}
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    env = child_environment(additions, paths) if has_bootstrap else {**paths, **additions}
    command = [sys.executable, "-m", "program"]
    assert subprocess.run(command, env=env, timeout=90).returncode == 5
    ingest = JobIngest(run_dir)
    ingest.tick()
    (rank,) = ingest.job.ranks.values()
    assert rank.exited == 5
    assert DeadRank().run(ingest.job, 0)


def test_wrapped_ways_out_look_like_the_originals(run_dir: Path):
    """Name, module and pickle of `sys.exit` are unchanged, and so is what it raises."""
    script = TRAIN + (
        "import pickle, sys\n"
        "train(1)\n"
        "assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit\n"
        "assert (sys.exit.__name__, sys.exit.__module__) == ('exit', 'sys')\n"
        "try:\n"
        "    sys.exit((1, 2))\n"
        "except SystemExit as error:\n"
        "    print(error.code)\n"
    )
    done = _run(run_dir, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 2)\n", "")
