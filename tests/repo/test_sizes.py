"""Sizes, names and calls that we do not take. Policy that is not a test is not policy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repo.sources import PACKAGES, functions, python_files, shown, tree

FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
MODULES_PER_PACKAGE_MAX = 24

BANNED_MODULES = re.compile(r"(^|_)(utils?|helpers?|common|misc)($|_)")
BANNED_CLASSES = re.compile(r"(Manager|Util|Utils|Helper|Helpers)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A call we do not take: where it is banned, which files are excused, what to use instead."""

    call: str
    where: str = ""
    excused: str = "^$"
    instead: str


BANS = (
    Ban(
        call="time.sleep",
        where="^tests/",
        excused="^tests/support/",  # stand-ins for ranks, whose work is to take time
        instead="wait_until of tests.support.servers, or a loop that looks at the condition",
    ),
    Ban(
        call="print",
        excused=r"^(sidecar/(cli|demo|top)\b|benchmarks/|examples/|tests/)",
        instead="the logging module, or sys.stdout.write in a script of its own",
    ),
    Ban(
        call="struct.pack_into",
        where="^sidecar/(probe|wire)/",
        instead="slice assignment: pack_into writes zeros first and a reader sees them",
    ),
    Ban(call="datetime.utcnow", instead="datetime.now(UTC): a time without zone is no time"),
    Ban(call="os.system", instead="subprocess.run with a list"),
    Ban(call="os.popen", instead="subprocess.run with a list"),
    Ban(call="tempfile.mktemp", instead="tempfile.mkstemp, or tmp_path in tests"),
    Ban(call="yaml.load", instead="yaml.safe_load"),
)

FILES = python_files()


def banned_calls(module: ast.Module, path: str) -> Iterator[str]:
    """Banned calls of a module, each with its replacement."""
    bans = {b.call: b for b in BANS if re.match(b.where, path) and not re.match(b.excused, path)}
    polling = {c for w in ast.walk(module) if isinstance(w, ast.While) for c in ast.walk(w)}
    for node in ast.walk(module):
        ban = bans.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        # A rest between two looks at a condition is what a polling loop is made of.
        if ban and not (ban.call == "time.sleep" and node in polling):
            yield f"{path}:{node.lineno}: {ban.call}; use {ban.instead}"


def long_functions(module: ast.Module) -> Iterator[str]:
    """Functions over the limit, decorators not counted."""
    for function in functions(module):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{function.name} has {lines} lines"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_file_and_functions_are_short(file: Path) -> None:
    """A file fits a head, a function a screen: control flow in the parent, leaves that compute."""
    limit = TEST_FILE_LINES_MAX if "tests" in file.parts else FILE_LINES_MAX
    assert len(file.read_text().splitlines()) <= limit
    assert list(long_functions(tree(file))) == []


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_names_say_what_a_thing_is(file: Path) -> None:
    """No module is called utils or helpers and no class is a Manager: those hold anything."""
    classes = [n.name for n in ast.walk(tree(file)) if isinstance(n, ast.ClassDef)]
    assert not BANNED_MODULES.search(file.stem)
    assert not [name for name in classes if BANNED_CLASSES.search(name)]


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_calls_that_have_a_better_replacement_are_not_used(file: Path) -> None:
    """Each banned call names what to use instead."""
    assert list(banned_calls(tree(file), shown(file))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_stay_readable(package: str) -> None:
    """A folder that grows beyond a screen wants to be two."""
    counts: dict[Path, int] = {}
    for file in python_files(package):
        counts[file.parent] = counts.get(file.parent, 0) + 1
    assert {shown(f): n for f, n in counts.items() if n > MODULES_PER_PACKAGE_MAX} == {}


def test_limits_find_a_planted_breach() -> None:
    """The rules can fail: a sleep in a test, a print in a package, a function of 71 lines."""
    long = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    planted = ast.parse("time.sleep(1)\nprint(1)\n" + long)
    assert len(list(banned_calls(planted, "tests/core/test_plan.py"))) == 1
    assert len(list(banned_calls(planted, "sidecar/daemon.py"))) == 1
    assert list(banned_calls(ast.parse("while not f():\n    time.sleep(1)"), "tests/a.py")) == []
    assert list(long_functions(planted)) == [f"f has {FUNCTION_LINES_MAX + 1} lines"]
    assert BANNED_MODULES.search("rank_utils")
    assert BANNED_CLASSES.search("RankManager")
    assert not BANNED_MODULES.search("utilisation")
