"""The control store: members, their pulse, and the coordinator, over a store in memory and over torch's."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import Buffer, LocalFolder, Storage, open_storage
from launch_train.metrics import LAST_SECONDS
from launch_train.node.control_store import (
    GenerationSpec,
    HeartbeatMonitor,
    Member,
    State,
    Store,
    StoreLostError,
    Timing,
)
from launch_train.node.coordinator import Coordinator
from launch_train.node.exit_status import End, Outcome
from launch_train.node.run_record import RunRecord
from launcher.services.local.supervisor import GRACE_SECONDS
from tests.command import ROOT
from tests.train.nodes import free_port, until

FAST = Timing(tick=0.002, beat=0.02, lost=0.3, gather=5, line=0.05, settle=0.2, retry=0.3, retry_every=0.01)


class Clock:
    """A clock that goes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pulse_tells_who_is_there() -> None:
    store, clock = Store(), Clock()
    pulse = HeartbeatMonitor(store, 3, lost=30, clock=clock)
    assert pulse.members() == {}
    store.set("beat/0", "aa:1")
    store.set("beat/2", "cc:1")
    assert pulse.members() == {0: "aa", 2: "cc"}
    for count in range(2, 6):
        clock.now += 8
        store.set("beat/0", f"aa:{count}")
        pulse.members()
    assert pulse.members() == {0: "aa"}  # node 2 has been silent for 32 s
    store.set("beat/2", "dd:1")
    assert pulse.members() == {0: "aa", 2: "dd"}


def test_who_was_away_himself_blames_nobody() -> None:
    store, clock = Store(), Clock()
    pulse = HeartbeatMonitor(store, 1, lost=30, clock=clock)
    store.set("beat/0", "aa:1")
    pulse.members()
    clock.now += 3600  # the machine was suspended, and the other one with it
    assert pulse.members() == {0: "aa"}
    for _ in range(4):
        clock.now += 8
        alive = pulse.members()
    assert alive == {}


class Crew:
    """Some members, each with a line of its own, and a coordinator in between."""

    def __init__(self, folder: Path, size: int, storage: Storage | None = None, timing: Timing = FAST) -> None:
        self.store = Store()
        self.record = RunRecord(storage or open_storage(str(folder)))
        self.said: list[str] = []
        self.size = size
        self.members: dict[int, Member] = {}
        self.coordinator = Coordinator(
            self.store, self.record, attempt=1, size=size, restarts=1, timing=timing, say=self.said.append
        )

    def join(self, *nodes: int) -> None:
        for node in nodes:
            self.members[node] = Member(self.store, node, FAST)

    def ordered(self, generation: int) -> GenerationSpec:
        """The order of a generation, once every member has it."""
        until(lambda: all(self.state(n).generation == generation for n in self.members), f"order {generation}")
        until(lambda: all(self.state(n).phase in ("run", "stop") for n in self.members), "a run")
        return GenerationSpec.from_json(self.store.get(f"order/{generation}") or "")

    def state(self, node: int) -> State:
        return self.members[node].state()

    def report(self, generation: int, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            self.members[outcome.node].report(generation, outcome)

    def end(self) -> End:
        until(lambda: all(self.state(n).end for n in self.members), "the end")
        self.coordinator.join()
        end = self.state(0).end
        assert end
        return end


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path, 2)
    yield made
    for member in made.members.values():
        member.close()


def test_a_run_that_goes_well(crew: Crew) -> None:
    crew.coordinator.start()
    crew.join(1)
    until(lambda: any("waiting for node 0" in line for line in crew.said), "a line about node 0")
    assert crew.state(1).phase == "wait"
    crew.join(0)
    order = crew.ordered(0)
    assert (order.generation, order.attempt) == (0, 1)
    assert crew.members[0].belongs(order)
    assert crew.members[1].belongs(order)
    crew.report(0, Outcome(0, 0))
    time.sleep(0.05)
    assert crew.state(1).phase == "run"  # one that is done waits for the other
    crew.report(0, Outcome(1, 0))
    assert crew.end() == End(0, "done")


class LeavingStore(Store):
    """Node 0 is gone as soon as the node has said that it has read the end."""

    gone = False

    def get(self, key: str) -> str | None:
        if self.gone:
            raise StoreLostError("node 0 is gone")
        return super().get(key)

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise StoreLostError("node 0 is gone")
        super().set(key, value)
        self.gone = key.startswith("left/")


