"""The registry itself: as strict as real ones, so that a client can't be right here and wrong there."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from launcher.testing.clock import FakeClock
from launcher.testing.registry import (
    Bearer,
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


def begun(registry: OciRegistry) -> str:
    """The address of a new upload."""
    answer = ask(registry, "POST", "/v2/a/b/blobs/uploads/")
    assert answer.status == 202
    return answer.headers["location"]


def manifest(config: bytes, size: int | None = None) -> bytes:
    """An image without layers."""
    settings = {"mediaType": "x", "digest": digest(config), "size": len(config) if size is None else size}
    return json.dumps({"schemaVersion": 2, "mediaType": OCI, "config": settings, "layers": []}).encode()


def test_a_layer_may_come_in_a_request_of_its_own_as_docker_sends_it(registry: OciRegistry) -> None:
    place = begun(registry)
    assert ask(registry, "PATCH", place, b"abc", {"Content-Range": "0-2"}).code == "UNSUPPORTED"
    assert ask(registry, "PATCH", place, b"abcde").status == 202
    done = ask(registry, "PUT", f"{place}?digest={digest(b'abcdef')}", b"f")
    assert (done.status, done.headers["docker-content-digest"]) == (201, digest(b"abcdef"))
    assert ask(registry, "GET", f"/v2/a/b/blobs/{digest(b'abcdef')}").body == b"abcdef"
    assert ask(registry, "PUT", place).code == "BLOB_UPLOAD_UNKNOWN"


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


def basic(user: str, password: str) -> dict[str, str]:
    """The header of a login."""
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def token(registry: OciRegistry, *scopes: str, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """The header of a token for some scopes."""
    query = "&".join(f"scope={quote(scope)}" for scope in scopes)
    answer = ask(registry, "GET", f"/token?{query}", headers=headers)
    assert answer.status == 200
    return {"Authorization": f"Bearer {json.loads(answer.body)['token']}"}


def test_tokens_are_for_their_scopes_and_die() -> None:
    time = FakeClock()
    with OciRegistry(access=Bearer({"me": "x"}, lifetime=60, clock=time)) as registry:
        post = ("POST", "/v2/a/blobs/uploads/")
        refused = ask(registry, *post)
        assert refused.status == 401
        assert 'scope="repository:a:pull,push"' in refused.headers["www-authenticate"]
        pull = token(registry, "repository:a:pull", headers=basic("me", "x"))
        assert 'error="insufficient_scope"' in ask(registry, *post, headers=pull).headers["www-authenticate"]
        push = token(registry, "repository:a:pull,push", headers=basic("me", "x"))
        assert ask(registry, *post, headers=push).status == 202
        assert ask(registry, "POST", "/v2/b/blobs/uploads/", headers=push).status == 401
        mount = ("POST", f"/v2/a/blobs/uploads/?mount={digest(b'x')}&from=b")
        assert ask(registry, *mount, headers=push).status == 401, "the source must be readable too"
        both = token(registry, "repository:a:pull,push", "repository:b:pull", headers=basic("me", "x"))
        assert ask(registry, *mount, headers=both).status == 202
        time.advance(60)
        assert 'error="invalid_token"' in ask(registry, *post, headers=push).headers["www-authenticate"]
