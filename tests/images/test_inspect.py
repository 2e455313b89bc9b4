"""What is read of an image in a registry without pulling it, and what follows from that."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from typing import Any

import pytest

from launcher.errors import PlanRefused
from launcher.images.inspect import build_of, contents
from launcher.images.registry import Registry, parse
from launcher.plan.image import check_image_contents
from launcher.plan.model import Image, ImageContents, Packages, Requirement
from launcher.plan.placement import choose
from tests.images.test_append import DOCKER, put
from tests.plan.planning import CATALOG, spec
from tests.registry import OciRegistry

VENV = "opt/venv/lib/python3.11/site-packages"
TORCH = {f"{VENV}/torch-2.9.1+cu128.dist-info/METADATA": b"", f"{VENV}/torch/version.py": b"cuda = '12.8'\n"}
PLAIN = {f"{VENV}/torch-2.5.1.dist-info/METADATA": b"", f"{VENV}/torch/version.py": b"cuda: Optional[str] = '12.4'\n"}
NODE = {"opt/launch/launch_train/node/__main__.py": b""}


def packed(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(file.getvalue())


def put_image(registry: OciRegistry, layers: list[bytes], env: list[str], arch: str = "amd64") -> str:
    """An image p/i:t of compressed layers; its digest."""
    config = json.dumps({"os": "linux", "architecture": arch, "config": {"Env": env}}).encode()
    body: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": DOCKER,
        "config": {"size": len(config), "digest": registry.store.add("p/i", config)},
        "layers": [{"size": len(one), "digest": registry.store.add("p/i", one)} for one in layers],
    }
    return put(registry, "p/i", body, DOCKER)


def read(layers: list[bytes], env: list[str], limit: int = 1 << 20, arch: str = "amd64") -> ImageContents:
    with OciRegistry() as registry:
        put_image(registry, layers, env, arch)
        with Registry(registry.host, {}) as client:
            return contents(client, parse(f"{registry.host}/p/i:t"), "linux/amd64", limit)


def test_the_files_say_python_torch_its_build_and_the_node() -> None:
    found = read([packed(TORCH), packed(NODE)], ["PYTHON_VERSION=3.9.1", "CUDA_VERSION=11.8.0"])
    assert (found.python, found.torch, found.build, found.has_node) == ("3.11", "2.9.1", "cu128", True)
    assert read([packed(PLAIN)], []).build == "cu124"


def test_the_variables_say_it_where_the_files_do_not() -> None:
    found = read(
        [packed({"etc/os-release": b""})], ["PYTHON_VERSION=3.12.4", "PYTORCH_VERSION=2.6.0", "CUDA_VERSION=12.4.1"]
    )
    assert (found.python, found.torch, found.build, found.has_node) == ("3.12", "2.6.0", "cu124", False)


def test_beyond_the_limit_nothing_is_known_to_be_absent() -> None:
    large = {"opt/large": os.urandom(300_000)}
    found = read([packed({**large, **TORCH})], [], limit=100_000)
    assert found == ImageContents(platform="linux/amd64")
    assert read([packed({**large, **TORCH})], [], limit=1 << 20).torch == "2.9.1"


def test_a_damaged_layer_is_unknown_too() -> None:
    assert read([packed(TORCH)[:60]], [], arch="arm64") == ImageContents(platform="linux/arm64")


@pytest.mark.parametrize(("cuda", "build"), [("12.8.1", "cu128"), ("13.0", "cu130"), ("", ""), ("12", ""), ("x.y", "")])
def test_builds(cuda: str, build: str) -> None:
    assert build_of(cuda) == build


URI = f"us-docker.pkg.dev/p/r/i@sha256:{'1' * 64}"


def check(machine: str, run: dict[str, Any] | None = None, **known: Any) -> None:
    gpus = {"b200": 8}.get(machine, 2)
    own = spec(machine={"type": machine, "gpus": gpus}, image={"uri": URI}, run=run or {"script": "a.py"})
    image = Image(
        uri=URI, pinned=True, dependencies="", base="", platform="linux/amd64", wheel="cu126", min_driver=None
    )
    found = ImageContents(**{"platform": "linux/amd64", **known})
    check_image_contents(own, CATALOG, choose(own, CATALOG, "vertex")[0], image, found, Packages())


@pytest.mark.parametrize(
    ("wanted", "found", "fits"),
    [("==2.9.1", "2.8.0a0", False), (">=2.6", "2.8.0a0", True), ("==2.9.1", "2.9.1", True), ("==2.9.1", "", True)],
)
def test_the_requirements_torch_is_that_of_the_base(wanted: str, found: str, fits: bool) -> None:
    own = spec(image={"base": "nvcr.io/nvidia/pytorch:25.06-py3"}, run={"script": "a.py"})
    image = Image(
        uri="a", pinned=False, dependencies="", base="", platform="linux/amd64", wheel="base", min_driver=None
    )
    torch = Requirement(name="torch", specifier=wanted, text=f"torch{wanted}", where="r.txt:1")
    args = (own, CATALOG, choose(own, CATALOG, "vertex")[0], image, ImageContents(platform="linux/amd64", torch=found))
    if fits:
        check_image_contents(*args, Packages(named=(torch,)))
        return
    with pytest.raises(PlanRefused, match=r"r.txt:1: torch==2.9.1: the base's own PyTorch .* has 2.8.0a0"):
        check_image_contents(*args, Packages(named=(torch,)))


@pytest.mark.parametrize(
    ("machine", "known", "words"),
    [
        ("h100", {"platform": "linux/arm64"}, ["linux/arm64", "linux/amd64"]),
        ("b200", {"torch": "2.9.1", "build": "cu126"}, ["2.9.1+cu126", "NVIDIA B200"]),
        ("b200", {"torch": "2.9.0a0", "build": "cu126"}, ["CUDA 12.6", "12.8"]),
        ("v100", {"build": "cu130"}, ["CUDA 13.0", "V100"]),
        ("h100", {"python": "3.8"}, ["3.8", "run.node"]),
        ("h100", {"has_node": False}, ["run.node=append", "run.node=none"]),
    ],
)
def test_what_can_not_work_is_refused(machine: str, known: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanRefused) as refused:
        check(machine, **known)
    assert refused.value.field == "image.uri"
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("machine", "known"),
    [
        ("h100", {}),
        ("h100", {"torch": "2.9.1", "build": "cu128", "python": "3.10", "has_node": True}),
        ("b200", {"torch": "2.9.0a0", "build": "cu130"}),
        ("v100", {"build": "cu128"}),
        ("h100", {"has_node": None}),
    ],
)
def test_what_works_or_is_unknown_is_not(machine: str, known: dict[str, Any]) -> None:
    check(machine, **known)


def test_an_entrypoint_of_its_own_needs_neither_python_nor_node() -> None:
    check("h100", run={"node": "none"}, python="3.8", has_node=False)
