"""The table of what was run where is that of the tests."""

from __future__ import annotations

import pytest

from tests.features import FEATURES, PAGE, Feature, functions, renewed


def test_the_page_has_the_table() -> None:
    assert "<!-- run on -->" in PAGE.read_text()
    assert PAGE.read_text() == renewed(PAGE.read_text()), "make golden renews it"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.name)
def test_each_test_is_there(feature: Feature) -> None:
    assert feature.cpu or feature.gpu
    for test in (*feature.cpu, *feature.gpu):
        file, _, name = test.partition("::")
        assert functions(file)[name] is (test in feature.gpu), test
