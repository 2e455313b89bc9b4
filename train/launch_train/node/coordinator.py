"""The one who decides: a thread on node 0 that starts generations, watches them and says how the run ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.errors import OutputError, TrainError
from launch_train.node.control_store import Order, Pulse, Store, Timing, decode_outcome, reserve_port
from launch_train.node.exit_status import End, Outcome, decided, exhausted, own_failure, recurring
from launch_train.node.retry import patiently
from launch_train.node.run_record import Record

Say = Callable[[str], None]
T = TypeVar("T")


class _EndedError(TrainError):
    """A node asked for the end while the run folder was waited for."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


class Referee:
    """Runs the generations of one attempt, from the first rendezvous to the last node's leave."""

    def __init__(
        self, store: Store, record: Record, *, attempt: int, size: int, restarts: int, timing: Timing, say: Say
    ) -> None:
        self._store = store
        self._record = record
        self._attempt = attempt
        self._size = size
        self._restarts = restarts
        self._timing = timing
        self._say = say
        self._pulse = Pulse(store, size, timing.lost)
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="referee", daemon=True)

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until every node has read the end (node 0 leaves last); whether that is still to come."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        end = End(Exit.FAILED, "the referee itself failed, which is a fault of launch")
        try:
            end = self._play()
            if end.terminal:
                self._forbid(end)
        except _EndedError as error:
            end = error.end
        except TrainError as error:
            end = End(error.exit, str(error))
        finally:  # whatever happens here, no node may wait for ever
            self._finish(end)

    def _play(self) -> End:
        code, last = None, list[Outcome]()
        while True:
            here = self._gather()
            if isinstance(here, End):
                return here
            checkpoint = self._patiently(self._record.newest_checkpoint)
            generation = self._patiently(lambda: self._record.next_generation(self._attempt))
            self._patiently(partial(self._record.write_generation, self._attempt, generation))
            members = self._gather()  # again: one may have been replaced while the run folder was waited for
            if isinstance(members, End):
                return members
            began, before = time.monotonic(), code
            outcomes = self._generation(generation, members)
            if isinstance(outcomes, End):
                return outcomes
            if end := decided(outcomes):  # without a look at the run folder, which may be slow when time is short
                return end
            durable = self._patiently(self._record.newest_checkpoint) > checkpoint
            self._failures = 1 if durable else self._failures + 1
            stillborn = not durable and time.monotonic() - began < self._timing.quick
            code = self._stillborn(outcomes, generation) if stillborn else None
            hopeless = code is not None and code == before
            again, last = recurring(last, outcomes), outcomes
            if end := exhausted(
                outcomes, failures=self._failures, restarts=self._restarts, hopeless=hopeless, again=again
            ):
                return end
            bad = ", ".join(str(outcome) for outcome in outcomes if not outcome.ok)
            self._say(f"{bad}; starting again ({self._failures} of {self._restarts} since the last checkpoint)")

    def _stillborn(self, outcomes: list[Outcome], generation: int) -> int | None:
        """The exit code of a command that failed by itself before the first step; None if there is none."""
        code = own_failure(outcomes)
        if code is None or self._patiently(lambda: self._record.has_steps(self._attempt, generation)):
            return None
        return code

    def _patiently(self, ask: Callable[[], T]) -> T:
        return patiently(ask, (OutputError, OSError), self._timing, self._say, self._pause)

    def _pause(self, seconds: float) -> None:
        """Wait, unless a node asks for the end meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if alarm := self._alarm():
                raise _EndedError(alarm)
            time.sleep(self._timing.tick)

    def _forbid(self, end: End) -> None:
        """Write `terminal`. Where that can't be done, the reason for the end is still worth more than this one."""
        try:
            self._patiently(lambda: self._record.write_terminal(end.reason))
        except TrainError as error:
            self._say(f"{contract.TERMINAL} could not be written ({error}): don't start this run again")

    def _gather(self) -> tuple[str, ...] | End:
        """The incarnations of all nodes, once they are all there."""
        start = said = time.monotonic()
        while len(members := self._pulse.members()) < self._size:
            missing = ", ".join(str(node) for node in range(self._size) if node not in members)
            if alarm := self._alarm():
                return alarm
            if time.monotonic() - start > self._timing.gather:
                return End(Exit.FAILED, f"node {missing} did not come within {self._timing.gather:.0f} s")
            if time.monotonic() - said >= self._timing.line:
                said = time.monotonic()
                self._say(f"waiting for node {missing} ({said - start:.0f} s)")
            time.sleep(self._timing.tick)
        return self._alarm() or tuple(members[node] for node in range(self._size))

    def _generation(self, generation: int, members: tuple[str, ...]) -> list[Outcome] | End:
        """Start one, and wait until it is over on every node."""
        held, port = reserve_port()
        with held:
            order = Order(generation, self._attempt, port, members)
            self._store.set(f"order/{generation}", json.dumps(asdict(order)))
            self._store.set("state", f"run:{generation}")
            return self._watch(order)

    def _watch(self, order: Order) -> list[Outcome] | End:
        """The outcomes of all nodes; the first that isn't good stops the others."""
        outcomes: dict[int, Outcome] = {}
        stopping, since = False, float("inf")
        while len(outcomes := outcomes | self._news(order, outcomes)) < self._size:
            if alarm := self._alarm():  # after the news: it can't undo what is done
                return alarm
            bad = [outcome for outcome in outcomes.values() if not outcome.ok]
            since = min(since, time.monotonic()) if bad else since
            # Who has saved and left did so together with all: the others are on their way, and may end by themselves.
            patience = self._timing.settle if all(outcome.preempted for outcome in bad) else 0.0
            if bad and not stopping and time.monotonic() - since >= patience:
                stopping = True
                self._store.set("state", f"stop:{order.generation}")
            time.sleep(self._timing.tick)
        return [outcomes[node] for node in range(self._size)]

    def _news(self, order: Order, known: dict[int, Outcome]) -> dict[int, Outcome]:
        """Outcomes that came in since, those of nodes that are gone included."""
        present = self._pulse.members()
        news: dict[int, Outcome] = {}
        for node in range(self._size):
            if node in known:
                continue
            if text := self._store.get(f"outcome/{order.generation}/{node}"):
                news[node] = decode_outcome(text)
            elif present.get(node) != order.members[node]:
                gone = "was replaced" if node in present else f"was silent for {self._timing.lost:.0f} s"
                news[node] = Outcome(node, code=1, note=gone)
        return news

    def _alarm(self) -> End | None:
        text = self._store.get("alarm")
        return End(**json.loads(text)) if text else None

    def _finish(self, end: End) -> None:
        """Publish the end and wait until all nodes have read it, those too that come late to a start that failed."""
        self._store.set("end", json.dumps(asdict(end)))
        self._store.set("state", "end:0")
        deadline = time.monotonic() + self._timing.lost
        while time.monotonic() < deadline and not all(self._store.get(f"left/{node}") for node in range(self._size)):
            time.sleep(self._timing.tick)
