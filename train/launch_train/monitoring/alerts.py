"""What in a node's looks the user should know at once: each as one line, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from launch_train.telemetry.rows import Row


class Xid(NamedTuple):
    """An error that the driver reports: what it means, what to do, and whether numbers may have become wrong."""

    meaning: str
    advice: str
    doubtful: bool = False


_MACHINE = "take another machine"
_PROGRAM = "most often the program's own fault; elsewhere on the same GPU again, the GPU's"
XIDS: Final = {
    13: Xid("an exception in a kernel", _PROGRAM),
    31: Xid("a kernel touched memory that isn't its own", _PROGRAM),
    43: Xid("the GPU stopped working for one program", _PROGRAM),
    45: Xid("work was removed after another error, or at the end of a program", "look for the error before it"),
    46: Xid("the GPU stopped processing", f"the GPU needs a reset: {_MACHINE}"),
    48: Xid("an uncorrectable memory error", f"the GPU needs a reset: {_MACHINE}", doubtful=True),
    62: Xid("the GPU's power controller halted", f"the GPU needs a reset: {_MACHINE}"),
    63: Xid("a broken row of its memory will be replaced at the next reset", "nothing now"),
    64: Xid("a broken row of its memory could not be replaced", f"the GPU needs a reset: {_MACHINE}", doubtful=True),
    74: Xid("an error of an NVLink", f"if it comes again, {_MACHINE}", doubtful=True),
    79: Xid("the GPU has fallen off the bus", f"only a restart of the machine brings it back: {_MACHINE}"),
    92: Xid("many memory errors, all of them corrected", "nothing now"),
    94: Xid("an uncorrectable memory error of this program alone", "start again from a checkpoint", doubtful=True),
    95: Xid("an uncorrectable memory error that may have met any program", _MACHINE, doubtful=True),
    109: Xid("the GPU could not change from one program to another", f"the GPU needs a reset: {_MACHINE}"),
    119: Xid("the GPU's own processor (GSP) did not answer", f"the GPU needs a reset: {_MACHINE}"),
    120: Xid("an error of the GPU's own processor (GSP)", f"the GPU needs a reset: {_MACHINE}"),
    **dict.fromkeys(range(144, 151), Xid("an error of an NVLink", f"if it comes again, {_MACHINE}", doubtful=True)),
    140: Xid(
        "an uncorrectable memory error that was not contained", f"the GPU needs a reset: {_MACHINE}", doubtful=True
    ),
    171: Xid("an uncorrectable error of its memory", f"look for Xid 94 or 95; else {_MACHINE}", doubtful=True),
    172: Xid("an uncorrectable error of its caches", f"look for Xid 94 or 95; else {_MACHINE}", doubtful=True),
}
"""By number; those that a training run can meet
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)."""

UNKNOWN: Final = Xid("see NVIDIA's list of Xid errors", "docs.nvidia.com/deploy/xid-errors")

HOT: Final = {
    "hw_slowdown": "its hardware protects itself",
    "sw_thermal": "it is too hot",
    "hw_thermal": "it is far too hot",
    "hw_power_brake": "the machine's power supply brakes it",
}
"""Throttle reasons that a healthy machine doesn't have. A GPU at its own power limit is none: that is full load."""

HOT_SHARE, HOT_LOOKS = 0.1, 12
"""A share of a GPU's looks that is worth a line, once there are so many."""

IDLE_SHARE, IDLE_SECONDS, FIRST_SECONDS = 0.1, 300.0, 1200.0
"""A GPU that is busy for less of the time has no work: an evaluation that is compiled, or a save, takes minutes. Before
its first work a checkpoint may come from a bucket, and the whole model be compiled."""
RAM_SHARE, DISK_SHARE = 0.95, 0.05
SILENT_SECONDS: Final = 30.0


class Alarm(NamedTuple):
    """A line for the log; `event`, where there is one, for the run's metrics."""

    line: str
    event: Row | None = None


