"""What is said where the dependency image can't be made, and how much of a build is shown."""

from __future__ import annotations

import pytest

from launcher.images.append import Stamp
from launcher.images.dependency_image import LONGEST, Wanted, clipped, engine_of
from launcher.images.docker_engine import EngineError
from launcher.images.source_files import Source
from launcher.plan.model import Image

NOWHERE = {"DOCKER_HOST": "unix:///no/such/socket", "PATH": ""}


def wanted(host: str, builder: str = "auto") -> Wanted:
    image = Image(
        uri=f"{host}/p/r/train:t",
        pinned=False,
        dependencies=f"{host}/p/r/dependencies:t",
        base="b",
        platform="linux/amd64",
        wheel="cu126",
        min_driver=None,
    )
    return Wanted(image=image, source=Source(), stamp=Stamp({}, ""), builder=builder)  # type: ignore[arg-type]  # text


@pytest.mark.parametrize(
    ("host", "builder", "told"),
    [("us-docker.pkg.dev", "auto", True), ("us-docker.pkg.dev", "docker", False), ("localhost:5000", "auto", False)],
)
def test_without_an_engine_cloud_build_is_named_where_it_can_push(host: str, builder: str, told: bool) -> None:
    with pytest.raises(EngineError) as refused:
        engine_of(NOWHERE, wanted(host, builder))
    assert ("--builder cloud-build" in refused.value.hint) == told
    assert "DOCKER_HOST" in refused.value.hint


def test_a_step_that_is_a_screen_long_is_cut() -> None:
    said: list[str] = []
    say = clipped(said.append)
    say("Step 1/2 : RUN " + "x" * 500)
    say("Step 2/2")
    assert [len(line) for line in said] == [LONGEST, 8]
    assert said[0].endswith("x…")
