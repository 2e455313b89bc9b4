"""The mutants fit the code as it is now, and their table is in docs/testing.md. `make mutants` tries them."""

from __future__ import annotations

import pytest

from tests.command import ROOT
from tests.mutants import PAGE, Mutant, functions, mutants, renewed

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


def test_the_page_has_the_table() -> None:
    assert "<!-- mutants -->" in PAGE.read_text()
    assert PAGE.read_text() == renewed(PAGE.read_text()), "make golden renews it"
