"""Container registries: image names, credentials, and the client."""

from __future__ import annotations

from launcher.images.reference import Reference, check_repository, parse
from launcher.images.registry.client import ACCEPTED, Manifest, Registry, blob_digest
from launcher.images.registry.transport import RegistryError, RepositoryMissing

__all__ = [
    "ACCEPTED",
    "Manifest",
    "Reference",
    "Registry",
    "RegistryError",
    "RepositoryMissing",
    "blob_digest",
    "check_repository",
    "parse",
]
