"""The rules that hold for all tests are themselves tested: each is seen to refuse."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

CONFTEST = Path(conftest.__file__)


@pytest.mark.parametrize("address", [("8.8.8.8", 443), ("2001:4860:4860::8888", 443, 0, 0), ("example.com", 80)])
def test_no_test_reaches_another_machine(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as connection, pytest.raises(AssertionError, match="may only speak to loopback"):
        connection.connect(address)


SKIPS = {
    "test_skips.py": """
import pytest

def test_in_the_middle():
    pytest.skip("no GPU")

@pytest.mark.skipif(True, reason="never")
def test_by_mark():
    pass

@pytest.mark.xfail(reason="broken")
def test_by_expectation():
    assert False
""",
    "test_module.py": "import pytest\npytest.skip('no torch', allow_module_level=True)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_skip_is_a_failure_where_skips_are_forbidden(tmp_path: Path, processes: str) -> None:
    allowed = _pytest(tmp_path, SKIPS, no_skips="", processes=processes)
    forbidden = _pytest(tmp_path, SKIPS, no_skips="1", processes=processes)
    assert allowed.returncode == pytest.ExitCode.OK, allowed.stdout
    assert forbidden.returncode == pytest.ExitCode.TESTS_FAILED, forbidden.stdout
    told = forbidden.stdout.partition("FAILED: 4 skipped, and LAUNCH_NO_SKIPS=1 allows none")[2]
    assert all(reason in told for reason in ("no GPU", "never", "expected to fail: broken", "no torch"))


def test_each_part_of_the_container_tests_has_some() -> None:
    """pytest fails where it runs no test at all, and so would CI at that commit."""
    root = CONFTEST.parent.parent
    of = re.search(r'e2e-containers PART="\$\(part (\d+)\)"', (root / ".ci/run").read_text())
    files = re.search(r"^ENGINE := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert of
    assert files
    turns = re.findall(r"slow\(turn=(\d+)\)", "".join((root / file).read_text() for file in files[1].split()))
    assert {int(turn) for turn in turns} == set(range(int(of[1])))


def _pytest(
    folder: Path, files: dict[str, str], no_skips: str, processes: str = "0"
) -> subprocess.CompletedProcess[str]:
    """A session of its own in `folder`, under our conftest.py; in as many processes (0: in its own)."""
    for name, text in {**files, "conftest.py": CONFTEST.read_text()}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), str(folder)]
    environment = {**os.environ, "LAUNCH_NO_SKIPS": no_skips, "PYTHONPATH": str(CONFTEST.parent.parent)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
