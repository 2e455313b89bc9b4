"""Manifests, blobs and mounts; requests that are led elsewhere, stopped, or met by silence."""

from __future__ import annotations

import base64
import io
import json
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from launcher.errors import LaunchError, NotAuthorised
from launcher.images.registry import Registry, RegistryError, RepositoryMissing
from launcher.images.registry.client import LARGEST
from launcher.images.registry.transport import Http
from launcher.images.registry.transport import Request as HttpRequest
from launcher.testing.clock import FakeClock
from launcher.testing.httpserver import Response
from launcher.testing.registry.api import Request
from tests.images.registry.helpers import MIB, OCI, REPOSITORY, client, manifest, send, some
from tests.registry import (
    AlterHeader,
    Bearer,
    Fault,
    LoseResponse,
    OciRegistry,
    Refuse,
    Reset,
    Torn,
    digest,
)
from tests.registry.faults import Serve

CONFIG = b"{}"


def push(made: Registry, raw: bytes, *blobs: bytes, tag: str = "t", repository: str = REPOSITORY) -> str:
    """An image."""
    for blob in (*blobs, CONFIG):
        send(made, blob, repository)
    return made.put_manifest(repository, tag, raw, OCI)


def test_a_pushed_image_is_read_back(made: Registry, registry: OciRegistry) -> None:
    raw = manifest(b"layer")
    assert push(made, raw, b"layer") == digest(raw) == registry.tag(REPOSITORY, "t")
    for reference in ("t", digest(raw)):
        found = made.manifest(REPOSITORY, reference)
        assert found is not None
        assert (found.digest, found.media_type, found.raw) == (digest(raw), OCI, raw)
        assert found.body == json.loads(raw)
        assert made.head(REPOSITORY, reference) == digest(raw)
    assert made.blob(REPOSITORY, digest(b"layer")) == b"layer"
    assert made.has(REPOSITORY, digest(b"layer"))
    assert made.sent == registry.received == len(raw) + len(b"layer") + len(CONFIG)


def test_missing_manifests_and_blobs(made: Registry) -> None:
    assert made.head(REPOSITORY, "t") is None
    assert made.manifest(REPOSITORY, "t") is None
    assert not made.has(REPOSITORY, digest(b"layer"))
    with pytest.raises(RegistryError, match=r"my-project/launch/train: read sha256:\w+: HTTP 404 BLOB_UNKNOWN"):
        made.blob(REPOSITORY, digest(b"layer"))


def test_an_index_is_read_too(made: Registry) -> None:
    raw = manifest()
    push(made, raw)
    descriptor = {"digest": digest(raw), "size": len(raw), "mediaType": OCI}
    for media_type in (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ):
        index = json.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": [descriptor]}).encode()
        made.put_manifest(REPOSITORY, "index", index, media_type)
        found = made.manifest(REPOSITORY, "index")
        assert found is not None
        assert (found.media_type, found.digest) == (media_type, digest(index))


@pytest.mark.parametrize("read", [Registry.manifest, Registry.blob], ids=["manifest", "blob"])
def test_damage_on_the_way_is_noticed(made: Registry, registry: OciRegistry, time: FakeClock, read: object) -> None:
    raw = manifest(b"layer")
    push(made, raw, b"layer")
    step, reference = ("blob.get", digest(b"layer")) if read is Registry.blob else ("manifest.get", "t")
    get = made.blob if read is Registry.blob else made.manifest
    once = registry.faults.add(Fault(step, Torn("answer")))
    assert get(REPOSITORY, reference)
    assert registry.faults.used[once] == 1
    registry.faults.add(Fault(step, Torn("answer"), times=None))
    with pytest.raises(RegistryError, match=r"damaged: it has the digest sha256:\w+, and should .*\(tried 5 times\)"):
        get(REPOSITORY, reference)
    assert time.waited == [0.5, 0.5, 1.0, 2.0, 4.0]


