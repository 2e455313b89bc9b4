"""A Hugging Face hub on loopback for the real client, which knows it by its address in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from launch_train.common import contract
from launcher.testing.httpserver import Server

ROOT = Path(contract.__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """The part of a hub that all have: a subclass answers requests in `answer`."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def refuse(self, code: str, status: int = 404) -> None:
        self.end(status, {"X-Error-Code": code, "X-Error-Message": code})

    def end(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serve(handler: type[Hub]) -> Iterator[str]:
    """Yield the address of a hub."""
    server = Server(0, handler, "hub")
    server.daemon_threads = True
    server.thread.start()
    yield f"http://{server.host}"
    server.stop()


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
