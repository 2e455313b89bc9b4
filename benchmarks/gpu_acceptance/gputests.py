"""Part 1: the tests that are marked `gpu`, one row per file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.gpu_acceptance.log import RAN_ON
from benchmarks.gpu_acceptance.small import all_of, check
from benchmarks.gpu_acceptance.tasks import ROOT, Measured, Place, Task, Verdict

PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-m", "gpu", "--continue-on-collection-errors", "-p", "no:cacheprovider"),
    *("--tb=short", "--color=no", "-v", "-rfE"),
    *("-W", "default"),  # a new warning of torch or Python is not a failure of the product
)
OUTCOME: Final = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


def files() -> list[str]:
    """Return the test files with a test that is marked `gpu`."""
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _is_marked(path)]
    return [str(path.relative_to(ROOT)) for path in found]


def _is_marked(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "mark.gpu" in text and any(_marks(node) for node in ast.parse(text).body)


def _marks(node: ast.stmt) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return any("mark.gpu" in ast.unparse(mark) for mark in node.decorator_list)
    return isinstance(node, ast.Assign) and "mark.gpu" in ast.unparse(node) and "pytestmark" in ast.unparse(node)


def _collected(place: Place) -> Measured:
    """Collect the tests without running them, to find what can't be imported on this machine."""
    done = _pytest(place, "--collect-only", "-qq", *files())
    errors = re.findall(r"^ERROR (tests/\S+)(.*)$", done, re.MULTILINE)
    missing = re.findall(r"^E +(\w*Error: .*)$", done, re.MULTILINE)
    seen = set(re.findall(r"^(tests/[\w/]+\.py)::", done, re.MULTILINE))
    return {"files": files(), "collected": sorted(seen), "errors": [name for name, _ in errors], "because": missing[:8]}


def judge_collected(measured: Measured) -> Verdict:
    missing = sorted(set(measured["files"]) - set(measured["collected"]))
    return all_of(
        check(len(measured["files"]) >= 5, f"only {len(measured['files'])} files are marked"),
        check(not measured["errors"] and not missing, f"not collected: {missing}: {measured['because']}"),
        Verdict(True, f"{len(measured['collected'])} files"),
    )


def _tested(place: Place, file: str) -> Measured:
    """Run a file's tests, which record what passed in ran-on.json (tests/conftest.py)."""
    done = _pytest(place, file)
    found: dict[str, list[str]] = {}
    for name, outcome in OUTCOME.findall(done):
        found.setdefault(outcome.lower(), []).append(name.partition("::")[2])
    return {"outcomes": found, "end": done.strip().splitlines()[-1:], "warnings": warnings_of(done)}


def warnings_of(printed: str) -> int:
    """Return the number of warnings in pytest's last line."""
    found = re.search(r"\b(\d+) warnings?\b", "".join(printed.strip().splitlines()[-1:]))
    return int(found[1]) if found else 0


def judge_tested(measured: Measured) -> Verdict:
    """Judge a file: no failure, and at least one test passed."""
    found = measured["outcomes"]
    bad = [f"{name} {outcome}" for outcome in ("failed", "error", "xpass") for name in found.get(outcome, [])]
    passed, skipped = len(found.get("passed", [])), len(found.get("skipped", []))
    return all_of(
        check(not bad, f"{len(bad)} tests: {', '.join(bad)}"),
        check(passed > 0, f"no test passed: {measured['end']}", f"{passed} passed, {skipped} skipped"),
        Verdict(True, f"{count} warnings" if (count := measured.get("warnings")) else ""),
    )


def _pytest(place: Place, *words: str) -> str:
    """Run pytest and return its output, which is also printed line by line to the row's output."""
    env = {**place.env, "PYTHONDONTWRITEBYTECODE": "1", "LAUNCH_RAN_ON": str(place.folder / RAN_ON)}
    process = subprocess.Popen(
        [*PYTEST, "--basetemp", str(place.folder / "pytest"), *words],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    return "".join(lines)


def _seconds(file: str) -> float:
    return 120 if file.endswith("test_gpu.py") else 60 if "bench" in file else 25


COLLECTED: Final = Task(1, "gpu tests collected", "pytest finds them", _collected, judge_collected, 25, on_cpu="")
TASKS: Final = tuple(
    Task(
        *(1, f"pytest {file}", "pytest -m gpu", partial(_tested, file=file), judge_tested, _seconds(file), 420),
        alone=any(word in file for word in ("bench", "profiling", "monitor")),
    )
    for file in files()
)
