"""The documentation names only files, functions, links and layers that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.spec.reader import read_text
from tests.command import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ARCHITECTURE = ROOT / "docs" / "architecture.md"

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`((?:launcher|train|tests|tools|benchmarks|containers|job_specs|docs)/[\w./-]+\.\w+)(::[\w.]+)?`")
TEST_FILE = re.compile(r"`((?!tests/)(?:\w+/)*test_\w+\.py)`")

TYPED = ("sh", "bash", "yaml", "python")
"""Languages of code blocks that people type or copy; in the others is recorded output."""


def short(page: Path) -> str:
    """The page's path below the repository."""
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in HEADING.findall(prose(text)))
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in heads}


@cache
def definitions(file: Path) -> frozenset[str]:
    """Functions, classes, methods and constants of a module: `plan`, `RunDriver`, `RunDriver.step`."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from names(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(names(ast.parse(file.read_text()).body))


def missing_names(text: str) -> list[str]:
    """Files and functions that a text quotes as `launcher/plan/build.py::plan` and that don't exist."""
    found = []
    for name, member in QUOTED.findall(text):
        file = ROOT / name
        if not file.exists() or (member and member[2:] not in definitions(file)):
            found.append(name + member)
    found += [name for name in TEST_FILE.findall(text) if not list(ROOT.glob(f"tests/**/{name}")) and "*" not in name]
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(prose(text)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text() if path else text)):
            found.append(link)
    return found


def wide_lines(text: str) -> list[str]:
    """Lines over 80 columns in blocks that people copy."""
    return [
        line for lang, block in FENCE.findall(text) if lang in TYPED for line in block.splitlines() if len(line) > 80
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/vertex.md"])
def test_the_consoles_name_of_vertex_ai_is_found(page: str) -> None:
    assert "Gemini Enterprise Agent Platform" in " ".join(prose((ROOT / page).read_text()).split())


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_quoted_files_and_functions_exist(page: Path) -> None:
    assert missing_names(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_code_to_copy_fits_80_columns(page: Path) -> None:
    assert wide_lines(page.read_text()) == []


def test_the_checks_notice_what_is_wrong() -> None:
    assert missing_names("`launcher/plan/build.py::plan` `launcher/plan/build.py::pln` `launcher/no.py`") == [
        "launcher/plan/build.py::pln",
        "launcher/no.py",
    ]
    assert missing_names("`test_docs.py` `no/test_docs.py`") == ["no/test_docs.py"]
    assert broken_links(ROOT / "README.md", "# A b!\n[x](#a-b) [y](#a-c) [z](no.md) [w](docs/spec.md#secrets)") == [
        "#a-c",
        "no.md",
    ]
    assert wide_lines(f"```sh\n{'x' * 81}\n```\n```text\n{'y' * 81}\n```\n") == ["x" * 81]


def test_public_repositories_need_five_lines_each() -> None:
    _, block = next(fence for fence in FENCE.findall((ROOT / "docs/coming-from.md").read_text()) if fence[0] == "yml")
    specs = re.findall(r"^# .*: ([\w.]+)\n((?:(?!#).*\n)+)", block, re.MULTILINE)
    assert len(specs) >= 10
    for name, text in specs:
        assert len(text.splitlines()) <= 5
        assert max(map(len, text.splitlines())) <= 120
        assert read_text(f"name: a\n{text}".encode(), name).run.args or "command:" in text


def test_the_architecture_walks_through_functions() -> None:
    stops = [name for name, member in QUOTED.findall(ARCHITECTURE.read_text()) if member]
    assert len(stops) >= 30
    assert {name.partition("/")[0] for name in stops} == {"launcher", "train"}


def test_the_layers_are_those_of_import_linter() -> None:
    """In docs/architecture.md each package's layers are a block of lines, the highest first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {one["containers"][0]: one["layers"] for one in config if one["type"] == "layers"}
    blocks = [block for _, block in FENCE.findall(ARCHITECTURE.read_text())]
    shown = [[line.partition("  ")[0] for line in block.splitlines()] for block in blocks]
    for package in ("launcher", "launch_train"):
        assert layers[package] in shown, package


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages == {link for link in LINK.findall(index) if not link.startswith("..")}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
