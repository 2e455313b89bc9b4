"""Read what an image in a registry contains: Python, PyTorch, CUDA, launch's node; without pulling it.

The image's config says much (architecture, variables). The rest is in the names of files, so layers are read as a
stream until a limit. What is not found is unknown, never absent, unless every layer was read to its end.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.images.append import image_manifest
from launcher.images.registry import Reference, Registry
from launcher.plan.model import ImageContents

LIMIT = 64 << 20
"""Compressed bytes of layers that are read at most. A layer with PyTorch and CUDA has gigabytes."""
NODE = re.compile(r"(^|/)(launch_)?train/node/__main__\.py$")
"""Of this launch, or of one whose package was called train."""
TORCH = re.compile(r"/torch-(\d[\w.]*)(?:\+(\w+))?\.dist-info/?")
PYTHON = re.compile(r"(?:^|/)(?:bin|lib)/python(3\.\d+)(?:/|$)")
VERSION_FILE = re.compile(r"-packages/torch/version\.py$")


class Found(NamedTuple):
    """Facts found in the files of the layers. An empty text: not found."""

    python: str = ""
    torch: str = ""
    build: str = ""
    node: bool = False
    complete: bool = False
    """Every layer was read to its end."""


def contents(registry: Registry, image: Reference, platform: str, limit: int = LIMIT) -> ImageContents:
    """Return what is known of an image's contents. Raises LaunchError: it can't be read."""
    manifest = image_manifest(registry, image, platform)
    config = json.loads(registry.blob(image.repository, manifest.body["config"]["digest"]))
    env = dict(variable.partition("=")[::2] for variable in (config.get("config") or {}).get("Env") or ())
    evidence = in_layers(registry, image.repository, manifest.body["layers"], limit)
    torch = evidence.torch or env.get("PYTORCH_VERSION", "").partition("+")[0]
    return ImageContents(
        platform=f"{config.get('os', 'linux')}/{config.get('architecture')}",
        python=evidence.python or ".".join(env.get("PYTHON_VERSION", "").split(".")[:2]),
        torch=torch,
        build=evidence.build or build_of(env.get("CUDA_VERSION", "")),
        has_node=True if evidence.node else False if evidence.complete else None,
    )


def build_of(cuda: str) -> str:
    """Return PyTorch's name of a CUDA version: cu128 for 12.8.1; empty if unknown."""
    parts = cuda.split(".")
    return f"cu{parts[0]}{parts[1]}" if len(parts) > 1 and all(number.isdigit() for number in parts[:2]) else ""


def in_layers(registry: Registry, repository: str, layers: list[Mapping[str, Any]], limit: int) -> Found:
    """Return what the layers' files say, reading the smallest layers first."""
    evidence, left, whole = Found(), limit, 0
    for each in sorted(layers, key=lambda layer: int(layer["size"])):
        if left <= 0 or (evidence.torch and evidence.build and evidence.node):
            break
        reader = Reader(registry.stream(repository, each["digest"]), left)
        evidence, ended = in_layer(reader, evidence)
        left, whole = left - reader.taken, whole + ended
    return evidence._replace(complete=whole == len(layers))


def in_layer(reader: Reader, evidence: Found) -> tuple[Found, bool]:
    """Return what is known with a layer's files, and whether they were read to the end."""
    try:
        with tarfile.open(fileobj=reader, mode="r|*") as tar:  # type: ignore[call-overload]  # tarfile calls read() only
            for entry in tar:
                text = ""
                if VERSION_FILE.search(entry.name) and entry.size < 10_000 and (file := tar.extractfile(entry)):
                    text = file.read().decode(errors="replace")
                evidence = with_file(evidence, entry.name, text)
    except (tarfile.TarError, EOFError, zlib.error, OSError):
        return evidence, False
    finally:
        reader.close()
    return evidence, not reader.cut


def with_file(evidence: Found, name: str, text: str) -> Found:
    """Return what is known with one more file. `text`: the content of torch/version.py."""
    if NODE.search(name):
        evidence = evidence._replace(node=True)
    if match := TORCH.search(f"/{name}"):
        evidence = evidence._replace(torch=match[1], build=match[2] or evidence.build)
    if match := PYTHON.search(name):
        evidence = evidence._replace(python=evidence.python or match[1])
    if cuda := re.search(r"^cuda[^=]*= *'([\d.]+)'", text, re.MULTILINE):
        evidence = evidence._replace(build=evidence.build or build_of(cuda[1]))
    return evidence


class Reader:
    """A stream of bytes as a file, up to a limit; then it ends early, and `cut` is true."""

    def __init__(self, pieces: Iterator[bytes], limit: int) -> None:
        self._pieces, self._left, self._rest = pieces, limit, b""
        self.taken, self.cut = 0, False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        while len(self._rest) < size:
            if self._left <= 0:
                self.cut = True
                break
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._left -= len(piece)
            self.taken += len(piece)
            self._rest += piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close:
            close()
