"""docs/recipes/run.md, setup.md and vm.md show what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import setuprecipe, vmrecipe
from tests.e2e.recipe import PAGE, likeness, outputs, steps

pytestmark = pytest.mark.e2e


def test_the_page_is_what_happens(tmp_path: Path) -> None:
    text = PAGE.read_text()
    found, cloud = outputs(text, tmp_path)
    for (line, shown), output in zip(steps(text), found, strict=True):
        assert likeness(output) == likeness(shown), line
    launched, again = found[:2]
    assert "[workerpool0-0] step 400/400  loss" in launched
    assert "step 400 of 400, loss" in launched
    assert "held-out" in launched
    assert "[workerpool0-0]" not in again
    assert len(cloud.jobs.jobs) == 2
    names = [blob.name for blob in cloud.objects.listed("my-bucket")]
    (run,) = {name.split("/")[1] for name in names if name.endswith("/plan.json") and not name.endswith("-2/plan.json")}
    for kind in ("metrics/0001-0000-0000-", "checkpoints/LATEST", "attempts/0001.claim", "text/0001-", "spec.yaml"):
        assert any(name.startswith(f"runs/{run}/{kind}") for name in names), kind


def test_a_new_project_trains_after_three_commands(tmp_path: Path) -> None:
    text = setuprecipe.PAGE.read_text()
    found, cloud = setuprecipe.outputs(text, tmp_path)
    for (line, shown), output in zip(steps(text), found, strict=True):
        assert likeness(output) == likeness(shown), line
    assert "my-project is ready" in found[0]
    assert "succeeded after" in found[-1]
    assert any(blob.name.endswith("/checkpoints/LATEST") for blob in cloud.objects.listed("my-project-launch"))


@pytest.mark.gcloud
def test_the_vms_of_the_page_boot_train_and_let_us_in(tmp_path: Path, gcloud: str) -> None:
    text = vmrecipe.PAGE.read_text()
    recorded = steps(text, vmrecipe.BLOCK)
    found, cloud = vmrecipe.outputs(text, tmp_path)
    for (line, shown), output in zip(recorded, found, strict=True):
        assert likeness(output) == likeness(shown), line
    assert cloud.compute.names() == []
    assert "[workerpool0-0] launch: done" in "".join(found)
    assert any("GPU 1: NVIDIA L4" in one for one in found)
