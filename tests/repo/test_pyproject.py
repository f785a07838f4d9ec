"""Packaging: extras, pinned versions, licence."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.promql import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pinned() -> dict[str, str]:
    """Package -> version in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [x.split("==") for x in lines if x.strip() and not x.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def requirements(*extras: str) -> list[Requirement]:
    """What the package asks for, with extras."""
    return [
        Requirement(r) for r in [*PROJECT["dependencies"], *(x for e in extras for x in EXTRAS[e])]
    ]


def test_extras_are_those_that_are_documented() -> None:
    """The engine, the bridge to Hugging Face and development are apart from the sidecar."""
    assert set(EXTRAS) == {"train", "hf", "dev"}


@pytest.mark.parametrize("requirement", requirements("train", "dev"), ids=lambda r: r.name)
def test_pinned_version_is_in_the_range_that_we_promise(requirement: Requirement) -> None:
    """What `make` installs is pinned, and users may install it too."""
    version = pinned()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_constraints_pin_each_package_once() -> None:
    """One line, one package, one exact version."""
    lines = [
        x for x in (ROOT / "constraints.txt").read_text().splitlines() if not x.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", x) for x in lines if x.strip())
    assert len(pinned()) == len([x for x in lines if x.strip()])


def test_sidecar_needs_no_torch() -> None:
    """The observer installs in seconds: torch is only in the extras."""
    assert not {"torch", "transformers", "safetensors"} & {r.name for r in requirements()}


def test_licence_is_an_spdx_expression() -> None:
    """The licence is named in the form that tools read, and no classifier says it again."""
    assert PROJECT["license"] == "Apache-2.0"
    assert not [c for c in PROJECT.get("classifiers", []) if c.startswith("License")]


def test_readme_and_console_script_exist() -> None:
    """What the package's metadata names is there."""
    assert (ROOT / PROJECT["readme"]).is_file()
    assert PROJECT["scripts"] == {"ntp-sidecar": "sidecar.cli:main"}
    assert (ROOT / "sidecar" / "cli.py").is_file() or (ROOT / "sidecar" / "cli").is_dir()
