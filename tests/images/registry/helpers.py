"""Blobs, manifests and clients for the tests of the registry client."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from launcher.clock import Clock
from launcher.images.registry import Registry
from launcher.testing.clock import FakeClock
from tests.registry import OciRegistry, digest

REPOSITORY = "my-project/launch/train"
OCI = "application/vnd.oci.image.manifest.v1+json"
MIB = 1 << 20


@contextmanager
def client(registry: OciRegistry, time: FakeClock, environ: Mapping[str, str] | None = None) -> Iterator[Registry]:
    """A client whose waits take no time and have no jitter."""
    clock = Clock(time, time.sleep)
    with Registry(registry.host, environ or {}, clock=clock, jitter=lambda: 1.0) as made:
        yield made


def some(size: int, seed: int = 0) -> bytes:
    """Bytes that no two places share."""
    return random.Random(seed).randbytes(size)


def opens(data: bytes) -> Callable[[], BinaryIO]:
    """What upload takes."""
    return lambda: io.BytesIO(data)


def send(made: Registry, data: bytes, repository: str = REPOSITORY) -> list[int]:
    """Upload a blob; answers what the client told of its progress."""
    told: list[int] = []
    made.upload(repository, digest(data), len(data), opens(data), told.append)
    return told


def manifest(*blobs: bytes, config: bytes = b"{}", **more: object) -> bytes:
    """An image's manifest of these layers."""
    layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **_named(blob)} for blob in blobs]
    settings = {"mediaType": "application/vnd.oci.image.config.v1+json", **_named(config)}
    whole = {"schemaVersion": 2, "mediaType": OCI, "config": settings, "layers": layers, **more}
    return json.dumps(whole).encode()


def _named(data: bytes) -> dict[str, object]:
    return {"digest": digest(data), "size": len(data)}
