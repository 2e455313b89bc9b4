"""`make lock`: renew what the training image is locked to.

images.lock gets the digest of each base, where its registry can be reached; a digest that isn't known stays as it is,
empty or not. requirements.lock and torch-cu130.lock are resolved anew from requirements.in and the Dockerfile's version
of PyTorch, for all platforms and all versions of Python from 3.11 on, each file of theirs by its hash.
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
"""PyTorch and what its wheels for CUDA 13 bring along, as PyPI has them; the CPU's wheel needs none of the rest."""

Digest = Callable[[str], str | None]


def main() -> int:
    """Write the three locks. A digest that can't be had is told, and no failure."""
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
    """images.lock with the digests that `find` knows, and a line about each that it doesn't."""
    problems, rows = [], []
    for row in csv.DictReader(table.splitlines()):
        found = find(row["reference"])
        if not found:
            problems.append(f"{row['reference']}: its registry doesn't say its digest; {row['digest'] or 'none'} stays")
        rows.append(f"{row['reference']},{found or row['digest']}\n")
    return "reference,digest\n" + "".join(rows), problems


def digest(reference: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The digest of an image in its registry; None: it isn't there, or can't be reached."""
    from launcher.errors import LaunchError
    from launcher.images.registry import Registry, parse

    name = parse(reference)
    try:
        return Registry(name.host, environ).head(name.repository, name.tag or "latest")
    except LaunchError as error:
        print(error, file=sys.stderr)
        return None


def torch_version(dockerfile: str) -> str:
    """The version of PyTorch that the recipe names."""
    (found,) = re.findall(r"^ARG TORCH=(\S+)$", dockerfile, re.MULTILINE)
    return str(found)


def resolved(requirements: str, torch: str) -> str:
    """All packages with their hashes, resolved together; only what uv is told here counts."""
    options = ("--universal", "--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "all.in")
        wanted.write_text(f"{requirements}\ntorch=={torch}\n", encoding="utf-8")
        uv = [sys.executable, "-m", "uv", "pip", "compile", *options, "--python-version", OLDEST_PYTHON, str(wanted)]
        return subprocess.run(uv, check=True, stdout=subprocess.PIPE, text=True).stdout


def split(locked: str) -> tuple[str, str]:
    """(all other packages, PyTorch and what comes with its CUDA wheels); a package is a line and its hashes below."""
    packages = [block for block in re.split(r"^(?=\S)", locked, flags=re.MULTILINE) if block]
    return joined(packages, torch=False), joined(packages, torch=True)


def joined(packages: Iterable[str], *, torch: bool) -> str:
    """Those packages that are PyTorch's, or those that aren't."""
    return "".join(block for block in packages if bool(OF_TORCH.match(block)) is torch)


if __name__ == "__main__":
    sys.exit(main())
