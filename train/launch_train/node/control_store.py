"""The control store: how the nodes of a run coordinate, and who writes what.

Each key has one writer, so nothing needs a lock:

    state         coordinator        wait:G | run:G | stop:G | end:G
    order/G       coordinator        what generation G is: attempt, port, members
    end           coordinator        exit code and reason
    beat/N        node N             INCARNATION:COUNTER, about once a second
    outcome/G/N   node N             how G ended there, after its processes have exited
    left/N        node N             it has read the end
    alarm         any node           the end that a node requests (unfit, or signalled while waiting)

With one node the store is a dict and torch isn't imported; everything else is the same code.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from queue import SimpleQueue

from launch_train.common import contract
from launch_train.node.exit_status import End, Outcome


@dataclass(frozen=True)
class Timing:
    """All intervals and limits of the node, in seconds."""

    tick: float = 0.02
    """Poll interval of the processes and the store."""
    beat: float = 1.0
    lost: float = 30.0
    """A node without a heartbeat for this long is lost."""
    gather: float = 900.0
    """Time limit of waiting for missing nodes: a replaced machine takes minutes to start."""
    line: float = 30.0
    """Interval of the lines about what is being waited for."""
    grace: float = contract.NODE_SECONDS
    """Grace period from SIGTERM to SIGKILL; longer after a notice of more than contract.NOTICE_SECONDS."""
    report: float = contract.NODE_SECONDS - contract.TORCHRUN_SECONDS
    """torchrun has this much less."""
    quick: float = 30.0
    """A generation that fails sooner, twice in the same way and before its first step, is not restarted."""
    leave: float = 5.0
    """Time limit of waiting for the coordinator, on a node that must stop."""
    last: float = contract.CONTAINER_SECONDS - contract.NODE_SECONDS
    """Time to upload text and leftovers after the processes of a node that must stop have exited; together with `grace`
    it is what a container gets."""
    settle: float = 3.0
    """Time that the other nodes' processes get to exit by themselves once one node's have saved and left."""
    retry: float = 600.0
    """Time for which an unreachable run folder is retried before a generation, every `retry_every` seconds."""
    retry_every: float = 5.0
    ask: float = 10.0
    """Time limit of one storage call while a node gets ready: it checks for signals only in between."""
    early: float = 10.0
    """Time to upload leftovers of an earlier start before the first generation."""
    sweep: float = 20.0
    """Time to upload leftovers between two generations."""
    final: float = 300.0
    """Time to upload leftovers at the end of a run that was not stopped."""
    text: float = 5.0
    """Interval of the parts of the text output."""
    text_last: float = 60.0
    """Time to upload the last part at the end of a run that was not stopped; after any run it is at least
    `text_least`."""
    text_least: float = 0.5

    def of(self, size: int) -> Timing:
        """Return the timing for `size` nodes: a single node can't be lost, and a thousand must not overload the
        store."""
        if size == 1:
            return replace(self, lost=math.inf)
        return replace(self, tick=self.tick * max(1.0, size / 32))


class StoreLostError(ConnectionError):
    """The store is unreachable: node 0's agent has exited."""


class Store:
    """The key-value store that all nodes see; this one is that of a run with a single node. Raises StoreLostError."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        """Return the value, or None."""
        return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        """Set a value. Others may see it a moment later, because TCPStore sends no reply."""
        self._values[key] = value


class TorchStore(Store):
    """torch's TCPStore: node 0 serves it, the others connect."""

    def __init__(self, host: str, port: int, *, serve: bool, timeout: float = 20.0) -> None:
        # TCPStore's own warnings print a C++ stack trace for each node that is late or exits.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it, untyped

        limit = timedelta(seconds=timeout)
        try:
            self._store = TCPStore(host, port, None, serve, limit, wait_for_workers=False)
        except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
            raise StoreLostError(str(error).splitlines()[0]) from error

    def get(self, key: str) -> str | None:
        try:
            # get() would block on a missing key; no key is ever deleted.
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise StoreLostError(str(error).splitlines()[0]) from error

    def set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise StoreLostError(str(error).splitlines()[0]) from error


@dataclass(frozen=True)
class GenerationSpec:
    """One generation: what all nodes start together."""

    generation: int
    attempt: int
    port: int
    members: tuple[str, ...]
    args: tuple[str, ...] = ()
    """Arguments that a script gets besides its own, to resume from its newest checkpoint."""

    @classmethod
    def from_json(cls, text: str) -> GenerationSpec:
        values = json.loads(text)
        return cls(**{**values, "members": tuple(values["members"]), "args": tuple(values["args"])})


