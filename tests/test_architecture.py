"""The rules of the architecture hold, and an import that breaks one is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture import eager_sdks, impure

ROOT = Path(__file__).parent.parent
Break = Callable[[str, str], None]


def test_the_contracts_of_imports_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


def test_planning_is_pure() -> None:
    assert impure(ROOT, "launcher/plan") == []


def test_sdks_are_imported_where_they_are_used() -> None:
    assert eager_sdks(ROOT, "launcher") == []


@pytest.mark.parametrize("mark", ["e2e", "fuzz"])
def test_make_runs_what_is_marked_for_it(mark: str) -> None:
    asked = subprocess.run(["make", "-n", mark], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    lanes = {ROOT / word for word in asked.stdout.split() if word.startswith("tests/")}
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(rf"mark\.{mark}\b", file.read_text())]
    assert marked
    assert [file for file in marked if not lanes & {file, *file.parents}] == []


FORBIDDEN_IMPORTS = [
    ("launcher/plan/model.py", "from launcher.cli import main", "launcher.plan.model -> launcher.cli"),
    ("launcher/spec/models.py", "import launcher.plan.model", "launcher.spec.models -> launcher.plan.model"),
    ("launcher/catalog/__init__.py", "import launcher.spec.models", "launcher.catalog -> launcher.spec.models"),
    ("launcher/errors.py", "import launcher.spec.models", "launcher.errors -> launcher.spec.models"),
    ("launcher/gcp/__init__.py", "import launcher.cli.app", "launcher.gcp -> launcher.cli.app"),
    (
        "train/launch_train/common/contract.py",
        "import launcher.errors",
        "launch_train.common.contract -> launcher.errors",
    ),
    ("launcher/plan/vertex_request.py", "import launch_train.node", "launcher.plan.vertex_request -> launch_train"),
    (
        "train/launch_train/common/storage/local.py",
        "import launch_train.metrics",
        "launch_train.common.storage.local -> launch_train.metrics",
    ),
    (
        "train/launch_train/performance/optimizer.py",
        "import launch_train.trainer.build",
        "launch_train.performance.optimizer -> launch_train.trainer.build",
    ),
    (
        "launcher/testing/registry/__init__.py",
        "import launcher.plan.model",
        "launcher.testing.registry -> launcher.plan.model",
    ),
    (
        "train/launch_train/checkpointing/lease.py",
        "def f():\n    import launch_train.checkpointing.resume_loader",
        "No cycles are allowed in launch_train.checkpointing.",
    ),
]
"""A file, a line that is added to it, and how import-linter reports the forbidden import."""


def test_forbidden_imports_are_found(copy: Path, broken: Break) -> None:
    """All in one run, because import-linter takes seconds."""
    for file, line, _ in FORBIDDEN_IMPORTS:
        broken(file, line)
    done = lint_imports(copy)
    assert done.returncode != 0
    assert [arrow for *_, arrow in FORBIDDEN_IMPORTS if arrow not in done.stdout] == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, which `broken` may change."""
    root = tmp_path_factory.mktemp("sources")
    for package in ("launcher", "train"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "*.csv"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.fixture
def broken(copy: Path) -> Iterator[Break]:
    """Append a line to a file of the copy; undone at the end of the test."""
    before: dict[Path, str] = {}

    def add(file: str, line: str) -> None:
        path = copy / file
        text = before.setdefault(path, path.read_text())
        path.write_text(f"{text}\n{line}\n")

    yield add
    for path, text in before.items():
        path.write_text(text)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages below `root`, with the contracts in pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", code]
    path = os.pathsep.join([str(root), str(root / "train")])
    return subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
