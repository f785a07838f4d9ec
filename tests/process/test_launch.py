"""Ways to start an elastic job: ranks die and return under each, and the job ends well.

Real processes: our launcher, one torchrun agent per rank, Slurm's batch script with an `srun` that
only starts processes. Real Slurm is not run here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from ntp_core.runtime.launch import LocalRanks
from tests.support.elastic_job import WAIT_S, ElasticJob
from tests.support.rank_pool import ROOT
from tests.support.servers import wait_until

DEGREES = (2, 1)
LAUNCH = [sys.executable, "-m", "ntp_core.runtime.launch"]
STORE = [sys.executable, "-m", "ntp_core.runtime.elastic.store"]
AGENT = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]

pytestmark = pytest.mark.timeout(150)


@contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test, nor do its children."""
    process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        env=environ,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


@contextmanager
def store() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store of its own, and NTP_STORE for it."""
    with started(STORE) as process:
        assert process.stdout is not None
        name, _, address = process.stdout.readline().strip().partition("=")
        assert name == "NTP_STORE"
        yield process, address


def launched(*flags: str, code: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """The launcher over ranks that run one line of Python."""
    command = [*LAUNCH, *flags, "--", sys.executable, "-S", "-c", f"import os, signal; {code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def deaths(stderr: str) -> list[str]:
    """What the launcher told of deaths."""
    return [x for x in stderr.splitlines() if x.startswith("launch: rank ")]


# -- our launcher


def test_launch_rank_killed_twice_returns_once_and_the_job_ends_well(tmp_path: Path) -> None:
    """The others never stop; one return was allowed; each death is one line; the status is 0."""
    job = ElasticJob(tmp_path, DEGREES)
    command = [*LAUNCH, "--ranks", "3", "--elastic", "--respawn", "1", "--", *job.command]
    with started(command, job.environ) as launcher:
        job.wait_for_steps(0, 1, 2)
        first, others = job.pid(1), (job.pid(0), job.pid(2))
        os.kill(first, signal.SIGKILL)
        job.wait_for_steps(0, 2)
        job.wait_for_other(1, first)
        os.kill(job.pid(1), signal.SIGKILL)
        job.wait_for_steps(0, 2)
        assert (job.pid(0), job.pid(2)) == others
        job.stop()
        _, said = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 0, said
    assert said.splitlines() == [
        "launch: rank 1 was ended by SIGKILL; 2 run; started again in 1 s (1 of 1)",
        "launch: rank 1 was ended by SIGKILL; 2 run",
    ]


KILL_ONE = "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
LEAVE_BY_RANK = "os._exit(3 + int(os.environ['RANK']))"


@pytest.mark.parametrize(
    ("flags", "code", "status", "told"),
    [
        ((), KILL_ONE, 128 + signal.SIGKILL, ["rank 1 was ended by SIGKILL"]),
        (("--elastic",), KILL_ONE, 0, ["rank 1 was ended by SIGKILL"]),
        (("--elastic", "--respawn", "0"), LEAVE_BY_RANK, 3, ["rank 0 ended", "rank 1 ended"]),
        (("--elastic", "--respawn", "9"), LEAVE_BY_RANK, 3, ["rank 0 ended", "rank 1 ended"]),
    ],
    ids=["one killed", "one killed, elastic", "all dead", "all dead, respawn"],
)
def test_launch_status_is_that_of_the_job(
    flags: tuple[str, ...], code: str, status: int, told: list[str]
) -> None:
    """An elastic job is well when anybody ended well; without it the first bad status counts."""
    done = launched("--ranks", "2", *flags, code=code)
    assert done.returncode == status, done.stderr
    lines = sorted(deaths(done.stderr))
    assert [x.removeprefix("launch: ").startswith(t) for x, t in zip(lines, told, strict=True)]


def test_launch_rank_is_started_again_and_ends_well(tmp_path: Path) -> None:
    """A rank that dies at its first start only; its return is waited for while another runs."""
    seen, go = tmp_path / "seen", tmp_path / "go"
    os.mkfifo(go)
    first = f"os.path.exists({str(seen)!r}) or (open({str(seen)!r}, 'w'), os._exit(5))"
    again = f"open({str(go)!r}, 'w').close()"
    code = f"open({str(go)!r}).read() if os.environ['RANK'] == '0' else ({first}, {again})"
    done = launched("--ranks", "2", "--respawn", "1", code=code)
    assert done.returncode == 0, done.stderr
    assert deaths(done.stderr) == [
        "launch: rank 1 ended with status 5; 1 run; started again in 1 s (1 of 1)"
    ]


def test_launch_elastic_under_the_sidecar_passes_its_status_on() -> None:
    """`ntp-sidecar run` with our launcher inside: the job's status is the sidecar's."""
    run = [sys.executable, "-m", "sidecar", "run", "--port", "0", "--"]
    rank = ["--", sys.executable, "-c", f"import os, signal; {KILL_ONE}"]
    command = [*run, *LAUNCH, "--ranks", "2", "--elastic", *rank]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    (line,) = deaths(done.stderr)
    assert line.startswith("launch: rank 1 was ended by SIGKILL; ")


# -- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ranks", "0"), "--ranks 0: give at least 1"),
        (("--ranks", "-3"), "--ranks -3: give at least 1"),
        (("--ranks", "two"), "invalid int value: 'two'"),
        (("--ranks", "2", "--respawn", "-1"), "--respawn -1: give 0 or more"),
        ((), "the following arguments are required: --ranks"),
    ],
)
def test_launch_bad_numbers_end_it_before_a_rank_starts(
    flags: tuple[str, ...], message: str
) -> None:
    """Status 2, usage and one line."""
    done = launched(*flags, code="print('started')")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags", [("--port", "70000"), ("--port", "-1"), ("--port", "x")])
def test_store_bad_port_ends_it(flags: tuple[str, ...]) -> None:
    """Status 2 and one line after the usage."""
    done = subprocess.run([*STORE, *flags], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--port" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_store_that_cannot_listen_says_so_in_one_line(host: str) -> None:
    """The port is taken; the host is not ours."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*STORE, "--host", host, "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"store: cannot listen on {host}:{port}: ")
    assert done.stderr.count("\n") == 1


