"""The recipe keeps the rules, and each rule can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.images.archives import DOCKERFILE
from tests.containers.lint import RULES, findings

RECIPE = (Path(__file__).parents[2] / "containers" / DOCKERFILE).read_text(encoding="utf-8")

BROKEN = [
    ("exec_form", '["python", "-m", "launch_train.node"]', "python -m launch_train.node"),
    ("no_root", "USER 1000:1000", ""),
    ("no_root", "USER 1000:1000", "USER launch"),
    ("no_secrets", "ARG TORCH\n", "ARG PIP_TOKEN\n"),
    ("no_secrets", "PYTHONUNBUFFERED=1", "API_KEY=1"),
    ("code_comes_last", "COPY --chown=1000:1000 code /workspace", "COPY code /workspace\nRUN true"),
    ("code_comes_last", "COPY torch ./torch", "COPY torch ./torch\nCOPY code ./code"),
    ("only_the_environment_leaves_the_build", "COPY launch_train /opt", "COPY . /opt/all\nCOPY launch_train /opt"),
]


def test_the_recipe_keeps_the_rules() -> None:
    assert findings(RECIPE) == []


@pytest.mark.parametrize(("rule", "right", "wrong"), BROKEN)
def test_a_broken_rule_is_reported(rule: str, right: str, wrong: str) -> None:
    assert right in RECIPE
    assert rule in {found.partition(":")[0] for found in findings(RECIPE.replace(right, wrong))}


def test_each_rule_is_broken_above() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rule in RULES}
