"""The command line: exit codes, one clear line for what is wrong, and nothing left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.config import load
from sidecar.run import settings_as_environment
from sidecar.status import find_url, status_lines
from sidecar.wire.process import is_running
from sidecar.wire.rundir import SHARED_MEMORY, list_run_dirs
from tests.support.sample_state import sample_snapshot

COMMANDS = ("run", "daemon", "status", "top", "config")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the caller's reaches a test."""
    for name in [n for n in os.environ if n.startswith(("NTP_SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "sidecar", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself with an example."""
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"example: ntp-sidecar {name}" in " ".join(capsys.readouterr().out.split())


def test_cli_unknown_command_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input is exit code 2, on stderr."""
    with pytest.raises(SystemExit) as left:
        main(["florp"])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "florp" in err


def test_cli_config_json_names_value_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    """All settings as JSON on stdout."""
    assert main(["config", "--json", "--port", "9501"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)["settings"]}
    assert (rows["port"]["value"], rows["port"]["source"]) == (9501, "--port")
    assert rows["host"]["source"] == "default"


def test_cli_config_shows_the_alertmanager(capsys: pytest.CaptureFixture[str]) -> None:
    """Its address without the password, and where that came from."""
    url = "http://user:pw-456@am.example:9093"
    assert main(["config", "--alertmanager-url", url]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("alertmanager_url")]
    assert "...@am.example:9093" in line and "(--alertmanager-url)" in line
    assert "pw-456" not in line


def test_cli_config_text_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each."""
    assert main(["config"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(load().rows())


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        (["config", "--port", "abc"], "port is 'abc' (from --port)"),
        (["config", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["run"], "no command to run"),
        (["run", "--job-id", "../x", "--", "true"], "../x"),
        (["run", "--webhook-url", "nonsense", "--", "true"], "webhook_url"),
        (["config", "--alertmanager-url", "am:9093"], "alertmanager_url is 'am:9093' (from --"),
        (["run", "--alertmanager-url", "nonsense", "--", "true"], "alertmanager_url"),
        (["daemon", "--run-dir", "x", "--alertmanager-url", "ftp://am"], "alertmanager_url"),
        (["config", "--alertmanager-url", "zz"], "alertmanager_url is 'zz'"),
        (["config", "--webhook-secret", "short"], "webhook secret"),
        (["config", "--state-dir", "~no-such-user/x"], "--state-dir"),
        (["config", "--host", "\u00fc..x"], "host"),
        (["config", "--port", "\u0663"], "port"),
        (["config", "--config", "/dev/zero"], "larger than"),
        (["run", "--host", "0.0.0.0", "--", "true"], "NTP_SIDECAR_TOKEN"),
    ],
)
def test_cli_bad_input_one_line_exit_two(
    args: list[str], needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr that names the value; nothing on stdout."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert needle in err


def test_cli_run_passes_the_exit_code_and_output_through() -> None:
    """Stdout is the command's alone; the page's address goes to stderr; the run dir is gone."""
    script = "print('hi'); exit(37)"
    done = command("run", "--port", "0", "--job-id", "cli-t3", "--", sys.executable, "-c", script)
    assert done.returncode == 37
    assert done.stdout == "hi\n"
    assert "page http://127.0.0.1:" in done.stderr
    assert "cli-t3" not in [p.name for p in list_run_dirs(SHARED_MEMORY)]


def test_cli_run_gives_the_command_its_run_dir() -> None:
    """The probe in the command finds its place by the environment."""
    script = "import os; print(os.environ['NTP_SIDECAR_JOB_ID'], os.environ['NTP_SIDECAR_RUN_DIR'])"
    done = command("run", "--port", "0", "--job-id", "cli-t1", "--", sys.executable, "-c", script)
    job_id, run_dir = done.stdout.split()
    assert job_id == "cli-t1"
    assert run_dir.endswith("/cli-t1")


def test_cli_run_killed_command_gives_128_plus_signal() -> None:
    """As a shell says it."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert command("run", "--port", "0", "--", sys.executable, "-c", script).returncode == 137


def test_cli_run_unknown_command_gives_127() -> None:
    """As a shell says it, with one line."""
    done = command("run", "--port", "0", "--", "no-such-program-here")
    assert done.returncode == 127
    assert "no-such-program-here" in done.stderr


def test_cli_run_dead_sidecar_does_not_stop_the_job() -> None:
    """The job kills its sidecar and goes on to its own end."""
    script = (
        "import json, os, signal, pathlib\n"
        "p = pathlib.Path(os.environ['NTP_SIDECAR_RUN_DIR']) / 'daemon.json'\n"
        "pid = json.loads(p.read_text())['pid']\n"
        "os.kill(pid, signal.SIGKILL)\n"
        "stat = pathlib.Path(f'/proc/{pid}/stat')\n"
        "while stat.read_text().rpartition(')')[2].split()[0] != 'Z': pass\n"
        "print('alive')"
    )
    done = command("run", "--port", "0", "--", sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (0, "alive\n")
    assert "ended before the job" in done.stderr


def test_cli_run_killed_leaves_no_sidecar_behind(tmp_path: Path) -> None:
    """Nobody is left to end it, so the sidecar ends by itself when the job has gone too."""
    told = tmp_path / "sidecar-pid"
    script = (
        "import json, os, pathlib, signal;"
        "p = pathlib.Path(os.environ['NTP_SIDECAR_RUN_DIR']) / 'daemon.json';"
        f"pathlib.Path({str(told)!r}).write_text(str(json.loads(p.read_text())['pid']));"
        "os.kill(os.getppid(), signal.SIGKILL)"
    )
    done = command("run", "--port", "0", "--job-id", "cli-t4", "--", sys.executable, "-c", script)
    assert done.returncode == -9
    end_s = time.monotonic() + 20
    while not told.exists() or is_running(int(told.read_text() or 0), 0):
        assert time.monotonic() < end_s, "the sidecar lives on"
        time.sleep(0.05)
    assert "cli-t4" not in [p.name for p in list_run_dirs(SHARED_MEMORY)]


def test_cli_run_chosen_port_in_use_starts_nothing() -> None:
    """A port that was asked for and is taken: one line, exit code 2, no job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = command("run", "--port", port, "--", sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"port {port}" in done.stderr and "in use" in done.stderr


def test_cli_daemon_unwritable_state_dir_one_line(tmp_path: Path) -> None:
    """The outbox has no place: said at the start, with the fix."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = command(
        "daemon", "--run-dir", str(tmp_path), "--port", "0", "--webhook-url", "http://127.0.0.1:1/x",
        "--state-dir", str(blocked / "state"),
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--state-dir" in done.stderr


def test_cli_daemon_bad_webhook_secret_is_not_repeated(tmp_path: Path) -> None:
    """A malformed secret is refused without showing it."""
    done = command(
        "daemon", "--run-dir", str(tmp_path), "--port", "0", "--webhook-url", "http://127.0.0.1:1/x",
        NTP_SIDECAR_WEBHOOK_SECRET="hunter2-hunter2",
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "hunter2" not in done.stderr


def test_cli_status_no_sidecar_one_line_exit_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody answers: what to do about it."""
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["status", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and url in err and "--url" in err


def test_cli_status_of_a_running_sidecar() -> None:
    """From inside a watched command: text and JSON."""
    script = (
        "import subprocess, sys;"
        "subprocess.run([sys.executable, '-m', 'sidecar', 'status', '--json'], check=True)"
    )
    done = command("run", "--port", "0", "--job-id", "cli-t2", "--", sys.executable, "-c", script)
    status = json.loads(done.stdout)
    assert status["job"]["job_id"] == "cli-t2"
    assert status["ranks"] == []


def test_status_lines_name_what_is_wrong() -> None:
    """A slow rank and its incident are listed, healthy ranks are not."""
    status = {
        "url": "http://127.0.0.1:9440",
        "job": {
            "job_id": "j", "status": "degraded", "step": 41, "loss": 2.31, "step_time_s": 0.31,
            "loss_is_finite": True, "exit_status": None,
            "ranks_alive": 5, "ranks_dead": 0, "ranks_left": 1,
            "proposals_refused": 2, "refusal": "names ranks", "plan_epoch": None,
        },
        "ranks": [
            {"rank": 0, "health": "ok", "step": 41, "slowness": 1.0},
            {"rank": 1, "health": "slow", "step": 41, "slowness": 3.1},
        ],
        "incidents": [
            {"state": "firing", "severity": "warning", "summary": "Rank 1.", "id": "inc-1",
             "runbook": "r.md"},
            {"state": "resolved", "severity": "critical", "summary": "Old.", "id": "inc-0",
             "runbook": "r.md"},
        ],
    }  # fmt: skip
    text = "\n".join(status_lines(status))
    assert "ranks: 5 alive, 0 dead, 1 left; plan epoch unknown" in text
    assert "proposals refused by the job: 2, newest: names ranks" in text
    assert "rank 1: slow, step 41, slowness 3.1" in text
    assert "rank 0" not in text
    assert "warning: Rank 1. (inc-1, r.md)" in text
    assert "Old." not in text


def test_status_lines_of_an_ended_job_say_so_with_its_exit_status() -> None:
    """Ended is not unknown; before the first step a job is not healthy yet."""
    status = {"url": "u", **sample_snapshot()}
    status["job"] = {**status["job"], "status": "ended", "exit_status": 3}
    assert status_lines(status)[0].startswith("job demo-1: ended, exit status 3, step 41,")
    status["job"] = {**status["job"], "exit_status": None}
    assert status_lines(status)[0].startswith("job demo-1: ended, step 41,")


def test_run_hands_settings_to_the_sidecar_by_environment() -> None:
    """Only what is not a default; secrets too, which must not be in a process list."""
    loaded = load({"port": 9500}, {"NTP_SIDECAR_TOKEN": "tok"})
    assert settings_as_environment(loaded) == {
        "NTP_SIDECAR_PORT": "9500",
        "NTP_SIDECAR_TOKEN": "tok",
    }


def test_find_url_without_run_dirs_is_the_default(tmp_path: Path) -> None:
    """Nothing watched here: the usual address."""
    assert find_url([tmp_path]) == "http://127.0.0.1:9440"
