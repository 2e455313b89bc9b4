"""Start replicas, restart killed ones, preempt and stop them: the same rules for processes and containers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

from launch_train.common.contract import NOTICE_SECONDS
from launcher.clock import REAL, Clock
from launcher.signals import ctrl_c_raises, signals_stop

GRACE_SECONDS = NOTICE_SECONDS
"""Between SIGTERM and SIGKILL, as on Vertex AI and on a Spot VM."""
PEERS_SECONDS = 20.0
"""Time for the other replicas to notice that one has failed and to exit by themselves."""
POLL_SECONDS = 0.1
MAX_RESTARTS = 5
"""Restarts of each replica, as on Vertex AI (docs/reliability.md)."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""A replica that one of these ends was asked to stop."""

OnLine = Callable[[str, str], None]
"""Called with a replica's name and one line of its output, from a thread of that replica."""


Say = Callable[[str], None]
"""Called with a line for the user."""


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
        """Kill all of its processes, also those that it left, and wait, so that `poll` has an exit code."""

    def drain(self) -> None:
        """Wait until its last lines were passed on, for a few seconds at most."""


class Preemption(NamedTuple):
    """A simulated preemption `after` so many seconds. `begins` is called then."""

    after: float
    begins: Callable[[], None]


class Ended(NamedTuple):
    """The replicas' exit codes by name.

    After a signal, a process has the negative signal number, a container 128 plus it, as the engine reports it.
    `preempted`: seconds from the preemption until all had exited; None: no preemption. `stopped`: this process was told
    to stop, so it stopped them.
    """

    codes: dict[str, int]
    preempted: float | None = None
    stopped: bool = False


def run(
    starts: Sequence[Callable[[], RunningReplica]],
    *,
    resources: AbstractContextManager[object],
    say: Say,
    disable_retries: bool = False,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas to their end, or until their preemption.

    Each of `starts` starts a replica, again if it was killed. `resources` is entered before, and removes what stopped
    replicas leave. When one fails, the others get `PEERS_SECONDS` to exit and are then stopped. All are stopped on
    SIGTERM, SIGHUP or KeyboardInterrupt. `disable_retries`: of the request, nothing is restarted.

    Raises LaunchError: a replica can't be started.
    """
    started: list[RunningReplica] = []
    seconds, stopped = None, True
    try:
        with suppress(KeyboardInterrupt), signals_stop(), ctrl_c_raises(), resources:
            try:
                for start in starts:
                    started.append(start())
                most, after = 0 if disable_retries else MAX_RESTARTS, preemption.after if preemption else float("inf")
                if wait(started, starts, most, say, clock, after) and preemption:
                    seconds = preempt(started, clock, preemption)
                stopped = False  # an interrupt from here on comes too late
            finally:
                stop(started, clock)
    finally:
        for replica in started:  # no leftover process holds the pipes open any more
            replica.drain()
    codes = {replica.name: replica.poll() for replica in started}
    exits = {name: -signal.SIGKILL if code is None else code for name, code in codes.items()}
    return Ended(exits, seconds, stopped)


def wait(
    started: list[RunningReplica],
    starts: Sequence[Callable[[], RunningReplica]],
    most: int,
    say: Say,
    clock: Clock,
    seconds: float,
) -> bool:
    """Wait until all have ended, or one has failed and `PEERS_SECONDS` have passed.

    A killed replica is replaced in `started` by another start, each one at most `most` times, as Vertex AI restarts a
    replica whose machine has failed. Once a replica has ended for another reason none is restarted, because the job is
    ending. Returns True if `seconds` passed before either.
    """
    begun, failed_at = clock.now(), float("inf")
    restarts = [0] * len(starts)
    while True:
        codes = [replica.poll() for replica in started]
        killed = {place: killing_signal(code) for place, code in enumerate(codes) if code is not None}
        can_restart = all(killed.values()) and all(restarts[place] < most for place in killed)
        for place, signum in killed.items() if can_restart else ():
            restarts[place] += 1
            say(f"{started[place].name} was killed ({signum}); restarting it ({restarts[place]} of {most})")
            started[place].kill()
            started[place].drain()
            started[place] = starts[place]()
            codes[place] = None
        now = clock.now()
        if any(codes) and failed_at == float("inf"):
            failed_at = now
            for place, signum in killed.items():
                if signum:
                    say(f"{started[place].name} was killed ({signum}); not restarting it")
        if None not in codes or now - failed_at > PEERS_SECONDS:
            return False
        if not any(codes) and now - begun >= seconds:
            return True
        clock.sleep(POLL_SECONDS)


def killing_signal(code: int) -> str:
    """Return the signal that killed a replica, from its exit code; empty if it exited by itself or was asked to stop.

    Vertex AI restarts a replica that exits with an error by itself, too. That is not rehearsed: launch_train.node has
    restarted its processes before, and a container that is started after its end exits at once.
    """
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in {*signal.Signals} - {*STOP_SIGNALS} else ""


def preempt(started: Sequence[RunningReplica], clock: Clock, preemption: Preemption) -> float:
    """Preempt all replicas (SIGTERM, 30 seconds, SIGKILL); return the seconds until all had exited."""
    preemption.begins()
    begun = clock.now()
    terminate_all(started, clock)
    for replica in started:
        replica.kill()
    return clock.now() - begun


def stop(started: Sequence[RunningReplica], clock: Clock) -> None:
    """Stop all replicas: SIGTERM, up to `GRACE_SECONDS`, SIGKILL. A second Ctrl-C sends SIGKILL at once."""
    with suppress(KeyboardInterrupt):
        terminate_all(started, clock)
    for replica in started:
        replica.kill()


def terminate_all(started: Sequence[RunningReplica], clock: Clock) -> None:
    """Send SIGTERM to the replicas that run, and wait up to `GRACE_SECONDS` for their end."""
    for replica in started:
        replica.terminate()
    deadline = clock.now() + GRACE_SECONDS
    while any(replica.poll() is None for replica in started) and clock.now() < deadline:
        clock.sleep(POLL_SECONDS)
