"""The coordinator: a thread on node 0 that starts generations, watches them and decides how the run ends."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from launch_train import runfolder
from launch_train.common.contract import Exit
from launch_train.common.errors import OutputError, TrainError
from launch_train.node.control_store import (
    GenerationSpec,
    HeartbeatMonitor,
    Store,
    Timing,
    reserve_port,
)
from launch_train.node.exit_status import (
    End,
    Outcome,
    end_after_failure,
    end_from_outcomes,
    own_failure,
    recurring_fault,
)
from launch_train.node.own_checkpoints import Resume
from launch_train.node.run_record import RunRecord, retry_until

Say = Callable[[str], None]
T = TypeVar("T")


class _EndRequestedError(TrainError):
    """A node requested the end while waiting for the run folder."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


@dataclass(eq=False)
class Coordinator:
    """Runs the generations of one attempt, from the first rendezvous until the last node has left."""

    store: Store
    record: RunRecord
    attempt: int
    size: int
    restarts: int
    timing: Timing
    say: Say
    resume: Resume | None = None

    def __post_init__(self) -> None:
        self._pulse = HeartbeatMonitor(self.store, self.size, self.timing.lost)
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until every node has read the end, because node 0 leaves last. Returns whether the thread still runs."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        end = End(Exit.FAILED, "internal error in launch's coordinator")
        try:
            end = self._run_generations()
            if end.terminal:
                self._write_terminal(end)
        except _EndRequestedError as error:
            end = error.end
        except TrainError as error:
            end = End(error.exit, str(error))
        finally:  # whatever happens here, no node may wait forever
            self._finish(end)

    def _run_generations(self) -> End:
        code, last = None, list[Outcome]()
        while True:
            gathered = self._gather()
            if isinstance(gathered, End):
                return gathered
            checkpoint = self._retry(self.record.newest_checkpoint)
            own = self._retry(self.resume.newest) if self.resume else None
            args = self.resume.args_for(own) if self.resume and own else ()
            if own:
                self.say(f"resuming the script from {own.path}: {shlex.join(args)}")
            generation = self._retry(lambda: self.record.next_generation(self.attempt))
            # A replaced node 0 continues from there.
            self._retry(partial(self.record.write, runfolder.generation_record(self.attempt), f"{generation}\n"))
            members = self._gather()  # a node may have been replaced while the run folder was unreachable
            if isinstance(members, End):
                return members
            began, before = time.monotonic(), code
            outcomes = self._run_generation(generation, members, args)
            if isinstance(outcomes, End):
                return outcomes
            if end := end_from_outcomes(outcomes):  # without reading the run folder, which may be slow
                return end
            durable = self._retry(self.record.newest_checkpoint) > checkpoint
            if self.resume and (newer := self._retry(self.resume.newest)):
                durable = durable or newer.step > (own.step if own else -1)
            self._failures = 1 if durable else self._failures + 1
            # The exit code of a command that failed by itself, soon and before its first step.
            failed_early = not durable and time.monotonic() - began < self.timing.quick
            code = own_failure(outcomes) if failed_early else None
            if code is not None and self._retry(partial(self.record.has_steps, self.attempt, generation)):
                code = None
            failed_twice_early = code is not None and code == before
            repeated, last = recurring_fault(last, outcomes), outcomes
            if end := end_after_failure(
                outcomes,
                failures=self._failures,
                restarts=self.restarts,
                failed_twice_early=failed_twice_early,
                repeated=repeated,
            ):
                return end
            bad = ", ".join(str(outcome) for outcome in outcomes if not outcome.ok)
            self.say(f"{bad}; restarting ({self._failures} of {self.restarts} since the last checkpoint)")

    def _retry(self, ask: Callable[[], T]) -> T:
        return retry_until(ask, (OutputError, OSError), self.timing, self.say, self._pause)

    def _pause(self, seconds: float) -> None:
        """Wait. Raises _EndRequestedError if a node requests the end meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if alarm := self._alarm():
                raise _EndRequestedError(alarm)
            time.sleep(self.timing.tick)

    def _write_terminal(self, end: End) -> None:
        """Write `terminal`. If that fails, the reason for the end still matters more."""
        try:
            self._retry(lambda: self.record.write(runfolder.TERMINAL, f"{end.reason}\n"))
        except TrainError as error:
            self.say(f"{runfolder.TERMINAL} could not be written ({error}): do not start this run again")

    def _gather(self) -> tuple[str, ...] | End:
        """Wait for all nodes; return their incarnations."""
        start = reported = time.monotonic()
        while len(members := self._pulse.members()) < self.size:
            missing = ", ".join(str(node) for node in range(self.size) if node not in members)
            if alarm := self._alarm():
                return alarm
            if time.monotonic() - start > self.timing.gather:
                return End(Exit.FAILED, f"node {missing} did not join within {self.timing.gather:.0f} s")
            if time.monotonic() - reported >= self.timing.line:
                reported = time.monotonic()
                self.say(f"waiting for node {missing} ({reported - start:.0f} s)")
            time.sleep(self.timing.tick)
        return self._alarm() or tuple(members[node] for node in range(self.size))

    def _run_generation(self, generation: int, members: tuple[str, ...], args: tuple[str, ...]) -> list[Outcome] | End:
        """Start a generation, and wait until it has ended on every node."""
        reserved, port = reserve_port()
        with reserved:
            order = GenerationSpec(generation, self.attempt, port, members, args)
            self.store.set(f"order/{generation}", json.dumps(asdict(order)))
            self.store.set("state", f"run:{generation}")
            return self._watch(order)

    def _watch(self, order: GenerationSpec) -> list[Outcome] | End:
        """Wait for the outcomes of all nodes; the first bad one stops the others."""
        outcomes: dict[int, Outcome] = {}
        stopping, since = False, float("inf")
        while len(outcomes := outcomes | self._new_outcomes(order, outcomes)) < self.size:
            if alarm := self._alarm():  # after the outcomes, which it can't undo
                return alarm
            bad = [outcome for outcome in outcomes.values() if not outcome.ok]
            since = min(since, time.monotonic()) if bad else since
            # All ranks save and leave together, so the other nodes get time to exit by themselves.
            delay = self.timing.settle if all(outcome.preempted for outcome in bad) else 0.0
            if bad and not stopping and time.monotonic() - since >= delay:
                stopping = True
                self.store.set("state", f"stop:{order.generation}")
            time.sleep(self.timing.tick)
        return [outcomes[node] for node in range(self.size)]

    def _new_outcomes(self, order: GenerationSpec, known: dict[int, Outcome]) -> dict[int, Outcome]:
        """Return the outcomes that arrived since, with bad ones for nodes that are lost."""
        present = self._pulse.members()
        news: dict[int, Outcome] = {}
        for node in range(self.size):
            if node in known:
                continue
            if text := self.store.get(f"outcome/{order.generation}/{node}"):
                news[node] = Outcome.from_json(text)
            elif present.get(node) != order.members[node]:
                reason = "was replaced" if node in present else f"no heartbeat for {self.timing.lost:.0f} s"
                news[node] = Outcome(node, code=1, note=reason)
        return news

    def _alarm(self) -> End | None:
        text = self.store.get("alarm")
        return End(**json.loads(text)) if text else None

    def _finish(self, end: End) -> None:
        """Publish the end and wait until all nodes have read it, including those that join a failed start late."""
        self.store.set("end", json.dumps(asdict(end)))
        self.store.set("state", "end:0")
        deadline = time.monotonic() + self.timing.lost
        while time.monotonic() < deadline and not all(self.store.get(f"left/{node}") for node in range(self.size)):
            time.sleep(self.timing.tick)
