"""What an image holds, as a CycloneDX document that lies beside it in the registry.

The document is an artifact of its own whose subject is the image (OCI 1.1). Registries that know referrers find it by
that; for the others there is an index under a tag made of the image's digest, as the specification says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError
from launcher.images.package_inventory import Inventory, Package, in_container, inventory, of_source

if TYPE_CHECKING:
    from launcher.images.registry.client import Registry
    from launcher.images.registry.reference import Reference

__all__ = ["attach", "document", "find", "in_container", "inventory", "of_source"]

KIND = "application/vnd.cyclonedx+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = b"{}"
EMPTY_KIND = "application/vnd.oci.empty.v1+json"
"""https://github.com/opencontainers/image-spec/blob/v1.1.1/manifest.md#guidance-for-an-empty-descriptor"""


# --- The document ---------------------------------------------------------------------------------------------------


def document(holds: Inventory, reference: Reference, digest: str, *, time: str, version: str) -> bytes:
    """CycloneDX 1.6 in JSON. Pure, and the same for the same arguments.

    `digest` is the image's, `time` when its content was made (RFC 3339), `version` launch's own.

    Raises:
        LaunchError: the library isn't installed.
    """
    try:
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.model.tool import ToolRepository
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError as error:
        raise LaunchError("the SBOM needs cyclonedx-python-lib", 'pip install "gcp-launch[docker]"') from error
    image = image_of(reference, digest)
    parts = [*components(holds)]
    launch = Component(name="launch", version=version, type=ComponentType.APPLICATION, bom_ref="launch")
    metadata = BomMetaData(
        component=image,
        timestamp=datetime.fromisoformat(time),
        tools=ToolRepository(components=[launch]),
        properties=[_property("launch:packages-found-in", holds.found_in)],
    )
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{reference.name}@{digest}")
    bom = Bom(serial_number=serial, metadata=metadata, components=parts)
    bom.register_dependency(image, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1).encode() + b"\n"


def image_of(reference: Reference, digest: str) -> Any:
    """The image itself, which the document is about."""
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    name = reference.repository.rpartition("/")[2]
    where = {"repository_url": reference.name, **({"tag": reference.tag} if reference.tag else {})}
    purl = PackageURL("oci", None, name, digest, where)
    return Component(name=reference.name, version=digest, type=ComponentType.CONTAINER, purl=purl, bom_ref=str(purl))


def components(holds: Inventory) -> Iterator[Any]:
    """All packages, each with its name in the world (https://github.com/package-url/purl-spec)."""
    from packageurl import PackageURL

    for one in holds.python:
        yield component(one, PackageURL("pypi", None, one.name, one.version or None))
    distribution = holds.distribution or "debian"
    for one in holds.debian:
        about = {"arch": one.architecture, "distro": holds.distribution}
        kind = PackageURL("deb", distribution.partition("-")[0], one.name, one.version or None, about)
        yield component(one, kind)


def component(package: Package, purl: Any) -> Any:
    """One package."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.component import Component

    licenses = [LicenseFactory().make_from_string(package.license)] if package.license else []
    version = package.version or None
    return Component(name=package.name, version=version, purl=purl, bom_ref=str(purl), licenses=licenses)


def _property(name: str, value: str) -> Any:
    from cyclonedx.model import Property

    return Property(name=name, value=value)


# --- In the registry ------------------------------------------------------------------------------------------------


def attach(registry: Registry, reference: Reference, digest: str, data: bytes) -> str:
    """Put a document beside the image with that digest, in the image's repository; the artifact's digest is returned.

    What is there already is not sent again. Raises LaunchError: there is no such image, or the registry refuses.
    """
    image = registry.manifest(reference.repository, digest)
    if image is None:
        raise LaunchError(f"the registry has no {reference.name}@{digest}", "Push it first: launch push")
    raw = encoded(artifact(descriptor(image.media_type, image.raw, digest), data))
    listed = described(raw)
    known = referrers(registry, reference, digest)
    if listed in known:
        return str(listed["digest"])
    for blob in (EMPTY, data):
        if not registry.has(reference.repository, _digest(blob)):
            registry.upload(reference.repository, _digest(blob), len(blob), partial(BytesIO, blob))
    registry.put_manifest(reference.repository, listed["digest"], raw, MANIFEST)
    registry.put_manifest(reference.repository, tag_of(digest), encoded(index([*known, listed])), INDEX)
    return str(listed["digest"])


def find(registry: Registry, reference: Reference, digest: str) -> bytes | None:
    """The document that was attached last to the image with that digest; None if there is none. Raises LaunchError."""
    for one in reversed(referrers(registry, reference, digest)):
        if one.get("artifactType") != KIND:
            continue
        manifest = registry.manifest(reference.repository, one["digest"])
        for layer in manifest.body["layers"] if manifest else ():
            if layer["mediaType"] == KIND:
                return registry.blob(reference.repository, layer["digest"])
    return None


def referrers(registry: Registry, reference: Reference, digest: str) -> list[Mapping[str, Any]]:
    """What is attached to an image, by its index's tag."""
    found = registry.manifest(reference.repository, tag_of(digest))
    return list(found.body.get("manifests") or ()) if found else []


def artifact(subject: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """The manifest of a document about `subject`."""
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": KIND,
        "config": descriptor(EMPTY_KIND, EMPTY, _digest(EMPTY)),
        "layers": [descriptor(KIND, data, _digest(data))],
        "subject": subject,
    }


def index(manifests: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The image index that lists what refers to an image."""
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}


def described(raw: bytes) -> dict[str, Any]:
    """An artifact's manifest as the index lists it."""
    return {**descriptor(MANIFEST, raw, _digest(raw)), "artifactType": KIND}


def descriptor(kind: str, data: bytes, digest: str) -> dict[str, Any]:
    """How one thing in a registry names another."""
    return {"mediaType": kind, "digest": digest, "size": len(data)}


def tag_of(digest: str) -> str:
    """https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#referrers-tag-schema"""
    return digest.replace(":", "-")


def encoded(data: Mapping[str, Any]) -> bytes:
    """JSON as registries keep it: the bytes count, for their digest is the name."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()


def _digest(data: bytes) -> str:
    from launcher.images.registry.client import digest_of

    return digest_of(data)
