"""What runs beside a custom program needs Python 3.10 and no particular torch: the node and the API for scripts."""

from __future__ import annotations

import ast
import csv
import os
import shutil
import subprocess
from pathlib import Path

from launcher.inputs.content import trainer_folder
from tools import torch_api

OLDEST = (3, 10)
FILES = sorted(trainer_folder().rglob("*.py"))
NEWER_NAMES = frozenset(
    (module, name)
    for module, names in {
        "typing": "Self Never LiteralString Required NotRequired Unpack TypeVarTuple assert_never assert_type "
        "reveal_type dataclass_transform override TypeIs ReadOnly",
        "enum": "StrEnum ReprEnum EnumCheck member nonmember verify property",
        "asyncio": "TaskGroup timeout Runner",
        "datetime": "UTC",
        "hashlib": "file_digest",
        "contextlib": "chdir",
        "itertools": "batched",
        "sys": "exception",
        "math": "cbrt exp2",
        "operator": "call",
        "logging": "getLevelNamesMapping",
        "inspect": "getmembers_static",
    }.items()
    for name in names.split()
) | {("tomllib", ""), ("wsgiref.types", "")}
"""(module, name) of the standard library since Python 3.11 or 3.12, as vermin 1.9.2 lists them."""
NEWER_BUILTINS = frozenset({"ExceptionGroup", "BaseExceptionGroup"})


def newer_in(text: str, name: str = "") -> list[str]:
    """What a file uses that Python 3.10 doesn't have; imports for type checkers alone don't count."""
    tree = ast.parse(text, name, feature_version=OLDEST)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        used: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            used = [(one.name, "") for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [(node.module or "", one.name) for one in node.names] + [(node.module or "", "")]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = [(node.value.id, node.attr)]
        found += [f"{module}.{attribute}" for module, attribute in used if (module, attribute) in NEWER_NAMES]
        if isinstance(node, ast.Name) and node.id in NEWER_BUILTINS:
            found.append(node.id)
        if isinstance(node, ast.Attribute) and node.attr == "add_note":
            found.append("BaseException.add_note")
    return found


def test_the_package_needs_no_newer_python_than_3_10() -> None:
    found = {path: newer for path in FILES if (newer := newer_in(path.read_text(encoding="utf-8"), str(path)))}
    assert found == {}


def test_the_node_starts_with_python_3_10_where_there_is_one() -> None:
    """With its standard library alone: neither torch nor any other package is installed there."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    known = [shutil.which("python3.10"), *map(str, home.glob("versions/3.10.*/bin/python3.10"))]
    for python in dict.fromkeys(one for one in known if one):
        code = "import launch_train.node.__main__, launch_train.metrics, sys; print(sys.version_info[:2])"
        ran = subprocess.run(
            [python, "-c", code],
            env={"PYTHONPATH": str(trainer_folder().parent), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if "pyenv" not in ran.stderr:  # a shim without a version behind it
            assert (ran.returncode, ran.stdout.strip()) == (0, "(3, 10)"), ran.stderr


def recorded() -> dict[str, set[str]]:
    with torch_api.TABLE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: set(row["releases"].split()) for row in csv.DictReader(file)}


def test_each_name_of_torch_that_they_use_is_in_each_release_since_2_6() -> None:
    """tests/train/torch_api.csv was read from the releases' own wheels; `python -m tools.torch_api` renews it."""
    known, used = recorded(), torch_api.used_names()
    assert all(map(torch_api.module_file, torch_api.ENTRIES))
    assert len(used) > 50
    assert used - set(known) == set()
    assert {name: missing for name in used if (missing := set(torch_api.RELEASES) - known[name])} == {}
