"""An image's SBOM: held against CycloneDX's own schema, and attached on a registry on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.images import sbom
from launcher.images.package_inventory import Inventory, Package
from launcher.images.registry import Registry, parse
from tests.registry import Fault, OciRegistry, Refuse

HOLDS = Inventory(
    python=(
        Package("numpy", "2.5.5", "BSD-3-Clause AND MIT"),
        Package("torch", "2.13.0+cu126", "BSD-3-Clause"),
        Package("einops"),
        Package("odd", "1", "Some License of Ours (v2)"),
    ),
    debian=(Package("libc6", "2.36-9+deb12u13", architecture="amd64"),),
    distribution="debian-12",
    found_in="the image",
)
DIGEST = "sha256:" + 64 * "a"
TIME = "2026-01-02T03:04:05Z"


def made(holds: Inventory = HOLDS, digest: str = DIGEST) -> bytes:
    reference = parse("us-docker.pkg.dev/my-project/launch/train:0123")
    return sbom.document(holds, reference, digest, time=TIME, version="0.1.0")


def test_it_is_valid() -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for holds in (HOLDS, Inventory(found_in="lock files")):
        assert validator.validate_str(made(holds).decode()) is None
    assert validator.validate_str(made().decode().replace('"libc6"', "7")) is not None, "it can fail"


def test_it_names_what_there_is() -> None:
    told = json.loads(made())
    assert {one["purl"] for one in told["components"]} == {
        "pkg:pypi/numpy@2.5.5",
        "pkg:pypi/torch@2.13.0%2Bcu126",
        "pkg:pypi/einops",
        "pkg:pypi/odd@1",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
    }
    licenses = {one["name"]: one.get("licenses") for one in told["components"]}
    assert licenses == {
        "numpy": [{"expression": "BSD-3-Clause AND MIT"}],
        "torch": [{"license": {"id": "BSD-3-Clause"}}],
        "einops": None,
        "odd": [{"license": {"name": "Some License of Ours (v2)"}}],
        "libc6": None,
    }
    about = told["metadata"]
    assert about["component"]["version"] == DIGEST
    assert about["timestamp"] == "2026-01-02T03:04:05+00:00"
    assert about["properties"] == [{"name": "launch:packages-found-in", "value": "the image"}]


def test_the_same_has_the_same_bytes() -> None:
    assert made() == made()
    turned = Inventory(
        python=HOLDS.python[::-1], debian=HOLDS.debian, distribution=HOLDS.distribution, found_in="the image"
    )
    assert made(turned) == made()
    other = json.loads(made(digest="sha256:" + 64 * "b"))
    assert other["serialNumber"] != json.loads(made())["serialNumber"]


@pytest.fixture
def server() -> Iterator[OciRegistry]:
    with OciRegistry() as running:
        yield running


@pytest.fixture
def registry(server: OciRegistry) -> Iterator[Registry]:
    with Registry(server.host, {}) as client:
        yield client


@pytest.fixture
def image(registry: Registry) -> str:
    """An image's digest; it is at l/train:1."""
    config = json.dumps({"architecture": "amd64", "os": "linux"}).encode()
    registry.upload("l/train", digest_of(config), len(config), lambda: open_(config))
    described = sbom.descriptor("application/vnd.oci.image.config.v1+json", config, digest_of(config))
    manifest = {"schemaVersion": 2, "mediaType": sbom.MANIFEST, "config": described, "layers": []}
    return registry.put_manifest("l/train", "1", sbom.encoded(manifest), sbom.MANIFEST)


def open_(data: bytes) -> Any:
    from io import BytesIO

    return BytesIO(data)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_it_is_attached_and_found(server: OciRegistry, registry: Registry, image: str) -> None:
    reference = parse(f"{server.host}/l/train:1")
    assert sbom.find(registry, reference, image) is None
    attached = sbom.attach(registry, reference, image, b'{"a": 1}')
    assert sbom.find(registry, reference, image) == b'{"a": 1}'
    found = registry.manifest("l/train", attached)
    assert found is not None
    subject = registry.manifest("l/train", image)
    assert subject is not None
    assert found.body["subject"] == {"mediaType": sbom.MANIFEST, "digest": image, "size": len(subject.raw)}
    assert found.body["artifactType"] == "application/vnd.cyclonedx+json"
    assert registry.head("l/train", "1") == image, "the image is as it was"


def test_attaching_again_sends_nothing(server: OciRegistry, registry: Registry, image: str) -> None:
    reference = parse(f"{server.host}/l/train:1")
    first, sent = sbom.attach(registry, reference, image, b"{}\n"), registry.sent
    assert sbom.attach(registry, reference, image, b"{}\n") == first
    assert registry.sent == sent


def test_what_others_attached_stays(server: OciRegistry, registry: Registry, image: str) -> None:
    reference, tag = parse(f"{server.host}/l/train:1"), image.replace(":", "-")
    sbom.attach(registry, reference, image, b'{"a": 1}')
    [ours] = sbom.referrers(registry, reference, image)
    theirs = {**ours, "artifactType": "application/vnd.example.signature"}
    registry.put_manifest("l/train", tag, sbom.encoded(sbom.index([theirs, ours, theirs])), sbom.INDEX)
    sbom.attach(registry, reference, image, b'{"a": 2}')
    kinds = [one["artifactType"] for one in sbom.referrers(registry, reference, image)]
    assert kinds == [theirs["artifactType"], sbom.KIND, theirs["artifactType"], sbom.KIND]
    assert sbom.find(registry, reference, image) == b'{"a": 2}', "the last of ours"


def test_an_image_that_is_not_there(server: OciRegistry, registry: Registry) -> None:
    with pytest.raises(LaunchError, match="Push it first: launch push"):
        sbom.attach(registry, parse(f"{server.host}/l/train"), DIGEST, b"{}")
    assert not [step for step in server.steps if step.startswith("upload")]


def test_nothing_is_listed_that_is_not_there(server: OciRegistry, registry: Registry, image: str) -> None:
    server.faults.add(Fault("manifest.put", Refuse(400)))
    with pytest.raises(LaunchError):
        sbom.attach(registry, parse(f"{server.host}/l/train:1"), image, b"{}")
    assert registry.head("l/train", image.replace(":", "-")) is None
