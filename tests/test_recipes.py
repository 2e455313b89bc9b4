"""Every recorded command in README and docs is run, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import recipes
from tests.command import ROOT

STEPS = [(page, step) for page in recipes.pages() for step in recipes.steps(page.read_text())]


@pytest.mark.parametrize(("page", "step"), STEPS, ids=lambda value: value.stem if isinstance(value, Path) else value[0])
def test_recorded_command(page: Path, step: recipes.Step) -> None:
    assert recipes.run(step.command) == step.output, f"{page.relative_to(ROOT)}; if the change is meant: make golden"


def test_there_are_recorded_commands() -> None:
    assert len(STEPS) >= 10