def test_a_node_has_the_end_before_it_says_so() -> None:
    """Node 0 leaves at that word: who then still had to read the end would fail in a run that went well."""
    store = LeavingStore()
    store.set("end", json.dumps(asdict(End(0, "done"))))
    store.set("state", "end:0")
    member = Member(store, 1, FAST)
    until(lambda: member.state().phase in ("end", "lost"), "the end")
    member.close()
    assert member.state().end == End(0, "done")


def test_one_failure_stops_all_and_a_new_port_is_found(crew: Crew) -> None:
    crew.join(0, 1)
    crew.coordinator.start()
    first = crew.ordered(0)
    crew.report(0, Outcome(1, -9))
    until(lambda: crew.state(0).phase == "stop", "the stop")
    assert crew.store.get("order/1") is None  # not before node 0's processes are gone
    crew.report(0, Outcome(0, 1, note="stopped with the others"))
    second = crew.ordered(1)
    assert second.port != first.port
    assert second.members == first.members
    crew.report(1, Outcome(0, 1), Outcome(1, 1))
    assert crew.end() == End(1, "node 0: exit code 1; failed 2 times without a new checkpoint", terminal=True)
    assert crew.record.terminal() == "node 0: exit code 1; failed 2 times without a new checkpoint"


def test_an_alarm_ends_the_run_everywhere(crew: Crew) -> None:
    crew.coordinator.start()
    crew.join(1)
    crew.members[1].alarm(End(70, "node 1: no GPU"))
    crew.join(0)
    assert crew.end() == End(70, "node 1: no GPU")
    assert crew.record.next_generation(1) == 0  # nothing was started


