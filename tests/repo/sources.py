"""The project's own files, for the tests about the code itself."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.repo.promql import ROOT

PACKAGES = ("ntp_core", "sidecar")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def project_files() -> tuple[Path, ...]:
    """All files that belong to the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = (ROOT / line for line in listed.stdout.splitlines())
    return tuple(sorted(f for f in set(files) if f.is_file()))


def python_files(*folders: str) -> list[Path]:
    """Python files below the given top-level folders; all without an argument."""
    python = [f for f in project_files() if f.suffix == ".py"]
    return [f for f in python if not folders or f.relative_to(ROOT).parts[0] in folders]


@cache
def tree(file: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def module_name(file: Path) -> str:
    """Dotted name of a file: `ntp_core/plan.py` -> `ntp_core.plan`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(module: ast.Module) -> Iterator[Function]:
    """Every function of a module, methods and inner ones too."""
    yield from (n for n in ast.walk(module) if isinstance(n, Function))


def shown(file: Path, line: int = 0) -> str:
    """A place as a person reads it."""
    return f"{file.relative_to(ROOT)}:{line}" if line else str(file.relative_to(ROOT))
