"""The data of a registry, and the validation of manifests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launcher.testing.registry.wire import RefusedError, digest

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
IMAGES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


@dataclass
class Repository:
    """A repository: digests of its blobs, digest -> manifest (media type, bytes), tag -> digest."""

    blobs: set[str] = field(default_factory=set)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Store:
    """All repositories. `only`: the names (or prefixes of names, up to a slash) that exist; None: any. `absent` is
    called with repository and tag of a missing manifest, and may store it."""

    def __init__(self, only: frozenset[str] | None, *, immutable: bool) -> None:
        self.only = only
        self.immutable = immutable
        self.absent: Callable[[str, str], object] = lambda _name, _tag: None
        self.data: dict[str, bytes] = {}
        self._repositories: dict[str, Repository] = defaultdict(Repository)

    def repository(self, name: str) -> Repository:
        """Return a repository. Raises RefusedError: it does not exist and is not created by a push."""
        parts = name.split("/")
        known = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if self.only is not None and not known & self.only:
            raise RefusedError(404, "NAME_UNKNOWN", f'Repository "{name}" not found')
        return self._repositories[name]

    def add(self, name: str, data: bytes) -> str:
        """Store a blob in a repository, and return its digest."""
        found = digest(data)
        self.data[found] = data
        self.repository(name).blobs.add(found)
        return found

    def blob(self, name: str, wanted: str) -> bytes:
        """Return a blob's bytes. Raises RefusedError."""
        if wanted not in self.repository(name).blobs:
            raise RefusedError(404, "BLOB_UNKNOWN", "blob unknown to registry")
        return self.data[wanted]

    def manifest(self, name: str, reference: str) -> tuple[str, str, bytes]:
        """Return digest, media type and bytes of a manifest, by tag or digest. Raises RefusedError."""
        repository = self.repository(name)
        if reference not in repository.tags and ":" not in reference:
            self.absent(name, reference)
        found = repository.tags.get(reference, reference)
        if found not in repository.manifests:
            raise RefusedError(404, "MANIFEST_UNKNOWN", "manifest unknown")
        return found, *repository.manifests[found]

    def put(self, name: str, reference: str, media_type: str, raw: bytes) -> str:
        """Store a manifest, if everything that it references exists, and return its digest. Raises RefusedError."""
        repository, found = self.repository(name), digest(raw)
        self._check(repository, media_type, raw)
        if ":" in reference:
            if reference != found:
                raise RefusedError(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        elif self.immutable and repository.tags.get(reference, found) != found:
            raise RefusedError(400, "TAG_INVALID", "tag is immutable")
        else:
            repository.tags[reference] = found
        repository.manifests[found] = (media_type, raw)
        return found

    def _check(self, repository: Repository, media_type: str, raw: bytes) -> None:
        try:
            manifest = json.loads(raw)
            named = _named(manifest, media_type)
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(400, "MANIFEST_INVALID", "manifest invalid") from error
        if manifest.get("mediaType", media_type) != media_type:
            raise RefusedError(400, "MANIFEST_INVALID", "media types differ")
        there = repository.manifests if media_type in INDEXES else repository.blobs
        for descriptor in named:
            if descriptor["digest"] not in there:
                raise RefusedError(400, "MANIFEST_BLOB_UNKNOWN", f"blob unknown to registry: {descriptor['digest']}")
            if descriptor["digest"] in self.data and len(self.data[descriptor["digest"]]) != descriptor["size"]:
                raise RefusedError(400, "SIZE_INVALID", f"{descriptor['digest']} has another size")


def _named(manifest: dict[str, Any], media_type: str) -> list[dict[str, Any]]:
    """Return the descriptors in a manifest. Raises ValueError, TypeError or KeyError: it is malformed."""
    if media_type in INDEXES:
        return list(manifest["manifests"])
    if media_type in IMAGES:
        return [manifest["config"], *manifest["layers"]]
    raise ValueError(media_type)