@dataclass(frozen=True)
class State:
    """The coordinator's instruction: `wait`, `run`, `stop` (the generation) or `end`; `lost` if it is unreachable."""

    phase: str
    generation: int = -1
    order: GenerationSpec | None = None
    end: End | None = None


class Member:
    """One node's connection to the store, served by a thread: the network never blocks the main thread.

    An incarnation is one connection: a node that was replaced, or that reconnected, is a new one.
    """

    def __init__(self, store: Store, node: int, timing: Timing) -> None:
        self.node = node
        self.incarnation = uuid.uuid4().hex[:8]
        self._store = store
        self._timing = timing
        self._state = State("wait")
        self._seen = time.monotonic()
        self._outbox: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="control", daemon=True)
        self._thread.start()

    def state(self) -> State:
        """Return the newest known state."""
        silent = time.monotonic() - self._seen > self._timing.lost
        return State("lost") if silent and self._state.phase != "end" else self._state

    def belongs(self, order: GenerationSpec) -> bool:
        """Return whether an order is for this connection, not for an earlier one of this node."""
        return order.members[self.node] == self.incarnation

    def runs(self, order: GenerationSpec) -> bool:
        """Return whether all nodes still run that generation, as far as this node knows."""
        state = self.state()
        return state.phase == "run" and state.generation == order.generation

    def report(self, generation: int, outcome: Outcome) -> None:
        """Report how a generation ended here."""
        self._outbox.put((f"outcome/{generation}/{self.node}", json.dumps(asdict(outcome))))

    def alarm(self, end: End) -> None:
        """Request the end of the run on all nodes."""
        self._outbox.put(("alarm", json.dumps(asdict(end))))

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued and disconnect; wait up to `seconds` for a store that doesn't respond."""
        self._closed.set()
        self._thread.join(timeout=seconds)

    def _listen(self) -> None:
        count, beaten = 0, float("-inf")
        try:
            while not self._closed.wait(self._timing.tick):
                self._send()  # first: an alarm must arrive before this node counts as present
                if time.monotonic() - beaten >= self._timing.beat:
                    count, beaten = count + 1, time.monotonic()
                    self._store.set(f"beat/{self.node}", f"{self.incarnation}:{count}")
                self._state, self._seen = self._read_state(), time.monotonic()
            self._send()
        except StoreLostError:
            self._state = self._state if self._state.phase == "end" else State("lost")

    def _send(self) -> None:
        while not self._outbox.empty():
            self._store.set(*self._outbox.get())

    def _read_state(self) -> State:
        phase, _, generation = (self._store.get("state") or "wait:-1").partition(":")
        if (phase, int(generation)) == (self._state.phase, self._state.generation):
            return self._state
        if phase == "run":
            order = GenerationSpec.from_json(self._store.get(f"order/{generation}") or "")
            return State(phase, int(generation), order=order)
        if phase == "end":
            end = End(**json.loads(self._store.get("end") or ""))
            with suppress(StoreLostError):  # node 0 exits at this message; the end has been read
                self._store.set(f"left/{self.node}", self.incarnation)
            return State(phase, int(generation), end=end)
        return State(phase, int(generation))


class HeartbeatMonitor:
    """Detects which nodes are present, by their heartbeats. Clock and store are arguments."""

    def __init__(self, store: Store, size: int, lost: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._size = size
        self._lost = lost
        self._clock = clock
        self._beats: dict[int, tuple[str, float]] = {}
        self._checked = clock()

    def members(self) -> dict[int, str]:
        """Return the incarnations of the present nodes, by node."""
        now = self._clock()
        if now - self._checked > self._lost / 3:  # this machine was suspended: the others aren't late
            self._beats = {node: (beat, now) for node, (beat, _) in self._beats.items()}
        self._checked = now
        for node in range(self._size):
            beat = self._store.get(f"beat/{node}")
            if beat and beat != self._beats.get(node, ("", 0.0))[0]:
                self._beats[node] = (beat, now)
        return {node: beat.partition(":")[0] for node, (beat, when) in self._beats.items() if now - when <= self._lost}


def reserve_port() -> tuple[socket.socket, int]:
    """Return a free TCP port, and the socket that reserves it while it is open.

    It is bound but not listening, with SO_REUSEADDR: Linux doesn't assign the port to others, while a server that names
    it and sets SO_REUSEADDR too (torch's does) may listen on it. So no start fails with "address in use".
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved, int(reserved.getsockname()[1])
