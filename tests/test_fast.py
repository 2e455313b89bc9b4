"""Which test files `make test-fast` runs."""

from __future__ import annotations

import pytest

from tests import fast


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/spec/test_yaml_loader.py", True),
        ("tests/cli/test_commands.py", True),  # beside a conftest.py whose fixtures load Google's libraries when asked
        ("tests/train/node/test_exit_status.py", True),
        ("tests/train/trainer/test_train.py", False),  # torch
        ("tests/services/test_vertex.py", False),  # Google's clients
        ("tests/cli/test_waiting.py", False),  # the same, by a module of tests
        ("tests/test_imports.py", False),  # starts processes
    ],
)
def test_what_a_test_imports_decides(file: str, expected: bool) -> None:
    assert fast.is_fast(fast.ROOT / file) is expected