def test_a_blob_may_lie_elsewhere(time: FakeClock) -> None:
    with OciRegistry(redirects=True) as registry, client(registry, time) as made:
        push(made, manifest(b"layer"), b"layer")
        assert made.blob(REPOSITORY, digest(b"layer")) == b"layer"
        assert made.has(REPOSITORY, digest(CONFIG))
        assert registry.requests[-1].query


def test_what_would_fill_the_memory_is_refused(made: Registry, registry: OciRegistry) -> None:
    found = registry.store.add(REPOSITORY, bytes(LARGEST + 1))
    with pytest.raises(RegistryError, match="larger than 16 MiB"):
        made.blob(REPOSITORY, found)


def test_an_invalid_manifest_is_refused(made: Registry, registry: OciRegistry) -> None:
    registry.store.repository(REPOSITORY).manifests[digest(b"[]")] = (OCI, b"[]")
    with pytest.raises(RegistryError, match="not a manifest"):
        made.manifest(REPOSITORY, digest(b"[]"))


def test_a_missing_repository_is_named_with_the_fix(time: FakeClock) -> None:
    with OciRegistry(repositories=["my-project/other"]) as registry, client(registry, time) as made:
        assert made.head(REPOSITORY, "t") is None
        with pytest.raises(RepositoryMissing, match=rf"{registry.host}/{REPOSITORY}: the repository does not exist"):
            send(made, b"layer")
        with pytest.raises(RepositoryMissing):
            made.put_manifest(REPOSITORY, "t", manifest(), OCI)
        with pytest.raises(RepositoryMissing):
            made.mount(REPOSITORY, digest(b"layer"), "my-project/other/x")
        assert not time.waited


def test_a_lost_response_does_not_lose_the_manifest(made: Registry, registry: OciRegistry) -> None:
    fault = registry.faults.add(Fault("manifest.put", LoseResponse()))
    raw = manifest()
    assert push(made, raw) == registry.tag(REPOSITORY, "t")
    assert registry.faults.used[fault] == 1


def test_a_tag_that_cant_be_moved(time: FakeClock) -> None:
    with OciRegistry(immutable=True) as registry, client(registry, time) as made:
        raw = manifest()
        push(made, raw)
        assert push(made, raw) == digest(raw)
        registry.faults.add(Fault("manifest.put", Refuse(400, "TAG_INVALID")))
        assert made.put_manifest(REPOSITORY, "t", raw, OCI) == digest(raw), "somebody put the same there"
        with pytest.raises(RegistryError, match="TAG_INVALID: tag is immutable"):
            push(made, manifest(b"layer"), b"layer")
        assert registry.tag(REPOSITORY, "t") == digest(raw)


def test_a_manifest_stored_under_another_digest(made: Registry, registry: OciRegistry) -> None:
    send(made, CONFIG)
    registry.faults.add(Fault("manifest.put", AlterHeader("Docker-Content-Digest", digest(b"other"))))
    with pytest.raises(RegistryError, match=rf"stored {digest(b'other')} instead of {digest(manifest())}"):
        made.put_manifest(REPOSITORY, "t", manifest(), OCI)


def test_a_blob_is_mounted_from_another_repository(made: Registry, registry: OciRegistry) -> None:
    layer = some(100_000)
    send(made, layer, "my-project/launch/dependencies")
    sent = made.sent
    assert made.mount(REPOSITORY, digest(layer), "my-project/launch/dependencies")
    assert made.has(REPOSITORY, digest(layer))
    assert made.sent == sent


def test_a_failed_mount_leaves_no_upload(made: Registry, registry: OciRegistry) -> None:
    assert not made.mount(REPOSITORY, digest(b"layer"), "my-project/launch/dependencies")
    assert registry.steps == ["mount", "upload.cancel"]
    assert not registry.api.uploads
    registry.faults.add(Fault("upload.cancel", Reset(), times=None))
    assert not made.mount(REPOSITORY, digest(b"layer"), "my-project/launch/dependencies")
    assert registry.steps[2:] == ["mount", "upload.cancel"], "cancelling is tried once"


