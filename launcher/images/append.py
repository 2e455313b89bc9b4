"""Append the code as one or two small layers to a dependency image in the registry.

No Docker engine is needed and nothing is pulled: the registry mounts the dependency image's layers into the new
image's repository, and only the code is uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

from launcher.errors import LaunchError
from launcher.images.archives import Layer
from launcher.images.registry import Manifest, Reference, Registry, blob_digest

THREADS = 8
OCI = "org.opencontainers.image"
BASE_LABEL = "launch.base"
"""Label of an image: the base of its dependency image, by digest. The OCI labels name the dependency image itself."""
INDEX_TYPES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
LAYER_TYPES = {
    "application/vnd.docker.distribution.manifest.v2+json": "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.layer.v1.tar+gzip",
}
"""Media type of a manifest → media type of its gzipped layers. The new image keeps its dependency image's types."""


class Stamp(NamedTuple):
    """An image's OCI labels, and the time of its content (RFC 3339)."""

    labels: dict[str, str]
    created: str


def append(
    registry: Registry,
    base: Reference,
    target: Reference,
    layers: Sequence[Layer],
    stamp: Stamp,
    platform: str,
    on_bytes: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda inner: inner,
) -> str:
    """Push `base` with the layers on top as `target`, a tag; return the new image's digest.

    `change` may alter the new image's settings (Env, WorkingDir). The manifest is written last, so an interrupted push
    leaves no image. `on_bytes` is called with a layer's digest, the bytes sent and the layer's size.

    Raises LaunchError: `base` does not exist or is for another platform, or the registry refuses the image.
    """
    manifest = image_manifest(registry, base, platform)
    if manifest.media_type not in LAYER_TYPES:
        raise LaunchError(f"can't append to an image of type {manifest.media_type}", "To rebuild it: --builder docker")
    config = json.loads(registry.blob(base.repository, manifest.body["config"]["digest"]))
    # Otherwise it would fail with "exec format error" on a billed machine.
    if (existing := f"{config.get('os', 'linux')}/{config.get('architecture')}") != platform:
        raise LaunchError(
            f"{base} is for {existing}, but the machine is {platform}",
            "Another image was pushed with its tag; to rebuild it: --builder docker",
        )
    config = {**config, "config": change(config.get("config") or {})}
    # The base's name and digest are OCI annotations, which scanners read.
    name = f"{base.host}/{base.repository}{f':{base.tag}' if base.tag else ''}"
    labels = {**stamp.labels, f"{OCI}.base.name": name, f"{OCI}.base.digest": manifest.digest}
    raw_config = encode_json(new_config(config, layers, stamp._replace(labels=labels)))
    config_blob = (blob_digest(raw_config), len(raw_config), partial(BytesIO, raw_config))
    added = [
        {"mediaType": LAYER_TYPES[manifest.media_type], "size": layer.size, "digest": layer.digest} for layer in layers
    ]
    described = {**manifest.body["config"], "digest": config_blob[0], "size": config_blob[1]}
    raw = encode_json({**manifest.body, "config": described, "layers": [*manifest.body["layers"], *added]})
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(mount, registry, target.repository, base, one["digest"]) for one in manifest.body["layers"]]
        for one in layers:
            jobs.append(
                pool.submit(upload_missing, registry, target.repository, one.digest, one.size, one.open, on_bytes)
            )
        jobs.append(pool.submit(upload_missing, registry, target.repository, *config_blob, on_bytes))
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # an error or Ctrl-C stops the others immediately
            for job in jobs:
                job.cancel()
            registry.stop()
            raise
    return registry.put_manifest(target.repository, target.tag or "", raw, manifest.media_type)


def image_manifest(registry: Registry, base: Reference, platform: str) -> Manifest:
    """Return the base's manifest for `platform`, from its index if it has one. Raises LaunchError."""
    index = registry.manifest(base.repository, base.digest or base.tag or "")
    if index is None:
        raise LaunchError(f"the registry no longer has {base}", "Repeat the command.")
    if index.media_type not in INDEX_TYPES:
        return index
    for entry in index.body["manifests"]:
        known = entry.get("platform", {})
        if f"{known.get('os')}/{known.get('architecture')}" == platform:
            return image_manifest(registry, base.with_digest(entry["digest"]), platform)
    raise LaunchError(f"{base} has no image for {platform}", "Build it for that platform: --builder docker")


def new_config(base: Mapping[str, Any], layers: Sequence[Layer], stamp: Stamp) -> dict[str, Any]:
    """Return the base's config with the layers on top. Entrypoint, environment and user are unchanged."""
    history = [{"created": stamp.created, "created_by": added.made_by} for added in layers]
    inner = base.get("config") or {}
    return {
        **base,
        "created": stamp.created,
        "config": {**inner, "Labels": {**(inner.get("Labels") or {}), **stamp.labels}},
        "history": [*(base.get("history") or ()), *history],
        "rootfs": {"type": "layers", "diff_ids": [*base["rootfs"]["diff_ids"], *(added.diff_id for added in layers)]},
    }


def mount(registry: Registry, repository: str, base: Reference, digest: str) -> None:
    """Mount a layer of the base into the target's repository, inside the registry. Raises LaunchError."""
    if repository == base.repository or registry.has(repository, digest):
        return
    if not registry.mount(repository, digest, base.repository):
        raise LaunchError(
            f"{base.host} can't mount layers of {base.repository} into {repository}",
            "To upload the whole image with a Docker engine: --builder docker",
        )


def upload_missing(
    registry: Registry,
    repository: str,
    digest: str,
    size: int,
    open_blob: Callable[[], Any],
    on_bytes: Callable[[str, int, int], None],
) -> None:
    if registry.has(repository, digest):
        return
    registry.upload(repository, digest, size, open_blob, lambda done: on_bytes(digest, done, size))


def encode_json(data: Mapping[str, Any]) -> bytes:
    """Encode compact JSON. Its bytes matter: their digest is the blob's name."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
