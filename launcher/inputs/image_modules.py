"""List the packages and modules in the training image."""

from __future__ import annotations

import re
from functools import cache

from launcher.inputs.content import data_folder

OURS = frozenset({"launch_train", "pip"})
"""Modules that every image has besides the locked packages: the trainer, and pip from the base image."""

IMPORTED_AS = {
    "absl-py": "absl",
    "grpcio": "grpc",
    "markdown-it-py": "markdown_it",
    "nvidia-ml-py": "pynvml",
    "googleapis-common-protos": "google",
    "opentelemetry-api": "opentelemetry",
    "pillow": "PIL",
    "proto-plus": "proto",
    "protobuf": "google",
    "pyyaml": "yaml",
    "setuptools": "setuptools pkg_resources",
    "torch": "torch torchgen functorch",
}
"""Locked packages whose modules have other names (the top level of their wheels on PyPI, 2026-11)."""

PYTHON_PROGRAMS = {
    "accelerate": "accelerate",
    "axolotl": "axolotl",
    "colossalai": "colossalai",
    "composer": "mosaicml",
    "deepspeed": "deepspeed",
    "fabric": "lightning",
    "horovodrun": "horovod",
    "lightning": "lightning",
    "litgpt": "litgpt",
    "llamafactory-cli": "llamafactory",
    "ray": "ray",
    "trl": "trl",
    "tune": "torchtune",
    "yolo": "ultralytics",
}
"""Programs that start trainings, which the image lacks, and the packages that have them."""
SYSTEM_PROGRAMS = frozenset({"curl", "g++", "git", "make", "sudo", "wget"})
"""Programs that the recipe's base (python:3.12-slim) lacks, and that no package of pip brings."""


@cache
def image_packages() -> frozenset[str]:
    """Return the names of the image's locked packages."""
    locks = [lock.read_text(encoding="utf-8") for lock in data_folder("containers").glob("*.lock")]
    return frozenset(match[1] for lock in locks for match in re.finditer(r"(?m)^([a-z0-9._-]+)==", lock))


@cache
def image_modules() -> frozenset[str]:
    """Return the top-level modules of the image's locked packages, and those that every image has."""
    return OURS.union(*(modules_of(package) for package in image_packages()))


def modules_of(package: str) -> list[str]:
    """Return the names that a locked package is imported by, and its namespace (google-…)."""
    name = normalised(package)
    if name in IMPORTED_AS:
        return IMPORTED_AS[name].split()
    namespace = name.partition("-")[0]
    return [name.replace("-", "_"), *([namespace] if namespace in ("backports", "google", "nvidia", "cuda") else [])]


def normalised(package: str) -> str:
    """Return a package's name as indexes compare it (packaging.python.org, name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()
