"""List the modules in the training image, and the module names of packages."""

from __future__ import annotations

import re
from functools import cache

from launcher.workspace.content import data_folder

OURS = frozenset({"launch_train", "pip"})
"""Modules that every image has besides the locked packages: the trainer, and pip from the base image."""

IMPORTED_AS = {
    "absl-py": "absl",
    "attrs": "attr attrs",
    "beautifulsoup4": "bs4",
    "biopython": "Bio",
    "faiss-cpu": "faiss",
    "faiss-gpu": "faiss",
    "gitpython": "git",
    "grpcio": "grpc",
    "jax": "jax jaxlib",
    "lightning": "lightning pytorch_lightning lightning_fabric",
    "markdown-it-py": "markdown_it",
    "matplotlib": "matplotlib mpl_toolkits pylab",
    "mosaicml": "composer",
    "nvidia-ml-py": "pynvml",
    "googleapis-common-protos": "google",
    "opencv-contrib-python": "cv2",
    "opencv-contrib-python-headless": "cv2",
    "opencv-python": "cv2",
    "opencv-python-headless": "cv2",
    "opentelemetry-api": "opentelemetry",
    "pillow": "PIL",
    "proto-plus": "proto",
    "protobuf": "google",
    "pycryptodome": "Crypto",
    "pyjwt": "jwt",
    "pymupdf": "fitz pymupdf",
    "pyopenssl": "OpenSSL",
    "pywavelets": "pywt",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
    "setuptools": "setuptools pkg_resources",
    "tensorflow": "tensorflow keras",
    "torch": "torch torchgen functorch",
}
"""Packages whose modules have other names (the top level of their wheels on PyPI, 2026-11)."""


@cache
def image_modules() -> frozenset[str]:
    """Return the top-level modules of the image's locked packages, and those that every image has."""
    locks = [lock.read_text(encoding="utf-8") for lock in data_folder("containers").glob("*.lock")]
    packages = [
        found[1] for lock in locks for line in lock.splitlines() if (found := re.match(r"([a-z0-9._-]+)==", line))
    ]
    return OURS.union(*(modules_of(package) for package in packages))


def modules_of(package: str) -> list[str]:
    """Return the names that a package is imported by, and its namespace (google-…)."""
    name = normalised(package)
    if name in IMPORTED_AS:
        return IMPORTED_AS[name].split()
    namespace = name.partition("-")[0]
    return [name.replace("-", "_"), *([namespace] if namespace in ("backports", "google", "nvidia", "cuda") else [])]


def normalised(package: str) -> str:
    """Return a package's name as indexes compare it (packaging.python.org, name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()
