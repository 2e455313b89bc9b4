"""Bringing an image into the registry: the base that it was built on, an engine that is missing, a long step."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.images.append import Stamp
from launcher.images.docker_engine import EngineError
from launcher.images.pipeline import (
    LONGEST,
    ImageBuildRequest,
    Report,
    clipped,
    engine_of,
    pinned_base,
    push,
    recorded_base,
)
from launcher.images.registry import Registry, parse
from launcher.images.source_files import Source
from launcher.plan.build import with_digest
from launcher.plan.model import Image
from tests.images.test_append import DOCKER
from tests.plan.planning import planned
from tests.registry import OciRegistry, put_image

PINNED = f"docker.io/library/python@sha256:{'9' * 64}"


def image(host: str, base: str) -> Image:
    return Image(
        uri=f"{host}/p/train:t",
        pinned=False,
        dependencies=f"{host}/p/dependencies:t",
        base=base,
        platform="linux/amd64",
        wheel="cu126",
        min_driver=None,
    )


def label(registry: OciRegistry, name: str, value: str) -> None:
    """Give the dependency image a label."""
    with Registry(registry.host, {}) as client:
        found = client.manifest("p/dependencies", "t")
        assert found
        config = json.loads(client.blob("p/dependencies", found.body["config"]["digest"]))
        config["config"]["Labels"][name] = value
        raw = json.dumps(config).encode()
        digest = registry.store.add("p/dependencies", raw)
        body = {**found.body, "config": {**found.body["config"], "digest": digest, "size": len(raw)}}
        client.put_manifest("p/dependencies", "t", json.dumps(body).encode(), DOCKER)


@pytest.mark.parametrize(("base", "recorded"), [("python:3.12", PINNED), (PINNED, "")])
def test_a_base_by_tag_is_recorded_by_the_digest_that_was_built_on(base: str, recorded: str) -> None:
    with OciRegistry() as registry:
        put_image(registry, "p/dependencies")
        label(registry, "launch.base", PINNED)
        wanted = ImageBuildRequest(
            image=image(registry.host, base), source=Source(), stamp=Stamp({}, "1980-01-01T00:00:00Z")
        )
        first, again = (push(wanted, {}, Report()) for _ in range(2))
        found = recorded_base(wanted.image, again.reference, {})
    assert (first.how, again.how) == ("appended", "there")
    assert (first.base, found) == (recorded, recorded)
    made = planned(world={"base": base})
    after = with_digest(made, first.reference, first.base).image
    assert after
    assert after.base == (recorded or base)
    assert parse(after.uri).digest


@pytest.mark.parametrize(
    ("host", "builder", "told"),
    [("us-docker.pkg.dev", "auto", True), ("us-docker.pkg.dev", "docker", False), ("localhost:5000", "auto", False)],
)
def test_without_an_engine_cloud_build_is_named_where_it_can_push(host: str, builder: str, told: bool) -> None:
    request = ImageBuildRequest(image=image(host, "b"), source=Source(), stamp=Stamp({}, ""), builder=builder)  # type: ignore[arg-type]  # a plain str
    with pytest.raises(EngineError) as refused:
        engine_of({"DOCKER_HOST": "unix:///no/such/socket", "PATH": ""}, request)
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
        planned_image = image("us-docker.pkg.dev", f"{registry.host}/theirs/base:t")
        found = pinned_base(planned_image, {}, report)
        with pytest.raises(LaunchError, match="does not exist"):
            pinned_base(replace(planned_image, base=f"{registry.host}/theirs/base:other"), {}, report)
    assert found.base == f"{registry.host}/theirs/base@{digest}"
    assert pinned_base(found, {}, report) is found
    assert len(lines) == 1
    assert "not pinned" in lines[0]
