"""Who may import whom. Every module belongs to one row of the table; a module in no row fails.

Imports are read from the source, those inside functions and under TYPE_CHECKING too. A subprocess
test elsewhere checks what is loaded at run time.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.repo.sources import PACKAGES, module_name, python_files, tree

PURE = ("ntp_core", "ntp_core.*", "!ntp_core.runtime*")
"""The half of the engine that runs without torch."""

FINDINGS = ("sidecar.catalog", "sidecar.ingest*", "sidecar.checks*", "sidecar.incidents*")
STATE = (*FINDINGS, "sidecar.view*")
"""What exporters, notifiers and the page may know: findings and state, not each other."""

JUDGES = tuple(
    f"sidecar.{name}"
    for name in (
        "advice",
        "judge",
        "proposals",
        "refusals",
        "report",
        "returns",
        "stops",
        "watch",
    )
)
"""What a tick does with findings: knows neither how they are shown nor how they are sent."""

SETTINGS = ("sidecar", "sidecar.errors", "sidecar.config")
NETWORK = {"http", "urllib", "socketserver", "socket", "asyncio", "ssl", "smtplib", "xmlrpc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer.

    Attributes:
        modules: patterns of the modules in it; one that begins with ! takes modules out.
        own: patterns of project modules it may import.
        third: third-party roots it may import.
        banned: roots of the standard library it must not import.
    """

    modules: tuple[str, ...]
    own: tuple[str, ...]
    third: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()


def row(modules: str, own: Iterable[str], third: str = "", banned: Iterable[str] = ()) -> Row:
    """A row, with names separated by spaces."""
    return Row(
        modules=tuple(modules.split()),
        own=tuple(own),
        third=frozenset(third.split()),
        banned=frozenset(banned),
    )


FILES = ("ntp_core", "ntp_core.inbound.regular_file")
"""How a file is read that somebody else may have put there: standard library only."""

PROBE = ("sidecar", "sidecar.wire*", "sidecar.probe*", "ntp_core.observe", *FILES)

