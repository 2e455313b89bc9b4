"""The registry itself: as strict as real ones, so that a client can't be right here and wrong there."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.registry import (
    OciRegistry,
    digest,
)

OCI = "application/vnd.oci.image.manifest.v1+json"


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The first error's code."""
        return str(json.loads(self.body)["errors"][0]["code"])


def ask(
    registry: OciRegistry, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(registry.host, timeout=10)
    try:
        url = urlsplit(path)
        connection.request(method, f"{url.path}?{url.query}" if url.query else url.path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
    finally:
        connection.close()


@pytest.fixture
def registry() -> Iterator[OciRegistry]:
    """Open to everybody."""
    with OciRegistry() as running:
        yield running


def manifest(config: bytes, size: int | None = None) -> bytes:
    """An image without layers."""
    settings = {"mediaType": "x", "digest": digest(config), "size": len(config) if size is None else size}
    return json.dumps({"schemaVersion": 2, "mediaType": OCI, "config": settings, "layers": []}).encode()


def test_a_manifest_is_checked(registry: OciRegistry) -> None:
    kind, put = {"Content-Type": OCI}, "/v2/a/b/manifests/t"
    assert ask(registry, "PUT", put, manifest(b"{}"), kind).code == "MANIFEST_BLOB_UNKNOWN"
    registry.store.add("a/b", b"{}")
    assert ask(registry, "PUT", put, manifest(b"{}", size=3), kind).code == "SIZE_INVALID"
    assert ask(registry, "PUT", put, b"[]", kind).code == "MANIFEST_INVALID"
    assert ask(registry, "PUT", put, manifest(b"{}"), {"Content-Type": "text/plain"}).code == "MANIFEST_INVALID"
    wrong = f"/v2/a/b/manifests/{digest(b'other')}"
    assert ask(registry, "PUT", wrong, manifest(b"{}"), kind).code == "DIGEST_INVALID"
    assert registry.tag("a/b", "t") is None
    assert ask(registry, "PUT", put, manifest(b"{}"), kind).status == 201
    assert ask(registry, "GET", "/v2/a/b/tags/list").body == b'{"tags": ["t"]}'
