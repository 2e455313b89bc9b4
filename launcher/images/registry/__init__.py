"""Container registries: image names, credentials, and the client."""

from __future__ import annotations

from launcher.images.registry.client import ACCEPTED, Manifest, Registry, digest_of
from launcher.images.registry.errors import RegistryError, RepositoryMissing
from launcher.images.registry.reference import Reference, check_repository, parse

__all__ = [
    "ACCEPTED",
    "Manifest",
    "Reference",
    "Registry",
    "RegistryError",
    "RepositoryMissing",
    "check_repository",
    "digest_of",
    "parse",
]
