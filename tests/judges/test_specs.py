"""The specs of job_specs/frameworks can be planned as they are; their packages are not needed for that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command import SPECS, launch

FRAMEWORKS = sorted((SPECS / "frameworks").glob("*/job.yaml"))


def test_there_is_one_for_each_framework() -> None:
    names = {path.parent.name for path in FRAMEWORKS}
    assert names == {"accelerate", "hf-trainer", "jax", "keras", "lightning", "sklearn", "torchrun", "torchtitan"}


@pytest.mark.parametrize("spec", FRAMEWORKS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("target", ["vertex", "local"])
def test_it_is_planned_without_a_warning(target: str, spec: Path) -> None:
    planned = launch(target, spec, "--dry-run")
    assert planned.code == 0, planned.err
    text = " ".join((planned.out + planned.err).split())
    if target == "local":  # the framework need not be in the tests' own environment
        text = re.sub(r"warning (\S+: imports \w+, and it is|image\.requirements:) not installed in", "", text)
    assert "warning" not in text