def test_store_listens_on_loopback_alone_and_ends_when_told() -> None:
    """Whoever reaches the port is trusted, so nobody does unless asked for."""
    with store() as (process, address):
        listening = [c for c in psutil.Process(process.pid).net_connections() if not c.raddr]
        assert [f"{c.laddr.ip}:{c.laddr.port}" for c in listening] == [address]
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NTP_RANK": "x"}, "NTP_RANK='x': give a whole number"),
        ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS='0': give a whole number"),
        ({"NTP_STORE": "nowhere"}, "NTP_STORE='nowhere': give host:port"),
        ({}, "needs a store outside its ranks"),
    ],
)
def test_rank_without_a_place_or_store_says_so_in_one_line(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    """Status 2; the variable that is wrong is named."""
    job = ElasticJob(tmp_path, DEGREES)
    environ = {**job.environ, **variables}
    done = subprocess.run(job.command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("train: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


# -- the store's end


def test_store_killed_ends_all_ranks_in_one_line_each(tmp_path: Path) -> None:
    """Nobody hangs: without the store no rank could be let in, and no loss be survived."""
    job = ElasticJob(tmp_path, DEGREES)
    command = ["sh", "-c", f'exec "$@" 2> "{tmp_path}/stderr-$RANK"', "rank", *job.command]
    with (
        store() as (process, address),
        LocalRanks(command, 3, {**job.env, "NTP_STORE": address}) as ranks,
    ):
        job.wait_for_steps(0, 1, 2)
        process.kill()
        codes = ranks.wait(WAIT_S)
    said = [(tmp_path / f"stderr-{rank}").read_text() for rank in range(3)]
    assert codes == [1, 1, 1], said
    for text in said:
        assert text.startswith(f"train: StoreLost: the store at {address} is gone"), text
        assert text.count("\n") == 1, text


# -- one torchrun agent per rank


def test_torchrun_agent_restarts_its_rank_and_it_returns(tmp_path: Path) -> None:
    """No agent touches the ranks of others: each knows of one rank only, the job of three."""
    job = ElasticJob(tmp_path, DEGREES)
    agent = [*AGENT, "--nproc-per-node=1", "--max-restarts=2", *job.program]
    with ExitStack() as stack:
        _, address = stack.enter_context(store())
        names = {"NTP_WORLD_SIZE": "3", "NTP_STORE": address}
        agents = [
            stack.enter_context(started(agent, {**job.environ, **names, "NTP_RANK": str(rank)}))
            for rank in range(3)
        ]
        job.wait_for_steps(0, 1, 2)
        killed, others = job.pid(1), (job.pid(0), job.pid(2))
        os.kill(killed, signal.SIGKILL)
        job.wait_for_other(1, killed)
        job.wait_for_steps(0, 1, 2)
        assert (job.pid(0), job.pid(2)) == others
        job.stop()
        said = [a.communicate(timeout=WAIT_S)[1] for a in agents]
    assert [a.returncode for a in agents] == [0, 0, 0], said


# -- Slurm

SRUN = """\
    #!{python}
    import os, subprocess, sys
    n = int(os.environ["SLURM_NTASKS"])
    command = [a for a in sys.argv[1:]]
    with open({told!r}, "w") as told:
        while command[0].startswith("-"):
            told.write(command.pop(0) + "\\n")
    tasks = [
        subprocess.Popen(command, env=dict(os.environ, SLURM_PROCID=str(rank)))
        for rank in range(n)
    ]
    sys.exit(max(128 - c if c < 0 else c for c in [t.wait() for t in tasks]))
"""


def test_slurm_script_bears_the_loss_of_a_task(tmp_path: Path) -> None:
    """The batch script with an srun that starts a process per task: status 0, no store is left."""
    job = ElasticJob(tmp_path, DEGREES)
    srun, told = tmp_path / "bin" / "srun", tmp_path / "srun-flags"
    srun.parent.mkdir()
    srun.write_text(textwrap.dedent(SRUN).format(python=sys.executable, told=str(told)))
    srun.chmod(0o755)
    environ = {
        **job.environ,
        "PATH": f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_NTASKS": "3",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURMD_NODENAME": "127.0.0.1",
        "TMPDIR": str(tmp_path),
    }
    script = ["bash", str(ROOT / "examples" / "slurm_elastic.sbatch"), str(job.config)]
    with started(script, environ) as batch:
        job.wait_for_steps(0, 1, 2)
        stores = [p for p in _below(batch.pid) if "ntp_core.runtime.elastic.store" in p.cmdline()]
        assert len(stores) == 1
        os.kill(job.pid(1), signal.SIGKILL)
        job.wait_for_steps(0, 2)
        job.stop()
        _, said = batch.communicate(timeout=WAIT_S)
    assert batch.returncode == 0, said
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set(told.read_text().split())
    wait_until(lambda: not stores[0].is_running(), "the store is ended", WAIT_S)


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
