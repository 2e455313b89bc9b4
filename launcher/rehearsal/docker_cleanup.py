"""Remove a job's containers and its network, also after `kill -9` of launch.

Run as `python -m launcher.rehearsal.docker_cleanup JOB`.

It waits at a pipe whose other end launch alone holds: the kernel closes it whatever ends launch. A word that came
before says that nothing is left to do. Containers live on without whoever started them, so no leash
(train/launch_train/node/parent_death.py) can hold them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launcher.images.docker_events import EngineError
from launcher.rehearsal.container_settings import LABEL
from launcher.rehearsal.supervisor import GRACE_SECONDS

if TYPE_CHECKING:
    from launcher.images.docker_engine import Engine

REMOVAL_SECONDS = 20.0
"""How long a removal that another has begun is waited for."""
AWAY_SECONDS = 300.0
"""How long an engine that is away is waited for: an update stops and starts it."""
LATE_SECONDS = 5.0
"""What launch had asked for when it was killed may still come."""


def main(job: str) -> int:
    """Wait for the end of launch; 0, also when nothing was left. Raises EngineError: there is no engine any more."""
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
    """The engine, which may be starting again: then what ended launch is that it was gone. Raises EngineError."""
    from launcher.images.docker_engine import Engine

    deadline = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return Engine.connect(os.environ)
        except EngineError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def end(api: Any, job: str) -> None:
    """SIGTERM to those that run, and the time to save: a killed launch costs no more than a preemption."""
    from docker.errors import APIError

    for one in containers(api, job):
        with suppress(APIError):  # it has ended meanwhile
            api.kill(one, "SIGTERM")
    until(lambda: not containers(api, job, status="running"), GRACE_SECONDS)


def clear(api: Any, job: str) -> bool:
    """Remove all that has the job's label; what is being removed already is waited for. Whether nothing is left."""
    from docker.errors import APIError, NotFound

    def gone() -> bool:
        for one in containers(api, job):
            with suppress(APIError):  # gone, or on its way: the next look tells
                api.remove_container(one, force=True, v=True)
        return not containers(api, job)

    cleared = until(gone, REMOVAL_SECONDS)
    for one in api.networks(filters={"label": f"{LABEL}={job}"}):
        try:
            api.remove_network(one["Id"])
        except NotFound:  # another was quicker
            continue
        except APIError:
            cleared = False
    return cleared


def containers(api: Any, job: str, **filters: str) -> list[str]:
    """The ids of the job's containers."""
    return [one["Id"] for one in api.containers(all=True, filters={"label": f"{LABEL}={job}", **filters})]


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
