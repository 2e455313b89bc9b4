"""The rules that processes and containers share, on replicas that do as they are told and a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from launcher.clock import Clock
from launcher.services.local import supervisor
from launcher.services.local.supervisor import GRACE_SECONDS, PEERS_SECONDS, Ended, Preemption, run

FOREVER = float("inf")


class World:
    """A clock, and all that happens on it: `told` has a line for each call that has an effect."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.told: list[str] = []
        self.at: dict[float, Callable[[], None]] = {}

    def clock(self) -> Clock:
        return Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for when in sorted(when for when in self.at if when <= self.seconds):
            self.at.pop(when)()

    @contextmanager
    def cleared(self) -> Iterator[None]:
        self.told.append("entered")
        try:
            yield
        finally:
            self.told.append("cleared")


class Fake:
    """A replica that ends by itself after `seconds`, or so long `after` SIGTERM (with 75)."""

    def __init__(
        self, world: World, name: str, *, seconds: float = FOREVER, code: int = 0, after: float = 1, known: bool = True
    ) -> None:
        self.world = world
        self.name = name
        self.ends = world.seconds + seconds
        self.code = code
        self.after = after
        self.known = known
        world.told.append(f"{name} started")

    def poll(self) -> int | None:
        return self.code if self.known and self.world.seconds >= self.ends else None

    def terminate(self) -> None:
        if self.poll() is None:
            self.world.told.append(f"{self.name} SIGTERM")
            if self.world.seconds + self.after < self.ends:
                self.ends, self.code = self.world.seconds + self.after, 75

    def kill(self) -> None:
        if self.poll() is None:
            self.world.told.append(f"{self.name} SIGKILL")
            self.ends, self.code = self.world.seconds, -9

    def drain(self) -> None:
        self.world.told.append(f"{self.name} drained")


@pytest.fixture
def world() -> World:
    return World()


def ran(
    world: World, *starts: Callable[[], Fake], preemption: Preemption | None = None, disable_retries: bool = False
) -> Ended:
    return run(
        starts,
        resources=world.cleared(),
        say=world.told.append,
        preemption=preemption,
        disable_retries=disable_retries,
        clock=world.clock(),
    )


def ending_with(world: World, name: str, *codes: int) -> Callable[[], Fake]:
    """Each start of the replica ends after 10 seconds with the next of these codes."""
    rest = iter(codes)
    return lambda: Fake(world, name, seconds=10, code=next(rest))


def test_all_run_to_their_end_and_are_cleared_away_before_their_last_lines(world: World) -> None:
    ended = ran(world, lambda: Fake(world, "a", seconds=3), lambda: Fake(world, "b", seconds=5))
    assert ended == Ended({"a": 0, "b": 0}, None)
    assert world.told == ["entered", "a started", "b started", "cleared", "a drained", "b drained"]
    assert world.seconds == pytest.approx(5, abs=0.2)


def test_when_one_fails_the_others_have_time_to_notice_and_are_stopped(world: World) -> None:
    ended = ran(world, lambda: Fake(world, "a", seconds=10, code=3), lambda: Fake(world, "b"))
    assert ended.codes == {"a": 3, "b": 75}
    assert world.seconds == pytest.approx(10 + PEERS_SECONDS + 1, abs=0.5)


def test_a_replica_that_exits_by_itself_is_not_stopped(world: World) -> None:
    ended = ran(world, lambda: Fake(world, "a", seconds=1, code=3), lambda: Fake(world, "b", seconds=5, code=1))
    assert ended.codes == {"a": 3, "b": 1}
    assert "b SIGTERM" not in world.told


def test_a_replica_that_ignores_sigterm_is_killed_after_the_grace_period(world: World) -> None:
    ended = ran(world, lambda: Fake(world, "a", seconds=1, code=3), lambda: Fake(world, "b", after=FOREVER))
    assert ended.codes == {"a": 3, "b": -9}
    assert world.seconds == pytest.approx(1 + PEERS_SECONDS + GRACE_SECONDS, abs=0.5)


def test_a_preemption_begins_in_time_and_tells_how_long_it_took(world: World) -> None:
    begun: list[float] = []
    preemption = Preemption(60, lambda: begun.append(world.seconds))
    ended = ran(world, lambda: Fake(world, "a", after=7), lambda: Fake(world, "b", after=2), preemption=preemption)
    assert ended.codes == {"a": 75, "b": 75}
    assert ended.preempted == pytest.approx(7, abs=0.2)
    assert begun == [pytest.approx(60, abs=0.2)]


def test_a_start_that_fails_stops_those_before_it(world: World) -> None:
    def fails() -> Fake:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 -- nothing but `fails` raises here
        ran(world, lambda: Fake(world, "a"), fails)
    assert world.told == ["entered", "a started", "a SIGTERM", "cleared", "a drained"]


