"""`make lock`: renew the lock files of the training image.

images.lock gets the current digest of each base image; if its registry does not answer, the recorded digest stays.
requirements.lock and torch-cu130.lock are resolved from requirements.in and the Dockerfile's PyTorch version, for all
platforms and for Python 3.11 or later, with hashes.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
OLDEST_PYTHON = "3.11"
OF_TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-(?!ml-py)[a-z0-9-]+)==")
"""PyTorch and the dependencies of its CUDA 13 wheels on PyPI; the CPU wheel needs none of them."""

Digest = Callable[[str], str | None]


def main() -> int:
    """Write the three lock files. An unavailable digest is reported, but is not an error."""
    images = HERE / "images.lock"
    rows, problems = renewed(images.read_text(encoding="utf-8"), digest)
    images.write_text(rows, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    torch = torch_version((HERE / "train.Dockerfile").read_text(encoding="utf-8"))
    packages, wheels = split(resolved((HERE / "requirements.in").read_text(encoding="utf-8"), torch))
    (HERE / "requirements.lock").write_text(packages, encoding="utf-8")
    (HERE / "torch-cu130.lock").write_text(wheels, encoding="utf-8")
    return 0


def renewed(table: str, find: Digest) -> tuple[str, list[str]]:
    """Return images.lock with the digests from `find`, and a message for each digest that is unavailable."""
    problems, rows = [], []
    for row in csv.DictReader(table.splitlines()):
        found = find(row["reference"])
        if not found:
            problems.append(f"{row['reference']}: digest unavailable; keeping {row['digest'] or 'no digest'}")
        rows.append(f"{row['reference']},{found or row['digest']}\n")
    return "reference,digest\n" + "".join(rows), problems


def digest(reference: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the digest of an image in its registry; None if it does not exist or the registry does not answer."""
    from launcher.errors import LaunchError
    from launcher.images.registry import Registry, parse

    name = parse(reference)
    try:
        return Registry(name.host, environ).head(name.repository, name.tag or "latest")
    except LaunchError as error:
        print(error, file=sys.stderr)
        return None


def torch_version(dockerfile: str) -> str:
    """Return the PyTorch version in the Dockerfile."""
    (found,) = re.findall(r"^ARG TORCH=(\S+)$", dockerfile, re.MULTILINE)
    return str(found)


def resolved(requirements: str, torch: str) -> str:
    """Return all packages with their hashes, resolved together. uv's own configuration is ignored."""
    options = ("--universal", "--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "all.in")
        wanted.write_text(f"{requirements}\ntorch=={torch}\n", encoding="utf-8")
        uv = [sys.executable, "-m", "uv", "pip", "compile", *options, "--python-version", OLDEST_PYTHON, str(wanted)]
        return subprocess.run(uv, check=True, stdout=subprocess.PIPE, text=True).stdout


def split(locked: str) -> tuple[str, str]:
    """Return (other packages, PyTorch and its CUDA packages). A package is a line followed by its hashes."""
    packages = [block for block in re.split(r"^(?=\S)", locked, flags=re.MULTILINE) if block]
    return joined(packages, torch=False), joined(packages, torch=True)


def joined(packages: Iterable[str], *, torch: bool) -> str:
    """Join the packages that belong to PyTorch's CUDA wheels, or all others."""
    return "".join(block for block in packages if bool(OF_TORCH.match(block)) is torch)


if __name__ == "__main__":
    sys.exit(main())
