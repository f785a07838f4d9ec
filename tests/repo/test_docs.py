"""Documentation: links resolve, tours lead to files, and everything public says what it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.promql import ROOT
from tests.repo.sources import PACKAGES, Function, project_files, python_files, shown, tree

MARKDOWN = [f for f in project_files() if f.suffix == ".md"]
TEXT = [f for f in project_files() if f.suffix not in {".png", ".gif", ".ico", ".woff2", ".npz"}]

# Spelt in pieces, so that this file does not contain them. Paths of one machine help nobody, and
# hosts of package registries belong to the user's own configuration.
FORBIDDEN = [
    "/" + "work/",
    "/tmp/" + "bash",
    "/" + "root/",
    "pypi" + ".org",
    "pythonhosted" + ".org",
]
FORBIDDEN += ["registry." + "npmjs.org", "deb." + "debian.org", "proxy." + "golang.org"]


def heading_anchors(file: Path) -> set[str]:
    """Anchors of a markdown file's headings, as code hosts build them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(file: Path) -> Iterator[str]:
    """Relative links of a markdown file that lead nowhere."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path) if path else file
        has_anchors = bool(anchor) and target.suffix == ".md"
        if not target.exists() or (has_anchors and anchor not in heading_anchors(target)):
            yield link


@pytest.mark.parametrize("file", MARKDOWN, ids=shown)
def test_relative_links_resolve(file: Path) -> None:
    """Each link leads to a file of the project, and to a heading in it."""
    assert list(broken_links(file)) == []


def test_readme_tour_names_six_files_that_exist() -> None:
    """A newcomer reads six files first; none of them has moved."""
    text = (ROOT / "README.md").read_text()
    tour = re.search(r"^#+ .*six files first.*?$(.*?)(^#|\Z)", text, re.M | re.S | re.I)
    assert tour, "README.md needs a heading 'Read these six files first'"
    items = re.findall(r"^(?:\d+\.|[-*]) .*?`([^`]+)`", tour[1], re.MULTILINE)
    items = items or re.findall(r"`([\w./]+\.\w+)`", tour[1])
    assert len(items) == 6
    assert [f for f in items if not (ROOT / f).is_file()] == []


def test_readme_names_the_two_commands() -> None:
    """`make demo` shows it, `make test` proves it."""
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("file", TEXT, ids=shown)
def test_no_path_or_host_of_one_place_is_named(file: Path) -> None:
    """What is true on one machine only does not belong into the project."""
    text = file.read_text(encoding="utf-8", errors="replace")
    assert [word for word in FORBIDDEN if word in text] == []


def undocumented(module: ast.Module, is_test: bool = False) -> Iterator[str]:
    """Public things without a docstring: the module, its classes, functions and methods.

    Left out: names that begin with an underscore and what is inside them; bodies that are only
    `...`; in tests all functions but tests and fixtures are left to taste.
    """
    if not ast.get_docstring(module):
        yield "the module"
    yield from _undocumented_in(module, is_test)


def _undocumented_in(parent: ast.AST, is_test: bool) -> Iterator[str]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        wanted = not is_test or node.name.startswith("test_")
        if wanted and not ast.get_docstring(node) and not _is_stub(node):
            yield f"{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node, is_test)


def _is_stub(node: ast.ClassDef | Function) -> bool:
    """Whether the body is only `...`: an empty implementation of what a protocol documents."""
    is_empty = all(isinstance(s, ast.Expr) and s.value is not None for s in node.body)
    return is_empty and ast.unparse(node.body[-1]) == "..."


@pytest.mark.parametrize("file", python_files(*PACKAGES, "alerts", "dashboards"), ids=shown)
def test_everything_public_has_a_docstring(file: Path) -> None:
    """Who reads a name can read what it promises."""
    assert list(undocumented(tree(file))) == []


@pytest.mark.parametrize("file", python_files("tests"), ids=shown)
def test_every_test_says_what_it_promises(file: Path) -> None:
    """One sentence of promised behaviour per test, so that a failure explains itself."""
    assert list(undocumented(tree(file), is_test=True)) == []


def test_rules_find_planted_breaches(tmp_path: Path) -> None:
    """The rules can fail: a dead link, a dead anchor, a silent function."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](gone.md) [b](#one-thing) [c](#two) [d](https://example.com)\n"
    )
    source = ast.parse(
        '"""M."""\nclass A:\n    """A."""\n    def b(self): return 1\ndef _c(): pass\n'
    )
    assert list(broken_links(page)) == ["gone.md", "#two"]
    assert list(undocumented(source)) == ["b (line 4)"]
