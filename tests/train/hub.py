"""A Hugging Face hub on loopback for the real client, which knows it by its address in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch_train.common import contract
from launcher.testing.httpserver import Head, LoopbackServer, Response

ROOT = Path(contract.__file__).parents[2]


class Hub(LoopbackServer):
    """The part of a hub that all have: a subclass answers requests in `answer`."""

    def __init__(self) -> None:
        super().__init__(self.answer, "hub")

    def answer(self, head: Head) -> Response:
        raise NotImplementedError


def refusal(code: str, status: int = 404) -> Response:
    return Response(b"", status, {"X-Error-Code": code, "X-Error-Message": code})


def run_with_hub(url: str, cache: Path, program: str, *arguments: str, **env: str) -> list[dict[str, Any]]:
    """Return the lines of JSON that a Python program prints."""
    world = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    world |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
    world |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **world, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
