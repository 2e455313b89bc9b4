"""What `launch` renders, as a user gets it by the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from tests.command import launch

JOB_SPECS = Path(__file__).parent.parent / "job_specs"


def rendered(target: str, spec: Path, output: str, *flags: str) -> str:
    """Return what `--dry-run -o OUTPUT` prints."""
    done = launch(target, spec, "--dry-run", "-o", output, *flags)
    assert done.code == 0, done.err
    return done.out


def plan(target: str, spec: Path, *flags: str) -> dict[str, Any]:
    """The plan of `spec` as `-o json` prints it."""
    planned: dict[str, Any] = json.loads(rendered(target, spec, "json", *flags))
    return planned


def gcloud_command(text: str) -> list[str]:
    """The gcloud command that stands as a comment above the YAML, continued over lines by backslashes."""
    comment = [
        line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), text.splitlines())
    ]
    started = list(dropwhile(lambda line: not line.startswith("gcloud "), comment))
    assert started, f"no gcloud command above the YAML:\n{text[:500]}"
    more = list(takewhile(lambda line: line.endswith("\\"), started))
    return shlex.split(" ".join(line.removesuffix("\\") for line in started[: len(more) + 1]))


def difference(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """One line for each field in which two JSON values differ: its path, and both values."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from difference(left.get(key, ABSENT), right.get(key, ABSENT), f"{path}.{key}".strip("."))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for n, pair in enumerate(zip(left, right, strict=True)):
            yield from difference(*pair, f"{path}[{n}]")
    elif left != right or type(left) is not type(right):
        yield f"{path}: {_shown(left)} != {_shown(right)}"


ABSENT = object()


def _shown(value: Any) -> str:
    return "(absent)" if value is ABSENT else json.dumps(value, ensure_ascii=False)