def test_a_mount_within_a_repository_only_looks(made: Registry, registry: OciRegistry) -> None:
    send(made, b"layer")
    assert made.mount(REPOSITORY, digest(b"layer"), REPOSITORY)
    assert not made.mount(REPOSITORY, digest(b"other"), REPOSITORY)
    assert registry.steps[-2:] == ["blob.head", "blob.head"]


def test_retry_after_is_obeyed(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    registry.faults.add(Fault("manifest.head", Refuse(429, "TOOMANYREQUESTS", retry_after=7), times=2))
    registry.faults.add(Fault("manifest.head", Refuse(503)))
    assert made.head(REPOSITORY, "t") is None
    assert time.waited == [7.0, 7.0, 2.0]


@pytest.mark.parametrize(("asked", "waited"), [(3600, []), ("Wed, 21 Oct 2026 07:28:00 GMT", [0.5])])
def test_a_retry_after_that_isnt_followed(
    made: Registry, registry: OciRegistry, time: FakeClock, asked: int | str, waited: list[float]
) -> None:
    registry.faults.add(Fault("manifest.head", Refuse(429, retry_after=asked)))
    if waited:
        assert made.head(REPOSITORY, "t") is None
    else:
        with pytest.raises(RegistryError, match=r"HTTP 429 .*\(tried 1 times\)"):
            made.head(REPOSITORY, "t")
    assert time.waited == waited


@pytest.mark.parametrize("step", ["manifest.head", "manifest.get", "manifest.put", "mount", "blob.head", "blob.get"])
def test_a_reset_connection_is_tried_again(made: Registry, registry: OciRegistry, step: str) -> None:
    fault = registry.faults.add(Fault(step, Reset(), times=2))
    raw = manifest(b"layer")
    push(made, raw, b"layer")
    assert made.head(REPOSITORY, "t") == digest(raw)
    assert made.manifest(REPOSITORY, "t")
    assert made.blob(REPOSITORY, digest(b"layer")) == b"layer"
    assert made.has(REPOSITORY, digest(b"layer"))
    assert made.mount("other", digest(b"layer"), REPOSITORY)
    assert registry.faults.used[fault] == 2


def test_a_refused_first_connection_is_not_retried(time: FakeClock) -> None:
    with socket.socket() as taken:  # bound, and not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        made = Registry(f"127.0.0.1:{taken.getsockname()[1]}", {})
        with made, pytest.raises(RegistryError, match=r"can't be reached: .*Connection refused\nStart the registry"):
            made.head(REPOSITORY, "t")


def test_a_refused_later_connection_is_retried(time: FakeClock) -> None:
    with ExitStack() as stack:
        with OciRegistry() as registry:
            made = stack.enter_context(client(registry, time))
            assert made.head(REPOSITORY, "t") is None
        with pytest.raises(RegistryError, match=r"Connection refused.* \(tried 5 times\)"):
            made.head(REPOSITORY, "t")
    assert len(time.waited) == 4


def test_no_other_credentials_are_sent(registry: OciRegistry, time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with client(registry, time) as made:
        assert made.head(REPOSITORY, "t") is None
    assert "authorization" not in registry.requests[0].headers
    assert registry.requests[0].headers["accept-encoding"] == "identity"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(LaunchError, match=r'needs the package requests\npip install "gcp-launch\[docker\]"'):
        Registry("127.0.0.1:1", {})


# --- Where requests end up --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leads:
    """Nothing is done: the answer leads to a page elsewhere, as from a network that wants a login first."""

    status: int
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        return Response(b"", self.status, {"Location": "https://login.example.com/"})


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("step", ["manifest.put", "upload.begin", "upload.finish", "mount"])
def test_a_write_that_is_led_elsewhere_is_not_done(
    made: Registry, registry: OciRegistry, step: str, status: int
) -> None:
    push(made, manifest(), tag="old")
    send(made, b"elsewhere", "other")
    registry.faults.add(Fault(step, Leads(status), times=None))

    def image() -> None:
        made.mount(REPOSITORY, digest(b"elsewhere"), "other")
        send(made, some(9 * MIB))
        push(made, manifest(), tag="new")

    with pytest.raises(RegistryError, match=f"HTTP {status}"):
        image()
    assert registry.tag(REPOSITORY, "new") is None


def test_whether_a_repository_takes_images_is_known_before_one_is_built(made: Registry, registry: OciRegistry) -> None:
    made.check_write(REPOSITORY)
    assert not registry.api.uploads
    registry.faults.add(Fault("upload.begin", Refuse(403, "DENIED")))
    with pytest.raises(NotAuthorised, match="DENIED"):
        made.check_write(REPOSITORY)
    registry.faults.add(Fault("upload.begin", Refuse(404, "NAME_UNKNOWN")))
    with pytest.raises(RepositoryMissing):
        made.check_write(REPOSITORY)


@pytest.mark.parametrize("said", ["latest", "md5:abc", "sha256:12"])
def test_a_digest_that_is_none_is_made_of_the_bytes(made: Registry, registry: OciRegistry, said: str) -> None:
    digest_of = push(made, manifest())
    registry.faults.add(Fault("manifest.*", AlterHeader("Docker-Content-Digest", said), times=None))
    assert made.head(REPOSITORY, "t") == digest_of


def test_what_is_stopped_ends_at_its_next_piece(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    class Stops(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > MIB:
                made.stop()
            return super().read(size)

    data = some(9 * MIB)
    with pytest.raises(RegistryError, match="stopped"):
        made.upload(REPOSITORY, digest(data), len(data), lambda: Stops(data))
    with pytest.raises(RegistryError, match="stopped"):
        made.head(REPOSITORY, "t")
    assert made.sent < 2 * MIB
    assert not time.waited


def test_a_registry_may_be_silent_in_the_midst_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has less time than a silence; urllib3 would take its time for both."""
    monkeypatch.setattr("launcher.images.registry.transport.CONNECT_SECONDS", 0.1)
    body = bytes(8 * MIB)

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            for size, silence in ((0, 0.0), (len(body), 0.4)):
                head = connection.recv(1 << 16).partition(b"\r\n\r\n")[2]
                sleep(silence)
                left = size - len(head)
                while left > 0 and (piece := connection.recv(min(left, 1 << 16))):
                    left -= len(piece)
                connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        http = Http("127.0.0.1")
        assert http.send(HttpRequest("look", "HEAD", url)).status_code == 201
        assert http.send(HttpRequest("write", "PUT", url, body=body)).status_code == 201
        http.close()
        thread.join()


def test_where_a_registry_leads_its_readers_nobody_gets_its_password(time: FakeClock, tmp_path: Path) -> None:
    access = Bearer({"me": "s3cret"})
    with OciRegistry(access=access) as other, OciRegistry(access=access, redirects=True) as registry:
        auth = base64.b64encode(b"me:s3cret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        with client(registry, time, {"DOCKER_CONFIG": str(tmp_path)}) as made:
            send(made, b"layer")
            registry.faults.add(Fault("blob.get", AlterHeader("Location", f"{other.url}/v2/x/blobs/y"), times=None))
            with pytest.raises(NotAuthorised):
                made.blob(REPOSITORY, digest(b"layer"))
        assert other.steps == ["blob.get"]
        assert "authorization" not in other.requests[0].headers


def test_an_address_that_a_registry_gives_is_reached_with_tls() -> None:
    registry = Registry("registry.example.com", {})
    assert registry.url("http://registry.example.com/v2/u?a=1") == "https://registry.example.com/v2/u?a=1"
    assert registry.url("https://storage.example.com/u") == "https://storage.example.com/u"
    for elsewhere in ("http://storage.example.com/u", "http://localhost@storage.example.com/u", "ftp://x/y"):
        with pytest.raises(RegistryError, match="without TLS"):
            registry.url(elsewhere)
