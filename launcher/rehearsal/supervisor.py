"""Wait for running replicas, preempt and stop them: the same rules for processes and containers."""

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
"""Time for the other replicas to notice that one has failed and to exit by themselves."""
POLL_SECONDS = 0.1

OnLine = Callable[[str, str], None]
"""Called with a replica's name and one line of its output, from a thread of that replica."""


class RunningReplica(Protocol):
    """One started replica."""

    @property
    def name(self) -> str:
        """Return its name, as in Vertex AI's logs: workerpool0-0."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM to its first process only, as a platform signals a container's PID 1. Does nothing after its
        end."""

    def kill(self) -> None:
        """Kill all of its processes and wait, so that `poll` has an exit code. Does nothing after its end."""

    def drain(self) -> None:
        """Wait until its last lines were passed on, for a few seconds at most."""


class Preemption(NamedTuple):
    """A simulated preemption `after` so many seconds. `begins` is called then."""

    after: float
    begins: Callable[[], None]


class Ended(NamedTuple):
    """The replicas' exit codes by name.

    After a signal, a process has the negative signal number, a container 128 plus it, as the engine reports it.
    `preempted`: seconds from the preemption until all had exited; None: no preemption.
    """

    codes: dict[str, int]
    preempted: float | None = None


def run(
    replicas: Iterable[RunningReplica],
    *,
    resources: AbstractContextManager[object],
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas to their end, or until their preemption.

    Iterating over `replicas` starts them. `resources` is entered before, and removes what stopped replicas leave. When
    one fails, the others get `PEERS_SECONDS` to exit and are then stopped. On KeyboardInterrupt all are stopped before
    it is re-raised.

    Raises:
        LaunchError: a replica can't be started.
        Stopped: this process received SIGTERM or SIGHUP, and all replicas were stopped.
    """
    started: list[RunningReplica] = []
    seconds = None
    try:
        with signals_stop(), resources:
            try:
                for one in replicas:
                    started.append(one)
                if wait(started, clock, preemption.after if preemption else float("inf")) and preemption:
                    seconds = preempt(started, clock, preemption)
            finally:
                stop(started, clock)
    finally:
        for one in started:  # no leftover process holds the pipes open any more
            one.drain()
    return Ended({one.name: exit_code_of(one) for one in started}, seconds)


def exit_code_of(ended: RunningReplica) -> int:
    """Return a replica's exit code; an unknown one counts as killed."""
    code = ended.poll()
    return -signal.SIGKILL if code is None else code


def wait(started: Sequence[RunningReplica], clock: Clock, seconds: float) -> bool:
    """Wait until all have ended, or one has failed and `PEERS_SECONDS` have passed.

    Returns True if `seconds` passed before either.
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


def preempt(started: Sequence[RunningReplica], clock: Clock, preemption: Preemption) -> float:
    """Preempt all replicas (SIGTERM, 30 seconds, SIGKILL); return the seconds until all had exited."""
    preemption.begins()
    begun = clock.now()
    terminate_all(started, clock)
    for one in started:
        one.kill()
    return clock.now() - begun


def stop(started: Sequence[RunningReplica], clock: Clock) -> None:
    """Stop all replicas: SIGTERM, up to `GRACE_SECONDS`, SIGKILL. A second Ctrl-C sends SIGKILL at once."""
    with suppress(KeyboardInterrupt):
        terminate_all(started, clock)
    for one in started:
        one.kill()


def terminate_all(started: Sequence[RunningReplica], clock: Clock) -> None:
    """Send SIGTERM to the replicas that run, and wait up to `GRACE_SECONDS` for their end."""
    for one in started:
        one.terminate()
    deadline = clock.now() + GRACE_SECONDS
    while any(one.poll() is None for one in started) and clock.now() < deadline:
        clock.sleep(POLL_SECONDS)