@pytest.mark.parametrize(("when", "stopped"), [("before", True), ("after", False)])
def test_an_interrupt_before_the_first_start_stops_the_job_and_one_after_the_last_end_does_not(
    world: World, when: str, stopped: bool
) -> None:
    @contextmanager
    def interrupted() -> Iterator[None]:
        if when == "before":
            raise KeyboardInterrupt
        yield
        raise KeyboardInterrupt

    ended = run([lambda: Fake(world, "a", seconds=3)], resources=interrupted(), say=print, clock=world.clock())
    assert ended == Ended({} if stopped else {"a": 0}, None, stopped)


def test_an_interrupt_stops_all_and_a_second_one_kills_them(world: World) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    world.at = {5.0: interrupted, 8.0: interrupted}
    assert ran(world, lambda: Fake(world, "a", after=FOREVER)).stopped
    assert world.told == ["entered", "a started", "a SIGTERM", "a SIGKILL", "cleared", "a drained"]
    assert world.seconds == pytest.approx(8, abs=0.2)


@pytest.mark.parametrize("code", [-9, 137, -11])
def test_a_killed_replica_is_restarted(world: World, code: int) -> None:
    ended = ran(world, lambda: Fake(world, "a", seconds=15), ending_with(world, "b", code, 0))
    assert ended.codes == {"a": 0, "b": 0}
    signum = {-11: "SIGSEGV"}.get(code, "SIGKILL")
    restart = [f"b was killed ({signum}); restarting it (1 of 5)", "b drained", "b started"]
    assert world.told == ["entered", "a started", "b started", *restart, "cleared", "a drained", "b drained"]
    assert world.seconds == pytest.approx(20, abs=0.3)


def test_replicas_that_are_killed_together_are_restarted_each(world: World) -> None:
    ended = ran(world, ending_with(world, "a", -9, 0), ending_with(world, "b", -9, 0))
    assert ended.codes == {"a": 0, "b": 0}
    assert (world.told.count("a started"), world.told.count("b started")) == (2, 2)


def test_a_replica_is_restarted_as_often_as_on_vertex_ai(world: World) -> None:
    ended = ran(world, lambda: Fake(world, "a"), ending_with(world, "b", *[-9] * 6))
    assert ended.codes == {"a": 75, "b": -9}
    assert [line for line in world.told if "was killed" in line] == [
        *(f"b was killed (SIGKILL); restarting it ({number} of 5)" for number in range(1, 6)),
        "b was killed (SIGKILL); not restarting it",
    ]
    assert world.seconds == pytest.approx(6 * 10 + PEERS_SECONDS + 1, abs=1)


def test_of_replicas_that_are_killed_together_none_is_restarted_if_one_has_no_restart_left(world: World) -> None:
    lives: list[Fake] = []

    class KilledWithTheSixth(Fake):
        def poll(self) -> int | None:
            return lives[-1].poll() if len(lives) == 6 else None

    start = ending_with(world, "a", *[-9] * 6)

    def start_and_remember() -> Fake:
        lives.append(start())
        return lives[-1]

    ended = ran(world, start_and_remember, lambda: KilledWithTheSixth(world, "b"))
    assert ended.codes == {"a": -9, "b": -9}
    assert world.told.count("b started") == 1


@pytest.mark.parametrize("code", [0, 1, 2, 70, 75, 77, 78, 143, 130, -15, 128, 255])
def test_a_replica_that_exits_by_itself_or_was_asked_to_stop_is_not_restarted(world: World, code: int) -> None:
    assert ran(world, ending_with(world, "a", code)).codes == {"a": code}
    assert world.told == ["entered", "a started", "cleared", "a drained"]


@pytest.mark.parametrize("code", [0, 1])
def test_nothing_is_restarted_once_a_replica_has_ended_by_itself(world: World, code: int) -> None:
    ended = ran(world, ending_with(world, "a", code), lambda: Fake(world, "b", seconds=12, code=-9))
    assert ended.codes == {"a": code, "b": -9}
    assert world.told.count("b started") == 1


def test_nothing_is_restarted_if_the_request_disables_retries(world: World) -> None:
    assert ran(world, ending_with(world, "a", -9), disable_retries=True).codes == {"a": -9}
    assert "a was killed (SIGKILL); not restarting it" in world.told


def test_a_restarted_replica_is_preempted_like_the_others(world: World) -> None:
    begun: list[float] = []
    lives = iter([{"seconds": 10.0, "code": -9}, {"after": 7}])
    ended = ran(
        world,
        lambda: Fake(world, "a", **next(lives)),  # type: ignore[arg-type]  # of different types
        preemption=Preemption(60, lambda: begun.append(world.seconds)),
    )
    assert ended.codes == {"a": 75}
    assert begun == [pytest.approx(60, abs=0.2)]


def test_an_unknown_end_is_not_a_success(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "wait", lambda *_: False)
    assert ran(world, lambda: Fake(world, "a", known=False)).codes == {"a": -9}
