"""The base image of the tests in containers: Debian with Python, made once and kept.

python3 -m tests.e2e.base makes it. It needs root and debootstrap, and of Python only the standard library, so that CI
makes it while it installs packages.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.command import ROOT

CACHE = ROOT / ".launch" / "cache" / "containers"
DEBIAN = "bookworm"
PYTHON = "3.11"
"""What Debian 12 has."""
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def base_archive() -> Path:
    """The files of a base image: Debian with Python, kept between sessions, since it takes a minute to make."""
    archive = CACHE / f"{DEBIAN}-{architecture()[0]}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="launch-") as folder:
            whole = Path(folder, "base.tar")
            make_base(Path(folder, "root"), whole, os.environ)
            shutil.copyfile(whole, archive.with_suffix(f".{os.getpid()}"))
        archive.with_suffix(f".{os.getpid()}").replace(archive)
    return archive


def make_base(root: Path, archive: Path, environ: Mapping[str, str]) -> None:
    """Install Debian into a folder, and pack it."""
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    env = {**environ, "PATH": search_path(), "DPKG_FORCE": "unsafe-io"}  # it's thrown away if the machine stops
    made = subprocess.run(
        [program("debootstrap"), *options, DEBIAN, str(root)], env=env, capture_output=True, check=False, timeout=3600
    )
    if made.returncode:
        raise RuntimeError(f"debootstrap failed:\n{made.stdout.decode(errors='replace')[-2000:]}")
    (root / "usr/bin/python").symlink_to("python3")
    if trusted := environ.get("SSL_CERT_FILE"):  # this machine may reach the network through a proxy that it trusts
        shutil.copyfile(trusted, root / CERTIFICATES)
    without = [f"--exclude=./{name}/*" for name in ("var/cache/apt", "var/lib/apt/lists", "proc", "sys", "dev")]
    subprocess.run(["tar", "-C", str(root), *without, "-cf", str(archive), "."], check=True, timeout=300)


def search_path() -> str:
    """PATH, and where Debian has the programs of root."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def architecture() -> tuple[str, str]:
    """This machine's, as Docker and as wheels call it."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}[machine], machine


def program(name: str) -> str:
    """Where a program lies."""
    return str(shutil.which(name, path=search_path()))


if __name__ == "__main__":
    print(base_archive())
