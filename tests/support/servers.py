"""Real servers for tests: Prometheus and Alertmanager as plain processes on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import pytest

READY_S = 30.0
EXEMPLARS = "--enable-feature=exemplar-storage"

ALERTMANAGER_CONFIG = """
route: {receiver: none, group_by: [alertname], group_wait: 0s, group_interval: 1s}
receivers: [{name: none}]
"""


def require_binary(name: str) -> Path:
    """Path of a program. Without it the test is skipped; in CI (CI=true) it fails."""
    path = shutil.which(name)
    if path is None:
        message = (
            f"needs '{name}': run `make servers` (Debian: prometheus, prometheus-alertmanager)"
        )
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    return Path(path)


def wait_until(
    condition: Callable[[], object], what: str, timeout_s: float = READY_S, every_s: float = 0.02
) -> object:
    """First true value of a condition, asked again and again; AssertionError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not in {timeout_s} s")
        time.sleep(every_s)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(slots=True, kw_only=True)
class Server:
    """A running server. Use it as a context manager, or call `stop`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """End it, politely first."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start_prometheus(
    tmp_path: Path, config_text: str, flags: Sequence[str] = (EXEMPLARS,)
) -> Server:
    """Prometheus, by default with exemplars, ready. Its data and log lie under `tmp_path`."""
    home = _home(tmp_path, "prometheus", config_text)
    port = free_port()
    command = [
        str(require_binary("prometheus")),
        f"--config.file={home / 'config.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        *flags,
    ]
    return _start(command, home, port)


def start_alertmanager(tmp_path: Path, config_text: str = ALERTMANAGER_CONFIG) -> Server:
    """Alertmanager without a cluster, ready. Its data and log lie under `tmp_path`."""
    home = _home(tmp_path, "alertmanager", config_text)
    port = free_port()
    command = [
        str(require_binary("prometheus-alertmanager")),
        f"--config.file={home / 'config.yml'}",
        f"--storage.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    return _start(command, home, port)


def _home(tmp_path: Path, name: str, config_text: str) -> Path:
    home = tmp_path / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.yml").write_text(config_text)
    return home


def _start(command: list[str], home: Path, port: int) -> Server:
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=home)
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        wait_until(lambda: _is_ready(server), f"{command[0]} ready")
    except BaseException:
        server.stop()
        raise
    return server


def _is_ready(server: Server) -> bool:
    if server.process.poll() is not None:
        raise AssertionError(f"it exited:\n{server.log.read_text()[-2000:]}")
    try:
        return httpx.get(f"{server.url}/-/ready", trust_env=False, timeout=2).status_code == 200
    except httpx.TransportError:
        return False
