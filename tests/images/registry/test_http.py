"""Where requests end up: led elsewhere, stopped, or met by silence."""

from __future__ import annotations

import base64
import io
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from launcher.errors import NotAuthorised
from launcher.images.registry import Registry, RegistryError, RepositoryMissing
from launcher.images.registry.transport import Http
from launcher.images.registry.transport import Request as HttpRequest
from launcher.testing.clock import FakeClock
from launcher.testing.registry import AlterHeader, Bearer, Fault, OciRegistry, Refuse, digest
from launcher.testing.registry.faults import Serve
from launcher.testing.registry.wire import Request, Response
from tests.images.registry.helpers import MIB, OCI, REPOSITORY, client, manifest, send, some


def push(made: Registry, raw: bytes, tag: str = "t") -> str:
    """An image without layers."""
    send(made, b"{}")
    return made.put_manifest(REPOSITORY, tag, raw, OCI)


@dataclass(frozen=True)
class Leads:
    """Nothing is done: the answer leads to a page elsewhere, as from a network that wants a login first."""

    status: int
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        return Response(self.status, {"Location": "https://login.example.com/"})


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("step", ["manifest.put", "upload.begin", "upload.chunk", "upload.finish", "mount"])
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