@dataclass
class Alarms:
    """Of one node. Remembers what it has said."""

    node: int
    _said: set[str] = field(default_factory=set)
    _looks: Counter[int] = field(default_factory=Counter)
    _hot: Counter[tuple[int, str]] = field(default_factory=Counter)
    _worked: set[int] = field(default_factory=set)
    _busy: dict[int, float] = field(default_factory=dict)
    _ecc: dict[int, int] = field(default_factory=dict)

    def of(self, row: Row) -> list[Alarm]:
        """What is new in one look: see launch_train.monitoring.monitor."""
        found = [*self._of_host(row.get("host", {}))]
        for gpu in row.get("gpus", ()):
            found += [*self._errors(gpu), *self._heat(gpu), *self._idle(gpu, row["time"])]
        return found

    def silent(self, seconds: float) -> list[Alarm]:
        """The driver has not answered for so long."""
        if seconds < SILENT_SECONDS:
            return []
        return [*self._once("silent", f"the NVIDIA driver has not answered for {seconds:.0f} s: it may hang")]

    def _once(self, key: str, line: str) -> Iterator[Alarm]:
        if key not in self._said:
            self._said.add(key)
            yield Alarm(f"node {self.node}: {line}")

    def _of_host(self, host: Row) -> Iterator[Alarm]:
        used, limit = host.get("ram_gb", 0.0), host.get("ram_limit_gb", 0.0)
        if used > RAM_SHARE * limit > 0:
            yield from self._once("ram", f"{used:.1f} of {limit:.1f} GB of memory are in use: more, and it is killed")
        free, whole = host.get("disk_free_gb"), host.get("disk_gb")
        if free is not None and whole and free < DISK_SHARE * whole:
            yield from self._once("disk", f"the disk is nearly full: {free:.1f} of {whole:.1f} GB are free")

    def _errors(self, gpu: Row) -> Iterator[Alarm]:
        """Each of them: a second error isn't the first one again."""
        name = _name(gpu)
        for number in gpu.get("xid", ()):
            xid = XIDS.get(number, UNKNOWN)
            line = f"node {self.node}, {name}: Xid {number}: {xid.meaning} ({xid.advice})"
            yield Alarm(line, self._event(gpu, xid=number, meaning=xid.meaning, doubtful=xid.doubtful))
        if gpu.get("lost"):
            for alarm in self._once(f"lost {name}", f"{name} is lost: only a restart of the machine brings it back"):
                yield alarm._replace(event=self._event(gpu, lost=True, meaning="the GPU is lost", doubtful=False))
        yield from self._memory_errors(gpu)

    def _memory_errors(self, gpu: Row) -> Iterator[Alarm]:
        """Since the first look; what was there before, the node's checks have said."""
        errors = gpu.get("ecc_uncorrected")
        if errors is None:
            return
        before = self._ecc.setdefault(gpu["gpu"], errors)
        self._ecc[gpu["gpu"]] = errors
        if errors > before:
            what = f"{errors - before} uncorrectable memory errors"
            line = f"node {self.node}, {_name(gpu)}: {what}: its results are in doubt ({_MACHINE})"
            yield Alarm(line, self._event(gpu, ecc_uncorrected=errors - before, meaning=what, doubtful=True))

    def _event(self, gpu: Row, **fields: object) -> Row:
        return {"node": self.node, "gpu": gpu["gpu"], **fields}

    def _heat(self, gpu: Row) -> Iterator[Alarm]:
        index = gpu["gpu"]
        if "throttle" not in gpu:
            return
        self._looks[index] += 1
        for reason in HOT.keys() & set(gpu["throttle"]):
            self._hot[index, reason] += 1
            share = self._hot[index, reason] / self._looks[index]
            if self._looks[index] >= HOT_LOOKS and share > HOT_SHARE:
                line = f"{_name(gpu)} is slowed down {share:.0%} of the time: {HOT[reason]} ({reason})"
                yield from self._once(f"{reason} {index}", line)

    def _idle(self, gpu: Row, now: float) -> Iterator[Alarm]:
        """A peer that has gone, or a loader that hangs: in both cases someone should look."""
        index = gpu["gpu"]
        if "util" not in gpu:
            return
        if gpu["util"] >= IDLE_SHARE:
            self._worked.add(index)
            self._busy[index] = now
            return
        limit = IDLE_SECONDS if index in self._worked else FIRST_SECONDS
        if now - self._busy.setdefault(index, now) >= limit:
            yield from self._once(f"idle {index}", f"{_name(gpu)} has had next to no work for {limit / 60:.0f} minutes")


def _name(gpu: Row) -> str:
    return "a GPU" if gpu["gpu"] is None else f"GPU {gpu['gpu']}"
