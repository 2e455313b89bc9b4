"""The rules that hold for all tests are themselves tested: each is seen to refuse."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests import conftest

CONFTEST = Path(conftest.__file__)


@pytest.mark.parametrize("address", [("8.8.8.8", 443), ("2001:4860:4860::8888", 443, 0, 0), ("example.com", 80)])
def test_no_test_reaches_another_machine(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as connection, pytest.raises(AssertionError, match="may only speak to loopback"):
        connection.connect(address)


def test_each_part_of_the_container_tests_has_some() -> None:
    """pytest fails where it runs no test at all, and so would CI at that commit."""
    root = CONFTEST.parent.parent
    of = re.search(r'e2e-containers PART="\$\(part (\d+)\)"', (root / ".ci/run").read_text())
    files = re.search(r"^ENGINE := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert of
    assert files
    turns = re.findall(r"slow\(turn=(\d+)\)", "".join((root / file).read_text() for file in files[1].split()))
    assert {int(turn) for turn in turns} == set(range(int(of[1])))
