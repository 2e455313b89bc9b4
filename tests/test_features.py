"""The table of what was run where is that of the tests."""

from __future__ import annotations

import pytest

from tests.features import FEATURES, PAGE, Feature, functions, renewed, where


def test_the_page_has_the_table() -> None:
    assert "<!-- run on -->" in PAGE.read_text()
    assert PAGE.read_text() == renewed(PAGE.read_text()), "make golden renews it"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.name)
def test_each_test_is_there(feature: Feature) -> None:
    assert feature.cpu or feature.gpu
    for test in (*feature.cpu, *feature.gpu):
        file, _, name = test.partition("::")
        assert functions(file)[name] is (test in feature.gpu), test


def test_a_technique_was_run_where_all_of_its_tests_passed() -> None:
    one = Feature("a", "b", ("c::d",), ("e::f", "g::h"))
    ran = {"e::f": {"device": "NVIDIA H200", "date": "2026-11-21"}}
    assert where(one, ran) == "CPU; on a GPU never"
    assert where(one, {**ran, "g::h": ran["e::f"]}) == "CPU; NVIDIA H200, 2026-11-21"
    assert where(one._replace(cpu=()), {}) == "on a GPU never"
