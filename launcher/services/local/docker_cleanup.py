"""Remove a job's containers and its network, also after `kill -9` of launch.

Run as `python -m launcher.services.local.docker_cleanup JOB`.

It reads a pipe whose other end only launch holds, so the kernel closes it when launch ends, for any reason. A byte
before that means that launch has removed everything itself. Containers outlive the process that created them, so
train/launch_train/node/parent_death.py can't end them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from launcher.images.docker_engine import Engine, EngineError
from launcher.services.local.container_settings import LABEL
from launcher.services.local.supervisor import GRACE_SECONDS

REMOVAL_SECONDS = 20.0
"""Wait for a removal that another process has begun."""
AWAY_SECONDS = 300.0
"""Wait for an engine that does not answer: an update restarts it."""
LATE_SECONDS = 5.0
"""The engine may still create what launch requested just before it was killed."""


def main(job: str) -> int:
    """Wait for the end of launch, and remove the job's resources. Raises EngineError: the engine does not answer."""
    if sys.stdin.buffer.read():
        return 0
    api = engine().api
    end(api, job)
    deadline = time.monotonic() + LATE_SECONDS
    while time.monotonic() < deadline:
        clear(api, job)
        time.sleep(0.5)
    return 0


def engine() -> Engine:
    """Return the engine. It may be restarting, which may be what ended launch. Raises EngineError."""
    deadline = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return Engine.connect(os.environ)
        except EngineError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def end(api: Any, job: str) -> None:
    """Send SIGTERM to the running containers and give them time to save, as in a preemption."""
    from docker.errors import APIError

    for container in containers(api, job):
        with suppress(APIError):  # it has ended meanwhile
            api.kill(container, "SIGTERM")
    until(lambda: not containers(api, job, status="running"), GRACE_SECONDS)


def clear(api: Any, job: str) -> bool:
    """Remove everything with the job's label, or wait for a removal in progress; return whether nothing is left."""
    from docker.errors import APIError, NotFound

    def gone() -> bool:
        for container in containers(api, job):
            with suppress(APIError):  # gone, or being removed: checked below
                api.remove_container(container, force=True, v=True)
        return not containers(api, job)

    cleared = until(gone, REMOVAL_SECONDS)
    for network in api.networks(filters={"label": f"{LABEL}={job}"}):
        try:
            api.remove_network(network["Id"])
        except NotFound:  # removed by another process
            continue
        except APIError:
            cleared = False
    return cleared


def containers(api: Any, job: str, **filters: str) -> list[str]:
    return [container["Id"] for container in api.containers(all=True, filters={"label": f"{LABEL}={job}", **filters})]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true; return whether it was in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
