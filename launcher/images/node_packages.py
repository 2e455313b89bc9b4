"""Collect the packages that launch_train.node needs, as files of one image layer that serves Python 3.10 to 3.14.

They are added to a finished image (image.uri with run.node: append) without an engine, so the image's Python is not
known. Most of them are pure Python. The others' compiled modules have the Python version in their names, so those of
several versions lie side by side. numpy and TensorBoard, which scripts may need for checkpoints and metrics, are not
among them: an image with PyTorch has numpy, and metrics work without TensorBoard.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import LaunchError
from launcher.images.source_files import File

FOLDER = "opt/launch/packages"
"""launch_train appends it to sys.path, so that the image's own packages win (train/launch_train/__init__.py)."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINE = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
LIBC = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12")
"""Compatible with Ubuntu 20.04 (glibc 2.31) and later."""
LEFT_OUT = frozenset(
    {
        *("numpy", "pillow", "tensorboard", "tensorboard-data-server", "grpcio", "markdown", "markupsafe", "werkzeug"),
        *("absl-py", "setuptools"),
    }
)


def node_packages(lock: Path, platform: str, folder: Path, environ: Mapping[str, str]) -> tuple[File, ...]:
    """Download the locked packages for all Python versions into `folder`; return the layer's files.

    Raises LaunchError: pip is not available, or a package can't be downloaded.
    """
    text, target, seen = lock.read_text(encoding="utf-8"), folder / "packages", set[str]()
    for python in PYTHONS:
        wheels = folder / python
        wanted = folder / f"{python}.txt"
        wanted.write_text("".join(for_python(text, python)), encoding="utf-8")
        download(wanted, wheels, python, platform, environ)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, target, seen)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    return tuple(File(path.relative_to(target).as_posix(), path) for path in files)


def for_python(lock: str, python: str) -> Iterator[str]:
    """Yield the blocks of a lock (NAME==VERSION ; MARKER, with hashes) for a Python version, without their markers."""
    from packaging.markers import Marker

    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    for block in re.split(r"^(?=\S)", lock, flags=re.MULTILINE):
        head = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)(?: ; ([^\\]+?))? *\\\n", block)
        if head and head[1] not in LEFT_OUT and (not head[3] or Marker(head[3]).evaluate(environment)):
            yield f"{head[1]}=={head[2]} \\\n{block[head.end() :]}"


def download(wanted: Path, wheels: Path, python: str, platform: str, environ: Mapping[str, str]) -> None:
    """Download wheels with pip, which checks their hashes. Raises LaunchError."""
    machine = MACHINE[platform]
    tags = [word for libc in LIBC for word in ("--platform", f"{libc}_{machine}")]
    version = f"cp{python.replace('.', '')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--require-hashes", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *tags]
    pip += ["--abi", version, "--abi", "abi3", "--abi", "none", "--requirement", str(wanted), "--dest", str(wheels)]
    ran = subprocess.run(pip, env={**environ}, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = "\n  ".join(ran.stderr.strip().splitlines()[-5:])
        raise LaunchError(
            f"the node's packages for Python {python} can't be downloaded\n  {last}",
            "pip must be installed beside launch, and reach its index: pip download google-cloud-storage",
        )


def unpack(wheel: Path, target: Path, seen: set[str]) -> None:
    """Unpack a wheel. Of a package that another Python version has already brought, only further compiled modules are
    added."""
    name = wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            path = target / entry
            new = name not in seen or (re.search(r"\.so(\.|$)", entry) and not path.exists())
            if new and not entry.endswith("/") and ".data/" not in entry:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))
    seen.add(name)
