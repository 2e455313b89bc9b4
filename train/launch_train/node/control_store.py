"""How the nodes of a run act as one: a small store on node 0, and who writes what into it.

Each key has one writer, so nothing needs a lock:

    state         node 0's referee   wait:G | run:G | stop:G | end:G
    order/G       the referee        what generation G is: attempt, port, members
    end           the referee        exit code and reason
    beat/N        node N             INCARNATION:COUNTER, about once a second
    outcome/G/N   node N             how G ended there, after its processes are gone
    left/N        node N             it has read the end
    alarm         any node           an end that a node asks for (not fit, told to stop while it waited)

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
from typing import Any, Protocol

from launch_train.common.faults import Fault
from launch_train.node.exit_status import End, Outcome


@dataclass(frozen=True)
class Timing:
    """All the clocks of the node, in seconds."""

    tick: float = 0.02
    """Between two looks at the processes and at the store."""
    beat: float = 1.0
    lost: float = 30.0
    """A node that has been silent for so long is gone."""
    gather: float = 900.0
    """How long to wait for a node that isn't there (yet): a replaced machine takes minutes to start."""
    line: float = 30.0
    """Between two lines that say what is being waited for."""
    grace: float = 22.0
    """From SIGTERM to SIGKILL. Graces nest, so that no outer one kills an inner one which still reports: torchrun has
    `report` less, the container of a VM 25 s, and Vertex AI and Spot VMs give 30 s."""
    report: float = 4.0
    quick: float = 30.0
    """A generation that fails sooner, twice alike and before its first step, fails each time."""
    leave: float = 5.0
    """How long a node that was told to stop waits for the others' word."""
    last: float = 3.0
    """What a node that was told to stop may still send of its text and of what dead processes left, after they have
    gone; with `grace` it is what a container gives."""
    settle: float = 3.0
    """When one node's processes have saved and left: what the others' get to end by themselves before they are told."""
    patience: float = 600.0
    """How long a run folder that can't be reached is tried again before a generation, every `again` seconds."""
    again: float = 5.0
    ask: float = 10.0
    """What one call may take of a node that gets ready: it looks at signals only between two."""
    early: float = 10.0
    """How long to send what a start before this one left, before the first generation."""
    sweep: float = 20.0
    """How long to send what dead processes left, between two generations."""
    final: float = 300.0
    """How long to send that at the end of a run that nobody has stopped."""
    text: float = 5.0
    """Between two parts of the text."""
    text_last: float = 60.0
    """How long its last part may take at the end of a run that nobody has stopped; at the end of any run it may take
    `text_least`."""
    text_least: float = 0.5

    def of(self, size: int) -> Timing:
        """For a run of `size` nodes: a node alone can't be lost, and a thousand must not drown the store."""
        if size == 1:
            return replace(self, lost=math.inf)
        return replace(self, tick=self.tick * max(1.0, size / 32))


class StoreLostError(ConnectionError):
    """The store doesn't answer: node 0's launch_train.node is gone."""


class Store(Protocol):
    """A key-value store that all nodes see."""

    def get(self, key: str) -> str | None:
        """The value, or None; raises StoreLostError."""

    def set(self, key: str, value: str) -> None:
        """Write it; others may see it a moment later, for TCPStore sends no answer. Raises StoreLostError."""


class MemoryStore:
    """The store of a run with one node."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        """The value, or None."""
        return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        """Write it."""
        self._values[key] = value


class TorchStore:
    """torch's TCPStore: `serve` on node 0, `connect` on the others."""

    def __init__(self, host: str, port: int, *, serve: bool, timeout: float = 20.0) -> None:
        # Its own warnings would put a C++ stack trace on the screen for each node that comes late or goes.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it, untyped

        limit = timedelta(seconds=timeout)
        try:
            self._store = TCPStore(host, port, None, serve, limit, wait_for_workers=False)
        except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
            raise StoreLostError(str(error).splitlines()[0]) from error

    def get(self, key: str) -> str | None:
        """The value, or None; raises StoreLostError."""
        try:
            # get() alone would wait for a key that isn't there; no key is ever deleted.
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise StoreLostError(str(error).splitlines()[0]) from error

    def set(self, key: str, value: str) -> None:
        """Write it; raises StoreLostError."""
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise StoreLostError(str(error).splitlines()[0]) from error


