"""Docker for the startup script: it keeps what it was asked as JSON lines, and one container, whose life is in files.

exit     the container's exit code; as long as the file isn't there, it runs
refuses  what a command answers, with exit code 1: {"pull": "denied: …"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["WORLD"]) / "docker"
ENDED = FOLDER / "exit"
CONTAINER = FOLDER / "container"


def main(command: str, *arguments: str) -> int:
    with (FOLDER / "calls").open("a") as file:
        file.write(json.dumps([command, *arguments]) + "\n")
    refused = json.loads((FOLDER / "refuses").read_text()).get(command)
    if refused:
        print(refused, file=sys.stderr)
        return 1
    return {"ps": ps, "run": run, "start": start, "wait": wait, "stop": stop, "inspect": inspect}.get(
        command, nothing
    )()


def nothing() -> int:
    return 0


def ps() -> int:
    if CONTAINER.exists():
        print("exited" if ENDED.exists() else "running")
    return 0


def run() -> int:
    CONTAINER.touch()
    return 0


def start() -> int:
    ENDED.unlink()
    return 0


def wait() -> int:
    while not ENDED.exists():
        time.sleep(0.01)
    return inspect()


def inspect() -> int:
    print(ENDED.read_text())
    return 0


def stop() -> int:
    """The job saves and says so by its own code."""
    ENDED.write_text("75")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
