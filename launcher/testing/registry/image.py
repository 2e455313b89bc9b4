"""Store a small image directly in the registry."""

from __future__ import annotations

import json
from typing import Any

from launcher.testing.registry.server import OciRegistry

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
