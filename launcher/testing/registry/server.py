"""The registry's HTTP server, and an image for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from launcher.testing.httpserver import Head, LoopbackServer, Response
from launcher.testing.registry.api import Api, Recorded, RefusedError, Request, Store, parse_path


class OciRegistry(LoopbackServer):
    """A registry on loopback, as a context manager. `requests` has all requests, in order.

    `repositories`: the existing ones (with all below them, as in Artifact Registry); None: a repository is created by
    its first push. `immutable`: a tag can't be moved. `redirects`: downloads of blobs are redirected. As in Artifact
    Registry, there are no chunked uploads.
    """

    def __init__(
        self,
        *,
        repositories: Iterable[str] | None = None,
        immutable: bool = False,
        redirects: bool = False,
        port: int = 0,
    ) -> None:
        self.requests: list[Recorded] = []
        self.store = Store(None if repositories is None else frozenset(repositories), immutable=immutable)
        self.api = Api(self.store, lambda: self.url, redirects=redirects)
        self._lock = threading.Lock()
        super().__init__(self._serve, "registry", port=port)

    @property
    def steps(self) -> list[str]:
        return [request.step for request in self.requests]

    @property
    def received(self) -> int:
        """Return the number of bytes of all bodies that were read."""
        return sum(request.size for request in self.requests)

    def tag(self, repository: str, tag: str) -> str | None:
        """Return the digest that a tag points to, or None."""
        return self.store.repository(repository).tags.get(tag)

    def _serve(self, head: Head) -> Response:
        return self.performed(parse_path(Request(head.method, unquote(head.path), head.query, head.headers)), head)

    def performed(self, request: Request, head: Head) -> Response:
        """Read the body of a request, record it, and return the answer."""
        request = replace(request, body=head.read(None))
        self._keep(request)
        return self._answer(request)

    def _answer(self, request: Request) -> Response:
        try:
            return self.api.answer(request)
        except RefusedError as refused:
            return refused.response

    def _keep(self, request: Request) -> None:
        parts = (request.step, request.repository, request.method, request.path, request.query)
        with self._lock:
            self.requests.append(Recorded(*parts, request.headers, len(request.body)))


DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
LAYERS = {
    DOCKER: "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.layer.v1.tar+gzip",
}
"""Type of a manifest -> type of its layers."""


def put_image(
    registry: OciRegistry, name: str, tag: str = "t", *, media_type: str = DOCKER, architecture: str = "amd64"
) -> str:
    """Store an image of two layers, and return its digest. The layers are not archives, so the image can't run."""
    blobs = (b"base layer " * 1000, b"venv layer " * 2000)
    config = {
        "os": "linux",
        "architecture": architecture,
        "config": {"Env": ["A=1"], "User": "1000:1000", "Entrypoint": ["python"], "Labels": {"kept": "yes"}},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64, "sha256:" + "2" * 64]},
        "history": [{"created_by": "one"}, {"created_by": "two"}],
    }
    raw = json.dumps(config).encode()

    def blob(kind: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": kind, "size": len(data), "digest": registry.store.add(name, data)}

    body = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": blob("application/vnd.docker.container.image.v1+json", raw),
        "layers": [blob(LAYERS[media_type], data) for data in blobs],
    }
    return registry.store.put(name, tag, media_type, json.dumps(body).encode())