@dataclass(frozen=True)
class Order:
    """One generation: what all nodes start together."""

    generation: int
    attempt: int
    port: int
    members: tuple[str, ...]

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Back again."""
        values = json.loads(text)
        return cls(**{**values, "members": tuple(values["members"])})


@dataclass(frozen=True)
class State:
    """What the referee wants now: `wait`, `run`, `stop` (the generation) or `end`; `lost` when it can't be asked."""

    phase: str
    generation: int = -1
    order: Order | None = None
    end: End | None = None


class Member:
    """One node's line to the store, kept by a thread: the main thread is never held up by the network.

    An incarnation is one line: a node that was replaced, or that lost its line and found it again, is another one.
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
        """The newest that is known."""
        silent = time.monotonic() - self._seen > self._timing.lost
        return State("lost") if silent and self._state.phase != "end" else self._state

    def belongs(self, order: Order) -> bool:
        """Whether this line, and not one before it, is meant by an order."""
        return order.members[self.node] == self.incarnation

    def runs(self, order: Order) -> bool:
        """Return whether all nodes still run that generation, as far as this node knows."""
        state = self.state()
        return state.phase == "run" and state.generation == order.generation

    def report(self, generation: int, outcome: Outcome) -> None:
        """Say how a generation ended here."""
        self._outbox.put((f"outcome/{generation}/{self.node}", json.dumps(asdict(outcome))))

    def alarm(self, end: End) -> None:
        """Ask for the end of the run on all nodes."""
        self._outbox.put(("alarm", json.dumps(asdict(end))))

    def close(self, seconds: float = 2.0) -> None:
        """Send what is left and let the line go; a store that doesn't answer is waited for so long."""
        self._closed.set()
        self._thread.join(timeout=seconds)

    def _listen(self) -> None:
        count, beaten = 0, float("-inf")
        try:
            while not self._closed.wait(self._timing.tick):
                self._send()  # first: an alarm must be there before this node counts as present
                if time.monotonic() - beaten >= self._timing.beat:
                    count, beaten = count + 1, time.monotonic()
                    self._store.set(f"beat/{self.node}", f"{self.incarnation}:{count}")
                self._state, self._seen = self._look(), time.monotonic()
            self._send()
        except StoreLostError:
            self._state = self._state if self._state.phase == "end" else State("lost")

    def _send(self) -> None:
        while not self._outbox.empty():
            self._store.set(*self._outbox.get())

    def _look(self) -> State:
        phase, _, generation = (self._store.get("state") or "wait:-1").partition(":")
        if (phase, int(generation)) == (self._state.phase, self._state.generation):
            return self._state
        if phase == "run":
            order = Order.from_json(self._store.get(f"order/{generation}") or "")
            return State(phase, int(generation), order=order)
        if phase == "end":
            end = End(**json.loads(self._store.get("end") or ""))
            with suppress(StoreLostError):  # node 0 leaves at this word; the end has been read
                self._store.set(f"left/{self.node}", self.incarnation)
            return State(phase, int(generation), end=end)
        return State(phase, int(generation))


class Pulse:
    """Which nodes are there, told by their beats. Clock and store are arguments."""

    def __init__(self, store: Store, size: int, lost: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._size = size
        self._lost = lost
        self._clock = clock
        self._beats: dict[int, tuple[str, float]] = {}
        self._looked = clock()

    def members(self) -> dict[int, str]:
        """Node -> incarnation of the nodes that are there now."""
        now = self._clock()
        if now - self._looked > self._lost / 3:  # it is we who were away (a suspended machine): no one can be blamed
            self._beats = {node: (beat, now) for node, (beat, _) in self._beats.items()}
        self._looked = now
        for node in range(self._size):
            beat = self._store.get(f"beat/{node}")
            if beat and beat != self._beats.get(node, ("", 0.0))[0]:
                self._beats[node] = (beat, now)
        return {node: beat.partition(":")[0] for node, (beat, when) in self._beats.items() if now - when <= self._lost}


def reserve_port() -> tuple[socket.socket, int]:
    """A free TCP port, and the socket that keeps it free while it is open.

    Bound but not listening, with SO_REUSEADDR: Linux gives the port to nobody who asks for any port, while a server
    that names it and sets SO_REUSEADDR too (torch's does) may listen on it. So no start is lost to "address in use".
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held, int(held.getsockname()[1])


def decode_outcome(text: str) -> Outcome:
    """An outcome out of the store."""
    values: dict[str, Any] = json.loads(text)
    faults = tuple(Fault(*fault) for fault in values["faults"])
    return Outcome(**{**values, "marks": tuple(values["marks"]), "faults": faults})
