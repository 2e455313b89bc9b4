"""An image by appending: the code as one or two small layers upon a dependency image that is in the registry.

No engine takes part, and nothing is pulled: the dependency image's layers are mounted into the new image's repository
by the registry itself, and only the code's own bytes travel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.errors import LaunchError
from launcher.images.layer import Layer

if TYPE_CHECKING:
    from launcher.images.registry import Manifest, Reference, Registry

THREADS = 8
OCI = "org.opencontainers.image"
INDEX_TYPES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
LAYER_TYPES = {
    "application/vnd.docker.distribution.manifest.v2+json": "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.layer.v1.tar+gzip",
}
"""Kind of manifest -> kind of its gzipped layers: an image keeps its dependency image's kind."""


class Stamp(NamedTuple):
    """What an image says of itself: its OCI labels, and when its content was made (RFC 3339)."""

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
) -> str:
    """Push `base` with the layers on top as `target`, a tag; the new image's digest is returned.

    The manifest is written last, so what dies half-way leaves no image. `on_bytes` is called with a layer's digest,
    the bytes sent and all its bytes.

    Raises:
        LaunchError: the registry has no such base, it isn't for `platform`, or the registry doesn't take the image.
    """
    from launcher.images.registry import digest_of

    manifest = image_manifest(registry, base, platform)
    check_kind(manifest.media_type)
    config = json.loads(registry.blob(base.repository, manifest.body["config"]["digest"]))
    check_platform(config, base, platform)
    raw_config = encoded(new_config(config, layers, upon(stamp, base, manifest.digest)))
    raw = encoded(new_manifest(manifest.body, manifest.media_type, layers, raw_config))
    config_blob = (digest_of(raw_config), len(raw_config), partial(BytesIO, raw_config))
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(mount, registry, target.repository, base, one["digest"]) for one in manifest.body["layers"]]
        for one in layers:
            jobs.append(pool.submit(send, registry, target.repository, one.digest, one.size, one.open, on_bytes))
        jobs.append(pool.submit(send, registry, target.repository, *config_blob, on_bytes))
        together(jobs, registry)
    return registry.put_manifest(target.repository, target.tag or "", raw, manifest.media_type)


def together(jobs: Sequence[Future[None]], registry: Registry) -> None:
    """Wait for all of them. What one fails for, and a Ctrl-C, must not wait until gigabytes of another have gone."""
    try:
        for job in as_completed(jobs):
            job.result()
    except BaseException:
        for job in jobs:
            job.cancel()
        registry.stop()
        raise


def upon(stamp: Stamp, base: Reference, digest: str) -> Stamp:
    """The stamp with the base that the image stands upon, where scanners look for it (OCI annotations)."""
    name = f"{base.host}/{base.repository}{f':{base.tag}' if base.tag else ''}"
    return stamp._replace(labels={**stamp.labels, f"{OCI}.base.name": name, f"{OCI}.base.digest": digest})


def image_manifest(registry: Registry, base: Reference, platform: str) -> Manifest:
    """The base's manifest for `platform`, looked up in its index where it has one. Raises LaunchError."""
    found = registry.manifest(base.repository, base.digest or base.tag or "")
    if found is None:
        raise LaunchError(f"the registry has no {base}", "It was there a moment ago; run the command again.")
    if found.media_type not in INDEX_TYPES:
        return found
    for one in found.body["manifests"]:
        known = one.get("platform", {})
        if f"{known.get('os')}/{known.get('architecture')}" == platform:
            return image_manifest(registry, base.with_digest(one["digest"]), platform)
    raise LaunchError(f"{base} has no image for {platform}", "Build it for that platform: --builder docker")


def check_platform(config: Mapping[str, Any], base: Reference, platform: str) -> None:
    """Refuse what would end as "exec format error" on a paid machine. Raises LaunchError."""
    found = f"{config.get('os', 'linux')}/{config.get('architecture')}"
    if found != platform:
        raise LaunchError(
            f"{base} is for {found}, and the machine is {platform}",
            "The tag says otherwise, so something else was pushed there; build it anew: --builder docker",
        )


def check_kind(media_type: str) -> None:
    """Refuse what is no image of today's. Raises LaunchError."""
    if media_type not in LAYER_TYPES:
        raise LaunchError(f"an image of kind {media_type} can't be appended to", "Build it anew: --builder docker")


def new_config(base: Mapping[str, Any], layers: Sequence[Layer], stamp: Stamp) -> dict[str, Any]:
    """The base's config with the layers on top: entrypoint, environment and user stay as they are."""
    history = [{"created": stamp.created, "created_by": one.made_by} for one in layers]
    inner = base.get("config") or {}
    return {
        **base,
        "created": stamp.created,
        "config": {**inner, "Labels": {**(inner.get("Labels") or {}), **stamp.labels}},
        "history": [*(base.get("history") or ()), *history],
        "rootfs": {"type": "layers", "diff_ids": [*base["rootfs"]["diff_ids"], *(one.diff_id for one in layers)]},
    }


def new_manifest(
    base: Mapping[str, Any], media_type: str, layers: Sequence[Layer], raw_config: bytes
) -> dict[str, Any]:
    """The base's manifest with the layers on top, and another config."""
    from launcher.images.registry import digest_of

    config = {**base["config"], "digest": digest_of(raw_config), "size": len(raw_config)}
    added = [{"mediaType": LAYER_TYPES[media_type], "size": one.size, "digest": one.digest} for one in layers]
    return {**base, "config": config, "layers": [*base["layers"], *added]}


def mount(registry: Registry, repository: str, base: Reference, digest: str) -> None:
    """Make a layer of the base one of the target's repository, inside the registry. Raises LaunchError."""
    if repository == base.repository or registry.has(repository, digest):
        return
    if not registry.mount(repository, digest, base.repository):
        raise LaunchError(
            f"{base.host} doesn't mount layers of {base.repository} into {repository}",
            "So the whole image must be sent, by an engine: --builder docker",
        )


def send(
    registry: Registry,
    repository: str,
    digest: str,
    size: int,
    open_blob: Callable[[], Any],
    on_bytes: Callable[[str, int, int], None],
) -> None:
    """Upload a blob unless the registry has it."""
    if registry.has(repository, digest):
        return
    registry.upload(repository, digest, size, open_blob, lambda done: on_bytes(digest, done, size))


def encoded(data: Mapping[str, Any]) -> bytes:
    """JSON as registries keep it: the bytes count, for their digest is the name."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
