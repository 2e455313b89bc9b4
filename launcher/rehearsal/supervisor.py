"""Replicas that run, as processes or as containers: one set of rules for waiting, preempting and stopping."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

from launcher.clock import REAL, Clock
from launcher.signals import signals_stop

GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as on Vertex AI and on a Spot VM."""
PEERS_SECONDS = 20.0
"""What the other replicas get to notice by themselves that one has failed."""
POLL_SECONDS = 0.1

OnLine = Callable[[str, str], None]
"""Called with a replica's name and one line of its output, from a thread of that replica."""


class Running(Protocol):
    """One replica that was started."""

    @property
    def name(self) -> str:
        """As in Vertex's logs: workerpool0-0."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def terminate(self) -> None:
        """SIGTERM to its first process alone, as a platform signals a container's PID 1: handing it on is that one's
        work. One that has ended is fine."""

    def kill(self) -> None:
        """End all of it, and wait for that: `poll` has an exit code then. One that has ended is fine."""

    def drain(self) -> None:
        """Until its last lines have been passed on, for a few seconds at most."""


class Preemption(NamedTuple):
    """The platform takes the machines away: `after` seconds from the replicas' start. `begins` is called then."""

    after: float
    begins: Callable[[], None]


class Ended(NamedTuple):
    """How the replicas ended: an exit code each.

    Of a process that a signal has ended it is the signal's number, negative; of a container the engine's own, 128 more
    than it. `preempted` is how many seconds a preemption took until all were gone; None: there was none.
    """

    codes: dict[str, int]
    preempted: float | None = None


def run(
    replicas: Iterable[Running],
    *,
    cleared: AbstractContextManager[object],
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas to their end, or to their preemption.

    Each is started when `replicas` is asked for it. `cleared` is entered before that, and takes away at its end what
    stopped replicas leave. When one fails, the others get `PEERS_SECONDS` to notice and are then stopped. On
    KeyboardInterrupt all are stopped before it goes on.

    Raises:
        LaunchError: a replica can't be started.
        Stopped: this process got SIGTERM or SIGHUP, and all have been stopped.
    """
    started: list[Running] = []
    seconds = None
    try:
        with signals_stop(), cleared:
            try:
                for one in replicas:
                    started.append(one)
                if wait(started, clock, preemption.after if preemption else float("inf")) and preemption:
                    seconds = preempt(started, clock, preemption)
            finally:
                stop(started, clock)
    finally:
        for one in started:  # what one wrote last may still be on its way; nothing that is left over holds it up now
            one.drain()
    return Ended({one.name: code_of(one) for one in started}, seconds)


def code_of(ended: Running) -> int:
    """Its exit code; what nobody could tell was no success."""
    code = ended.poll()
    return -signal.SIGKILL if code is None else code


def wait(started: Sequence[Running], clock: Clock, seconds: float) -> bool:
    """Until all have ended, or until one has failed and the others have had time to notice.

    Whether `seconds` were over before any of that.
    """
    begun, failed_at = clock.now(), float("inf")
    while None in (codes := [one.poll() for one in started]):
        now = clock.now()
        if any(codes):
            failed_at = min(failed_at, now)
        elif now - begun >= seconds:
            return True
        if now - failed_at > PEERS_SECONDS:
            return False
        clock.sleep(POLL_SECONDS)
    return False


def preempt(started: Sequence[Running], clock: Clock, preemption: Preemption) -> float:
    """SIGTERM, 30 seconds, SIGKILL; how long it took until all were gone. Ctrl-C ends it early, and goes on."""
    preemption.begins()
    begun = clock.now()
    ask(started, clock)
    for one in started:
        one.kill()
    return clock.now() - begun


def stop(started: Sequence[Running], clock: Clock) -> None:
    """SIGTERM, up to `GRACE_SECONDS`, SIGKILL. A second Ctrl-C goes straight to SIGKILL."""
    with suppress(KeyboardInterrupt):
        ask(started, clock)
    for one in started:
        one.kill()


def ask(started: Sequence[Running], clock: Clock) -> None:
    """SIGTERM to those that still run, and up to `GRACE_SECONDS` for them to end."""
    for one in started:
        one.terminate()
    deadline = clock.now() + GRACE_SECONDS
    while any(one.poll() is None for one in started) and clock.now() < deadline:
        clock.sleep(POLL_SECONDS)