def test_a_fault_of_the_referee_leaves_nobody_waiting(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    crew.store.set("beat/0", "aa:1")
    crew.store.set("alarm", "no JSON")
    crew.join(0, 1)
    crew.coordinator.start()
    assert crew.end().code == 1
    assert seen == [json.JSONDecodeError]


def test_who_has_saved_and_left_gives_the_others_time_to_do_so_too(crew: Crew) -> None:
    crew.join(0, 1)
    crew.coordinator.start()
    crew.ordered(0)
    crew.report(0, Outcome(1, 1, (75,), signum=15))
    time.sleep(0.1)
    assert crew.state(0).phase == "run"
    until(lambda: crew.state(0).phase == "stop", "the stop of one that does not leave by itself")
    crew.report(0, Outcome(0, 1, (75,), note="stopped with the others"))
    assert crew.end() == End(75, "interrupted; checkpoint saved")


class Shaky(LocalFolder):
    """A run folder that can't be used `times` times from when it is shaken."""

    times = 0
    calls = 0
    spared = 0
    """So many calls more work."""

    def _shake(self) -> None:
        self.calls += 1
        self.spared -= 1
        if self.times > 0 > self.spared:
            self.times -= 1
            raise OutputError("no answer")

    def list(self, prefix: str = "") -> list[str]:
        self._shake()
        return super().list(prefix)

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        self._shake()
        return super().write(name, data, create=create)


@pytest.fixture
def shaky(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path, 1, Shaky(tmp_path))
    made.join(0)
    made.coordinator.start()
    yield made
    made.members[0].close()


def shake(crew: Crew, times: int) -> Shaky:
    assert isinstance(crew.record.storage, Shaky)
    crew.record.storage.times = times
    return crew.record.storage


def test_a_run_folder_that_can_not_be_reached_for_a_moment_ends_nothing(shaky: Crew) -> None:
    shaky.ordered(0)
    shake(shaky, 7)
    shaky.report(0, Outcome(0, 5))
    shaky.ordered(1)
    assert shaky.said[0] == "no answer; retrying for 0 s"
    shaky.report(1, Outcome(0, 0))
    assert shaky.end() == End(0, "done")


def test_a_node_that_is_told_to_stop_does_not_wait_for_the_run_folder(shaky: Crew) -> None:
    shaky.ordered(0)
    shake(shaky, 10**9)
    shaky.report(0, Outcome(0, 5))
    until(lambda: shaky.said != [], "the trouble")
    shaky.members[0].alarm(End(143, "stopped by SIGTERM"))
    assert shaky.end() == End(143, "stopped by SIGTERM")


@pytest.mark.parametrize(("outcome", "code"), [(Outcome(0, 0), 0), (Outcome(0, 1, (75,), signum=15), 75)])
def test_an_end_that_is_clear_asks_the_run_folder_nothing(shaky: Crew, outcome: Outcome, code: int) -> None:
    shaky.ordered(0)
    calls = shake(shaky, 10**9).calls
    shaky.report(0, outcome)
    assert shaky.end().code == code
    assert shake(shaky, 0).calls == calls


@pytest.mark.parametrize("calls", [0, 1])  # away from the first list on, or when the generation is written
def test_a_node_replaced_while_the_run_folder_was_away_costs_no_start(tmp_path: Path, calls: int) -> None:
    crew = Crew(tmp_path, 2, Shaky(tmp_path), replace(FAST, retry=30))
    shake(crew, 10**9).spared = calls
    crew.join(0, 1)
    crew.coordinator.start()
    until(lambda: crew.said != [], "the trouble")
    crew.members[1].close()
    crew.join(1)
    until(lambda: crew.members[1].incarnation in (crew.store.get("beat/1") or ""), "the new node")
    shake(crew, 0)
    assert crew.members[1].belongs(crew.ordered(0))
    crew.report(0, Outcome(0, 0), Outcome(1, 0))
    assert crew.end() == End(0, "done")
    for member in crew.members.values():
        member.close()


def test_a_reason_that_can_not_be_written_is_told_all_the_same(shaky: Crew) -> None:
    shaky.ordered(0)
    shake(shaky, 10**9)
    shaky.report(0, Outcome(0, 2, (2,)))
    assert shaky.end().code == 2
    assert shaky.said[-1] == "terminal could not be written (no answer): do not start this run again"


def test_a_run_folder_that_fails_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    crew = Crew(tmp_path / "file", 1)
    crew.join(0)
    crew.coordinator.start()
    end = crew.end()
    crew.members[0].close()
    assert end.code == 70
    assert "can't be" in end.reason


class Broken(Store):
    """A store whose server goes away."""

    def __init__(self) -> None:
        self.here = True
        self.hangs = threading.Event()
        self.woken = threading.Event()

    def get(self, key: str) -> str | None:
        if self.hangs.is_set():
            self.woken.wait()
        if not self.here:
            raise StoreLostError(key)
        return None

    def set(self, key: str, value: str) -> None:
        self.get(key)


def _gone(store: Broken) -> None:
    store.here = False


@pytest.mark.parametrize("vanish", [_gone, lambda store: store.hangs.set()], ids=["closed", "silent"])
def test_a_lost_store_is_noticed(vanish: Callable[[Broken], None]) -> None:
    store = Broken()
    member = Member(store, 1, FAST)
    assert member.state().phase == "wait"
    vanish(store)
    until(lambda: member.state().phase == "lost", "the loss")
    member.report(0, Outcome(1, 0))  # it must not hang
    store.woken.set()
    member.close()


def test_the_store_of_torch_is_one_too() -> None:
    from launch_train.node.control_store import TorchStore

    port = free_port()
    server: Store = TorchStore("localhost", port, serve=True)
    client: Store = TorchStore("127.0.0.1", port, serve=False)
    assert client.get("nothing") is None
    server.set("key", "värde")
    assert server.get("key") == "värde"  # set() has no answer: only the same line's next call comes surely after it
    assert client.get("key") == "värde"
    with pytest.raises(StoreLostError):
        TorchStore("localhost", port, serve=True)
    del server
    with pytest.raises(StoreLostError):
        client.get("key")


def test_the_grace_periods_nest_at_least_two_seconds_apart() -> None:
    timing = Timing()
    container = {
        float(seconds)
        for seconds in re.findall(
            r"(?:docker stop -t|--stop-timeout) (\d+)", (ROOT / "launcher/services/compute/startup.sh").read_text()
        )
    }
    assert container == {contract.CONTAINER_SECONDS}
    assert timing.grace + timing.last <= contract.CONTAINER_SECONDS
    assert GRACE_SECONDS == contract.NOTICE_SECONDS
    nested = (contract.SAVE_SECONDS, timing.grace - timing.report, timing.grace, *container, GRACE_SECONDS)
    assert min(outer - inner for inner, outer in pairwise(nested)) >= 2
    assert timing.grace - timing.report > LAST_SECONDS + 1


def test_a_thousand_nodes_look_less_often() -> None:
    assert Timing().of(2).tick == Timing().tick
    assert Timing().of(1000).tick > 0.5
