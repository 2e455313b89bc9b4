"""The packages of an image, by its own Python or by the locks."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.images.package_inventory import (
    Package,
    distribution,
    in_container,
    installed,
    inventory,
    license_of,
    of_source,
)
from launcher.images.source_files import File, Source
from launcher.plan.model import Image

CONTAINERS = Path(__file__).parents[2] / "containers"
IMAGE = Image(
    uri="r/train:1",
    pinned=False,
    dependencies="r/dependencies:2",
    base="docker.io/library/python:3.12-slim-bookworm@sha256:0",
    platform="linux/amd64",
    wheel="cu130",
    min_driver=None,
)


def here(argv: Sequence[str]) -> str:
    """This machine's Python in place of a container's."""
    assert argv[0] == "python"
    return subprocess.run([sys.executable, *argv[1:]], capture_output=True, text=True, check=True).stdout


def test_python_says_what_it_has() -> None:
    found = inventory(here)
    names = [(one.name, one.version) for one in found.python]
    assert names == sorted(set(names)), "each once"
    assert Package("pytest", importlib.metadata.version("pytest"), "MIT") in found.python
    assert found.found_in == "the image"


def test_a_python_that_does_not_answer() -> None:
    with pytest.raises(LaunchError, match="its Python says 'Segmentation fault'"):
        inventory(lambda _argv: "Segmentation fault")


STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 2.36-9+deb12u13
Description: GNU C Library
 Version: of a line that is not a field
 .

Package: gone
Status: deinstall ok config-files
Version: 1

Package: half
Status: install ok half-installed
Version: 1

Package: never
Status: unknown ok not-installed

Package: base-files
Architecture: amd64
Version: 12.4
"""


def test_debian_packages_that_are_installed() -> None:
    assert [*installed(STATUS)] == [
        Package("libc6", "2.36-9+deb12u13", architecture="amd64"),
        Package("base-files", "12.4", architecture="amd64"),
    ]
    assert [*installed("")] == []


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ('PRETTY_NAME="Debian"\nVERSION_ID="12"\nID=debian\n', "debian-12"),
        ("ID=ubuntu\nVERSION_ID='24.04'", "ubuntu-24.04"),
        ("ID=arch", "arch"),
        ("", ""),
    ],
)
def test_distributions(release: str, name: str) -> None:
    assert distribution(release) == name


@pytest.mark.parametrize(
    ("metadata", "license_"),
    [
        ({"expression": "MIT", "license": "x", "classifiers": ["License :: OSI Approved :: BSD License"]}, "MIT"),
        ({"license": "Apache 2.0", "classifiers": ["License :: OSI Approved :: BSD License"]}, "Apache 2.0"),
        (
            {"license": "Copyright\nPermission is …", "classifiers": ["License :: OSI Approved :: BSD License"]},
            "BSD License",
        ),
        ({"license": "UNKNOWN", "classifiers": ["License :: OSI Approved", "Topic :: x"]}, ""),
        ({"classifiers": ["License :: OSI Approved :: B", "License :: OSI Approved :: A"]}, "A AND B"),
    ],
)
def test_licenses(metadata: dict[str, Any], license_: str) -> None:
    assert license_of({"expression": None, "license": None, **metadata}) == license_


def source(*names: str, **fields: Any) -> Source:
    return Source(recipe=tuple(File(name, CONTAINERS / name) for name in names), **fields)


def versions(source: Source, image: Image, name: str) -> list[str]:
    return [one.version for one in of_source(source, image).python if one.name == name]


def test_locks_are_read_as_pip_would_for_that_image(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "# a comment\n"
        "networkx==3.6.1 ; python_full_version < '3.12' \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n"
        "networkx==3.7 ; python_full_version >= '3.12' \\\n    --hash=sha256:02\n"
        "pywin32==1 ; sys_platform == 'win32' \\\n    --hash=sha256:03\n"
        "nvidia-x==5 ; platform_machine == 'x86_64'\n"
        "typing_Extensions[a]==4.16.0\n"
        "odd==1 ; no marker\n"
    )
    found = Source(recipe=(File("requirements.lock", lock),), torch=Path("/x/torch-2.13.0+own-cp312-linux.whl"))
    assert of_source(found, IMAGE).python == (
        Package("networkx", "3.7"),
        Package("nvidia-x", "5"),
        Package("odd", "1"),
        Package("torch", "2.13.0+own"),
        Package("typing-extensions", "4.16.0"),
    )
    assert versions(found, replace(IMAGE, base="debian:12"), "networkx") == ["3.6.1", "3.7"]
    assert versions(found, replace(IMAGE, platform="linux/arm64"), "nvidia-x") == []


def test_the_recipe_s_own_locks() -> None:
    names = [path.name for path in CONTAINERS.iterdir() if path.is_file()]
    assert versions(source(*names), IMAGE, "torch") == ["2.13.0"], "from its lock"
    assert versions(source(*names), replace(IMAGE, wheel="cpu"), "torch") == ["2.13.0+cpu"], "from the Dockerfile"
    own = Path("/x/torch-2.13.0+cu126-cp312-cp312-linux_x86_64.whl")
    assert versions(source(*names, torch=own), IMAGE, "torch") == ["2.13.0+cu126"]
    assert len(versions(source(*names), IMAGE, "numpy")) == 1


def test_the_user_s_requirements() -> None:
    wishes = "--index-url https://x\nnumpy>=2\ntimm==1.0.1 # why\neinops\nwandb==0.2.*\nmine @ https://x/mine.whl\n"
    found = of_source(source("requirements.lock", requirements=wishes), IMAGE).python
    assert {Package("timm", "1.0.1"), Package("einops"), Package("wandb"), Package("mine")} <= {*found}
    assert Package("numpy") not in found, "the lock pins it"


class Engine:
    """The few calls of the SDK's client; what they were asked for."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[Any] = []

    def create_container(self, image: str, **settings: Any) -> str:
        self.calls.append((image, settings))
        return "id"

    def start(self, container: str) -> None:
        self.calls.append(("start", container))

    def wait(self, container: str) -> dict[str, int]:
        return {"StatusCode": self.status}

    def logs(self, container: str, *, stdout: bool, stderr: bool) -> bytes:
        assert stdout != stderr
        return b"out" if stdout else b"no such file\n"

    def remove_container(self, container: str, **options: Any) -> None:
        self.calls.append(("remove", container))


def test_a_container_is_removed_whatever_it_says() -> None:
    for status in (0, 1):
        engine = Engine(status)
        run = in_container(engine, "r/train:1")
        if status:
            with pytest.raises(LaunchError, match="r/train:1: python ended with 1: no such file"):
                run(("python", "-c", "x"))
        else:
            assert run(("python", "-c", "x")) == "out"
        asked = {"entrypoint": ["python"], "command": ["-c", "x"], "network_disabled": True}
        assert engine.calls == [("r/train:1", asked), ("start", "id"), ("remove", "id")]