TABLE = (
    # The engine.
    row(
        "ntp_core ntp_core.observe ntp_core.errors ntp_core.inbound.regular_file",
        (),
        banned=NETWORK,
    ),
    row("ntp_core.sim*", PURE, "numpy", NETWORK),
    row("ntp_core.runtime*", ("ntp_core", "ntp_core.*"), "numpy torch safetensors transformers"),
    row(
        "ntp_core.* !ntp_core.runtime* !ntp_core.sim* !ntp_core.observe !ntp_core.errors "
        "!ntp_core.inbound.regular_file",
        (*PURE, "!ntp_core.sim*"),
        "numpy",
        NETWORK,
    ),
    # The contract, and what lives in the watched process. torch only where its hooks are.
    row("sidecar sidecar.catalog sidecar.errors", ("sidecar",)),
    row("sidecar.wire*", ("sidecar", "sidecar.errors", "sidecar.wire*", *FILES), "numpy", NETWORK),
    row("sidecar.probe.torch_hooks", PROBE, "torch", NETWORK),
    row("sidecar.probe* !sidecar.probe.torch_hooks", PROBE, "", NETWORK),
    # State and judgement.
    row(
        "sidecar.ingest*",
        (*SETTINGS, "sidecar.catalog", "sidecar.wire*", "sidecar.ingest*", *PURE),
        "numpy psutil",
    ),
    row("sidecar.checks*", (*SETTINGS, *FINDINGS, "!sidecar.incidents*", *PURE)),
    row("sidecar.incidents*", (*SETTINGS, *FINDINGS, *PURE)),
    row("sidecar.view*", (*SETTINGS, *STATE, *PURE)),
    row(
        "sidecar.config",
        ("sidecar", "sidecar.errors", "sidecar.checks*", "sidecar.incidents*"),
    ),
    row("sidecar.gpu*", (*SETTINGS, "sidecar.catalog", "sidecar.gpu*"), "pynvml"),
    row("sidecar.scrape*", (*SETTINGS, *STATE, "sidecar.scrape*"), "httpx prometheus_client"),
    row("sidecar.evidence*", (*SETTINGS, *STATE, "sidecar.evidence*"), "cryptography rfc8785"),
    # Siblings: none imports another.
    row(
        "sidecar.export*",
        (*SETTINGS, *STATE, "sidecar.export*", *PURE),
        "prometheus_client opentelemetry psutil",
    ),
    row("sidecar.notify*", (*SETTINGS, *STATE, "sidecar.notify*", *PURE), "httpx standardwebhooks"),
    row(
        "sidecar.web*",
        (*SETTINGS, *STATE, "sidecar.web*", *PURE),
        "starlette uvicorn anyio",
    ),
    # What surrounds a tick.
    row(
        " ".join(JUDGES),
        (*SETTINGS, *STATE, *JUDGES, "sidecar.wire.rundir", "sidecar.wire.process", *PURE),
        "",
        NETWORK,
    ),
    row("sidecar.launch sidecar.published sidecar.usage", SETTINGS, "psutil", NETWORK),
    row(
        "sidecar.announce",
        (*SETTINGS, *STATE, "sidecar.export*", "sidecar.notify*"),
        "opentelemetry",
    ),
    row("sidecar.top*", ("sidecar", "sidecar.top*"), "httpx rich"),
    # Composition: knows all of the sidecar, and the pure half of the engine.
    row(
        "sidecar.daemon* sidecar.cli* sidecar.demo* sidecar.run sidecar.status sidecar.__main__",
        ("sidecar", "sidecar.*", *PURE),
        "httpx numpy opentelemetry prometheus_client psutil rich starlette uvicorn",
    ),
)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one pattern and none that begins with !."""
    patterns = tuple(patterns)
    taken_out = any(fnmatchcase(name, p[1:]) for p in patterns if p.startswith("!"))
    return not taken_out and any(fnmatchcase(name, p) for p in patterns if not p.startswith("!"))


def imports(source: ast.Module, module: str, is_package: bool = False) -> set[str]:
    """Every module that a source imports, as a dotted name; relative imports are resolved."""
    found: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            drop = node.level - is_package
            base = ".".join(parts[: len(parts) - drop]) if node.level else ""
            package = ".".join(x for x in (base, node.module) if x)
            # `from a import b` imports module a.b if there is one, else a name of a.
            names = {f"{package}.{alias.name}" for alias in node.names}
            found |= {n if n in MODULES else package for n in names}
    return found


def breaches(module: str, imported: Iterable[str]) -> list[str]:
    """What is wrong with the imports of one module."""
    rows = [r for r in TABLE if matches(module, r.modules)]
    if len(rows) != 1:
        return [f"{module} is in {len(rows)} rows of the table; put it in exactly one"]
    return [
        f"{module} must not import {name}" for name in sorted(imported) if not _may(rows[0], name)
    ]


def _may(layer: Row, name: str) -> bool:
    root = name.split(".")[0]
    if root in PACKAGES:
        return matches(name, layer.own)
    if root in sys.stdlib_module_names:
        return root not in layer.banned
    return root in layer.third


FILES = python_files(*PACKAGES)
MODULES = {module_name(f) for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_module_imports_only_what_its_layer_may(file: Path) -> None:
    """Each module is in exactly one layer and imports nothing that the layer may not know."""
    name = module_name(file)
    found = imports(tree(file), name, is_package=file.name == "__init__.py")
    assert breaches(name, found) == []


PLANTED = [
    ("ntp_core.plan", "import sidecar.catalog"),
    ("ntp_core.plan", "def f():\n    import torch"),
    ("ntp_core.plan", "from ntp_core.runtime import comm"),
    ("ntp_core.plan", "import scipy.optimize"),
    ("ntp_core.sim.cluster", "from ntp_core.runtime.comm import Comm"),
    ("ntp_core.observe", "import numpy"),
    ("ntp_core.runtime.sync", "from sidecar.probe.writer import Writer"),
    ("sidecar.ingest.state", "from ntp_core.runtime.shards import Shards"),
    ("sidecar.demo", "import ntp_core.runtime.model"),
    ("sidecar.probe.writer", "import http.client"),
    ("sidecar.probe.writer", "def f():\n    from prometheus_client import Counter"),
    ("sidecar.probe.writer", "if TYPE_CHECKING:\n    import opentelemetry.trace"),
    ("sidecar.probe.writer", "import torch"),
    ("sidecar.probe.writer", "from sidecar.catalog import METRICS"),
    ("sidecar.wire.ring", "import httpx"),
    ("sidecar.wire.ring", "from sidecar.ingest import state"),
    ("sidecar.checks.slow_rank", "from sidecar.export import prometheus"),
    ("sidecar.export.prometheus", "from sidecar.web import server"),
    ("sidecar.notify.outbox", "from ..export import otel"),
    ("sidecar.web.server", "from sidecar.notify.outbox import Outbox"),
    ("sidecar.daemon", "import torch"),
    ("sidecar.catalog", "import yaml"),
    ("sidecar.no_such_layer", "import json"),
    ("ntp_core.new_package.thing", "import sidecar"),
]


@pytest.mark.parametrize(("module", "source"), PLANTED)
def test_planted_breach_is_found(module: str, source: str) -> None:
    """The table can fail: each of these imports crosses a border and is reported."""
    assert breaches(module, imports(ast.parse(source), module))


ALLOWED = [
    ("ntp_core.planner", "import numpy as np\nfrom ntp_core.plan import Plan"),
    ("sidecar.probe.torch_hooks", "import torch\nfrom ntp_core.observe import Op"),
    ("sidecar.wire.ring", "import mmap\nimport numpy"),
    ("sidecar.checks.slow_rank", "from ntp_core.invariants import check"),
    ("sidecar.export.otel", "from opentelemetry.sdk.trace import TracerProvider"),
    ("sidecar.daemon", "from sidecar.web import server\nfrom sidecar.notify import outbox"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_allowed_import_is_not_reported(module: str, source: str) -> None:
    """The table does not cry wolf over what the design allows."""
    assert breaches(module, imports(ast.parse(source), module)) == []
