"""The mutants fit the code as it is now, and their table is in docs/testing.md. `make mutants` tries them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.mutants import PAGE, Mutant, functions, mutants, renewed
from tests.mutate import Copy, outcome, selected

ALL = mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda one: one.id)
def test_it_applies_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.applied() != (ROOT / mutant.file).read_text()
    assert "\n" not in mutant.old + mutant.new
    assert mutant.tests
    for test in mutant.tests:
        file, _, case = test.partition("::")
        assert case.partition("[")[0] in functions(ROOT / file), test


def test_there_are_forty_or_more_and_each_has_an_id_of_its_own() -> None:
    assert len({one.id for one in ALL}) == len(ALL) >= 40


TEST = """from product import double

def test_double():
    assert double(2) == 4

def test_type():
    assert isinstance(double(2), int)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "tests", "expected"),
    [
        ("3 * x", ["test_double"], "caught"),
        ("3 * x", ["test_double", "test_type"], "SURVIVED"),
        ("x * 2", ["test_double"], "SURVIVED"),
        ("2 *", ["test_double"], "broken"),
        ("3 * x", ["test_gone"], "broken"),
    ],
)
def test_what_counts_as_caught(tmp_path: Path, new: str, tests: list[str], expected: str) -> None:
    product, text = tmp_path / "product.py", "def double(x):\n    return 2 * x\n"
    product.write_text(text)
    (tmp_path / "test_product.py").write_text(TEST)
    names = tuple(f"test_product.py::{name}" for name in tests)
    mutant = Mutant(id="a", breaks="", file="product.py", old="2 * x", new=new, tests=names)
    assert outcome(mutant, Copy(tmp_path, Path(sys.executable))).outcome == expected
    assert product.read_text() == text


def test_parts_are_disjoint_and_make_all() -> None:
    parts = [selected([], (number, 4)) for number in (1, 2, 3, 4)]
    assert sorted(one.id for part in parts for one in part) == sorted(one.id for one in ALL)
    with pytest.raises(ValueError, match="nosuch"):
        selected(["nosuch"], (1, 1))


def test_the_page_has_the_table() -> None:
    assert "<!-- mutants -->" in PAGE.read_text()
    assert PAGE.read_text() == renewed(PAGE.read_text()), "make golden renews it"
