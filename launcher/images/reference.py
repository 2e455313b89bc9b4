"""Parse image names (HOST/REPOSITORY[:TAG][@DIGEST]), and check whether launch can push there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from launch_train.common.loopback import is_loopback
from launcher.errors import UsageError

HUB: Final = "docker.io"
"""Docker Hub's host name in references, also of names without a host."""

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
"""https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#pulling-manifests, and for the digests
image-spec 1.1 on descriptors.
"""

LONGEST_NAME: Final = 255
"""Maximum length of host and repository in characters, as the distribution spec recommends to clients."""


@dataclass(frozen=True)
class Reference:
    """One image. Without tag and digest: a repository."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        """Return host and repository."""
        return f"{self.host}/{self.repository}"

    def with_digest(self, digest: str) -> Reference:
        """Return the same name with a digest. The tag stays but has no effect. Raises UsageError."""
        return replace(self, digest=_matched(digest, _DIGEST, "digest", digest))

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> Reference:
    """Parse a reference by Docker's rules: `python:3.12` is docker.io/library/python:3.12.

    Raises UsageError: it is invalid.
    """
    if "://" in text:
        raise UsageError(f"{text!r} is not an image: it is an address", "Remove the scheme: HOST/NAME:TAG")
    name, _, digest = text.partition("@")
    host, slash, path = name.partition("/")
    if not slash or (host != "localhost" and "." not in host and ":" not in host):  # Docker's rule
        host, path = HUB, name
    repository, colon, tag = path.partition(":")
    if host == HUB and "/" not in repository:
        repository = f"library/{repository}"
    if len(host) + 1 + len(repository) > LONGEST_NAME:
        raise UsageError(f"{text!r} is not an image: its name has more than {LONGEST_NAME} characters")
    return Reference(
        _matched(host, _HOST, "host", text),
        _matched(repository, _REPOSITORY, "name", text),
        _matched(tag, _TAG, "tag", text) if colon else None,
        _matched(digest, _DIGEST, "digest", text) if "@" in text else None,
    )


def _matched(value: str, pattern: re.Pattern[str], what: str, whole: str) -> str:
    if pattern.fullmatch(value):
        return value
    hint = "Images are named HOST/NAME:TAG or HOST/NAME@sha256:…"
    if what == "name" and pattern.fullmatch(value.lower()):
        hint = f"Names are in lower case: {value.lower()}"
    raise UsageError(f"{whole!r} is not an image: {value!r} is not a {what}", hint)


def scheme(host: str) -> str:
    """Return the URL scheme: as in Docker, `http` for a registry on this machine, and `https` for all others."""
    return "http" if is_loopback(host) else "https"


def is_digest(text: str) -> bool:
    """Return whether a text is a complete digest of a supported algorithm."""
    return bool(_DIGEST.fullmatch(text))


def is_googles(host: str) -> bool:
    """Return whether a host accepts Google's credentials: those of Artifact Registry and Container Registry."""
    return host.endswith(".pkg.dev") or _is_container_registry(host)


def _is_container_registry(host: str) -> bool:
    return host == "gcr.io" or host.endswith(".gcr.io")


_LOCATIONS = {"us.gcr.io": "us", "eu.gcr.io": "europe", "asia.gcr.io": "asia"}
_ARTIFACT_REGISTRY = re.compile(r"([a-z]+(?:-[a-z0-9]+)*)-docker\.pkg\.dev")
_PROJECT = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
_REPOSITORY_ID = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""https://cloud.google.com/artifact-registry/docs/docker/names and …/docs/repositories/create-repos, read in 2026."""


class ArtifactRepository(NamedTuple):
    """A repository in Artifact Registry. A project with a domain is example.com:my-project."""

    location: str
    project: str
    repository: str

    @property
    def resource(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/repositories/{self.repository}"


def artifact_repository(host: str, repository: str) -> ArtifactRepository | None:
    """Return the Artifact Registry repository of a name, or None if it is not in Artifact Registry.

    In names, a project with a domain (example.com:my-project) is written as example.com/my-project.
    """
    match, parts = _ARTIFACT_REGISTRY.fullmatch(host), repository.split("/")
    domain = f"{parts.pop(0)}:" if "." in parts[0] else ""
    if not match or len(parts) < 2 or not _PROJECT.fullmatch(parts[0]) or not _REPOSITORY_ID.fullmatch(parts[1]):
        return None
    return ArtifactRepository(match[1], domain + parts[0], parts[1])


def check_repository(text: str) -> None:
    """Check that images can be pushed to a repository.

    Of Google's names, only LOCATION-docker.pkg.dev/PROJECT/REPOSITORY works.

    Raises UsageError: they can't.
    """
    reference = parse(text)
    if reference.tag or reference.digest:
        raise UsageError(
            f"image.repository: {text} names one image", f"launch adds name and tag itself: {reference.name}"
        )
    if _is_container_registry(reference.host):
        project = reference.repository.partition("/")[0]
        better = f"{_LOCATIONS.get(reference.host, 'us')}-docker.pkg.dev/{project}/launch"
        raise UsageError(
            f"image.repository: {reference.name}: Container Registry takes no writes since 2025-03-18",
            f"Use Artifact Registry: {better}  (launch build --create-repository creates it)",
        )
    if reference.host.endswith("pkg.dev") and artifact_repository(reference.host, reference.repository) is None:
        raise UsageError(
            f"image.repository: {reference.name} is not a repository of Artifact Registry",
            "It is LOCATION-docker.pkg.dev/PROJECT/REPOSITORY, such as us-docker.pkg.dev/my-project/launch",
        )
