"""What is said where the dependency image can't be made, and how much of a build is shown."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.images.append import Stamp
from launcher.images.dependency_image import LONGEST, ImageBuildRequest, Report, clipped, engine_of, pinned_base
from launcher.images.docker_engine import EngineError
from launcher.images.source_files import Source
from launcher.plan.model import Image
from launcher.testing.registry import OciRegistry, put_image

NOWHERE = {"DOCKER_HOST": "unix:///no/such/socket", "PATH": ""}


def wanted(host: str, builder: str = "auto") -> ImageBuildRequest:
    image = Image(
        uri=f"{host}/p/r/train:t",
        pinned=False,
        dependencies=f"{host}/p/r/dependencies:t",
        base="b",
        platform="linux/amd64",
        wheel="cu126",
        min_driver=None,
    )
    return ImageBuildRequest(image=image, source=Source(), stamp=Stamp({}, ""), builder=builder)  # type: ignore[arg-type]  # a plain str


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


def test_cloud_build_gets_a_base_by_the_digest_that_its_registry_has() -> None:
    lines: list[str] = []
    report = Report(line=lines.append)
    with OciRegistry() as registry:
        digest = put_image(registry, "theirs/base")
        image = replace(wanted("us-docker.pkg.dev").image, base=f"{registry.host}/theirs/base:t")
        found = pinned_base(image, {}, report)
        with pytest.raises(LaunchError, match="does not exist"):
            pinned_base(replace(image, base=f"{registry.host}/theirs/base:other"), {}, report)
    assert found.base == f"{registry.host}/theirs/base@{digest}"
    assert pinned_base(found, {}, report) is found
    assert len(lines) == 1
    assert "not pinned" in lines[0]
