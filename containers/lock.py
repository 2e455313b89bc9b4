"""`make lock`: renew the lock files of the training image.

images.lock gets the current digest of each base image; if its registry does not answer, the recorded digest stays.
requirements.lock and torch-cu130.lock are resolved from requirements.in and the Dockerfile's PyTorch version, for all
platforms and for Python 3.11 or later, with hashes. torch-cu126.lock has the hashes of the same version in PyTorch's
own index; if that does not answer, the recorded file stays (the build says so where there is none). node.lock is
resolved from node.in for Python 3.10 or later: images with another PyTorch get these packages only.
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
CU126 = HERE / "torch-cu126.lock"
OLDEST_PYTHON = "3.11"
NODE_PYTHON = "3.10"
"""The oldest Python for launch_train.node and the API for scripts."""
TORCH_INDEX = "https://download.pytorch.org/whl/cu126"
OF_TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-(?!ml-py)[a-z0-9-]+)==")
"""PyTorch and the dependencies of its CUDA 13 wheels on PyPI; the CPU wheel needs none of them."""

Digest = Callable[[str], str | None]


def main() -> int:
    """Write the lock files. What is unavailable is reported, but is not an error."""
    images = HERE / "images.lock"
    rows, problems = renewed(images.read_text(encoding="utf-8"), digest)
    images.write_text(rows, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    torch = torch_version((HERE / "train.Dockerfile").read_text(encoding="utf-8"))
    packages, wheels = split(resolved((HERE / "requirements.in").read_text(encoding="utf-8"), torch))
    (HERE / "requirements.lock").write_text(packages, encoding="utf-8")
    (HERE / "torch-cu130.lock").write_text(wheels, encoding="utf-8")
    node = compiled((HERE / "node.in").read_text(encoding="utf-8"), python=NODE_PYTHON)
    (HERE / "node.lock").write_text(node, encoding="utf-8")
    try:
        hashed = split(compiled(f"torch=={torch}+cu126\n", python=OLDEST_PYTHON, index=TORCH_INDEX))[1]
    except subprocess.CalledProcessError:
        print(
            f"{TORCH_INDEX}: unavailable; keeping {'the' if CU126.exists() else 'no'} torch-cu126.lock", file=sys.stderr
        )
    else:
        CU126.write_text(hashed, encoding="utf-8")
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
    """Return all packages with their hashes, resolved together."""
    return compiled(f"{requirements}\ntorch=={torch}\n", python=OLDEST_PYTHON)


def compiled(requirements: str, *, python: str, index: str = "") -> str:
    """Return packages with their hashes, from PyPI and another index. uv's own configuration is ignored.

    Raises CalledProcessError: they can't be resolved, or an index does not answer.
    """
    options = ("--universal", "--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--quiet")
    indexes = ("--index", index, "--index-strategy", "unsafe-best-match", "--no-emit-index-url") if index else ()
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "all.in")
        wanted.write_text(requirements, encoding="utf-8")
        uv = [sys.executable, "-m", "uv", "pip", "compile", *options, *indexes, "--python-version", python, str(wanted)]
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
