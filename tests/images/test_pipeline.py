"""Which base an image was built on: recorded in the image, and from there in the run."""

from __future__ import annotations

import json

import pytest

from launcher.images.append import Stamp
from launcher.images.dependency_image import ImageBuildRequest, Report
from launcher.images.pipeline import push, recorded_base
from launcher.images.registry import Registry, parse
from launcher.images.source_files import Source
from launcher.plan.build import with_digest
from launcher.plan.model import Image
from launcher.testing.registry import OciRegistry, put_image
from tests.images.test_append import DOCKER
from tests.plan.planning import planned

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
