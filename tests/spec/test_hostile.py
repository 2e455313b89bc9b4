"""Files that mean harm end in a SpecError with their place, within 1 s of CPU and 200 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spec import hostile

ROOT = Path(__file__).parents[2]
TAKEN = {"secret-like values", "one secret-like value", "an address of a secret"}
"""Good for nothing, but no spec's error: what counts is the time."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of the file -> seconds and problems, all read by one fresh process under the limits."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, content in hostile.FILES.items():
        (folder / name).write_bytes(content)
    (folder / "a folder").mkdir()
    names = [*hostile.FILES, "a folder", "a file that isn't there"]
    command = [sys.executable, "-m", "tests.spec.hostile", *(str(folder / name) for name in names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {Path(one["path"]).name: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [*hostile.FILES, "a folder", "a file that isn't there"])
def test_a_hostile_file(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    assert outcome["seconds"] < 1
    if name in TAKEN:
        return
    assert outcome["problems"] != ["it was read"]
    assert outcome["lines"] <= 40
    assert outcome["characters"] < 5_000
    place = outcome["path"] + (":" if name in hostile.FILES else "")
    for problem in outcome["problems"]:
        assert problem.startswith(place)
        assert len(problem) < 700


def test_the_bombs_are_as_large_as_they_are_known() -> None:
    assert (len(hostile.alias_bomb()), len(hostile.merge_bomb())) == (384, 648)


def test_the_limit_of_memory_is_one(tmp_path: Path) -> None:
    """The harness can fail: a process that wants more than the limit dies of it."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({hostile.LIMIT},) * 2); b'a' * {hostile.LIMIT}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr
