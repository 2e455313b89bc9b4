"""A page on a new project: `python -m tests.e2e.setuprecipe` records it again (see tests/e2e/recipe.py)."""

from __future__ import annotations

from pathlib import Path

from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.googlecloud.compute.service import YOU
from tests.cli.commands.test_setup import emptied
from tests.command import ROOT
from tests.e2e.recipe import IMAGE, printed, record, steps, world

PAGE = ROOT / "docs" / "recipes" / "setup.md"


def outputs(text: str, folder: Path) -> tuple[list[str], GoogleCloud]:
    """Run the page's commands in `folder`, in a project that has nothing."""
    with world(text, folder) as (cloud, env, image):
        emptied(cloud)
        cloud.artifacts.seconds = 0  # launch waits by its own clock
        own = {**env, "CLOUDSDK_CORE_ACCOUNT": YOU}
        return [printed(line, own, folder).replace(image, IMAGE) for line, _ in steps(text)], cloud


if __name__ == "__main__":
    record(PAGE, outputs)
