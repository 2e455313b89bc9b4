"""Alerts from a node's samples: problems that the user should know at once, one line each, printed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from launch_train.telemetry.rows import Row


class Xid(NamedTuple):
    """A driver error: its meaning, what to do, and whether results may be wrong (`doubtful`)."""

    meaning: str
    advice: str
    doubtful: bool = False


_MACHINE = "replace the machine"
_PROGRAM = "usually a bug in the program; if it recurs on this GPU only, a fault of the GPU"
XIDS: Final = {
    13: Xid("an exception in a kernel", _PROGRAM),
    31: Xid("a kernel accessed invalid memory", _PROGRAM),
    43: Xid("the GPU stopped processing for one program", _PROGRAM),
    45: Xid("work was cancelled after another error, or at the end of a program", "see the error before it"),
    46: Xid("the GPU stopped processing", f"the GPU needs a reset: {_MACHINE}"),
    48: Xid("an uncorrectable memory error", f"the GPU needs a reset: {_MACHINE}", doubtful=True),
    62: Xid("the GPU's power controller halted", f"the GPU needs a reset: {_MACHINE}"),
    63: Xid("a faulty memory row will be replaced at the next reset", "no action needed now"),
    64: Xid("a faulty memory row could not be replaced", f"the GPU needs a reset: {_MACHINE}", doubtful=True),
    74: Xid("an NVLink error", f"if it recurs, {_MACHINE}", doubtful=True),
    79: Xid("the GPU has fallen off the bus", f"it returns only after a reboot: {_MACHINE}"),
    92: Xid("many memory errors, all corrected", "no action needed now"),
    94: Xid("an uncorrectable memory error of this program alone", "restart from a checkpoint", doubtful=True),
    95: Xid("an uncorrectable memory error that may affect any program", _MACHINE, doubtful=True),
    109: Xid("the GPU failed to switch between programs", f"the GPU needs a reset: {_MACHINE}"),
    119: Xid("the GPU's system processor (GSP) did not respond", f"the GPU needs a reset: {_MACHINE}"),
    120: Xid("an error of the GPU's system processor (GSP)", f"the GPU needs a reset: {_MACHINE}"),
    **dict.fromkeys(range(144, 151), Xid("an NVLink error", f"if it recurs, {_MACHINE}", doubtful=True)),
    140: Xid(
        "an uncorrectable memory error that was not contained", f"the GPU needs a reset: {_MACHINE}", doubtful=True
    ),
    171: Xid("an uncorrectable error of its memory", f"look for Xid 94 or 95; else {_MACHINE}", doubtful=True),
    172: Xid("an uncorrectable error of its caches", f"look for Xid 94 or 95; else {_MACHINE}", doubtful=True),
}
"""Xid errors that can occur in a training run, by number
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)."""

UNKNOWN: Final = Xid("see NVIDIA's list of Xid errors", "docs.nvidia.com/deploy/xid-errors")

THROTTLE_REASONS: Final = {
    "hw_slowdown": "hardware slowdown",
    "sw_thermal": "too hot",
    "hw_thermal": "far too hot",
    "hw_power_brake": "power brake from the machine's power supply",
}
"""Throttle reasons that a healthy machine doesn't have. (A GPU at its own power limit is at full load.)"""

MIN_THROTTLED_SHARE, MIN_SAMPLES = 0.1, 12
"""A GPU that is throttled in more than this share of its samples is reported, after at least so many samples."""

IDLE_SHARE, IDLE_SECONDS, FIRST_SECONDS = 0.1, 300.0, 1200.0
"""A GPU busy for less than this share of the time is idle. Compiling an evaluation, or a save, may take minutes; before
the first step a checkpoint may be downloaded and the whole model compiled."""
RAM_SHARE, DISK_SHARE, DISK_GB = 0.95, 0.05, 5.0
"""Alert above this share of the memory; below this share of the disk, and 5 GB at most: a large disk has room then."""
SILENT_SECONDS: Final = 30.0


class Alert(NamedTuple):
    """A line for the log, and optionally an event for the run's metrics. `about`: GPUs, memory, disk or driver."""

    line: str
    event: Row | None = None
    about: str = "GPUs"


@dataclass
class Alerts:
    """The alerts of one node. Remembers which were reported."""

    node: int
    _reported: set[str] = field(default_factory=set)
    _samples: Counter[int] = field(default_factory=Counter)
    _throttled: Counter[tuple[int, str]] = field(default_factory=Counter)
    _worked: set[int] = field(default_factory=set)
    _busy: dict[int, float] = field(default_factory=dict)
    _ecc: dict[int, int] = field(default_factory=dict)

    def check(self, row: Row) -> list[Alert]:
        """Return the new alerts in one sample (a row of launch_train.monitoring.monitor)."""
        alerts = [*self._of_host(row.get("host", {}))]
        for gpu in row.get("gpus", ()):
            alerts += [*self._errors(gpu), *self._heat(gpu), *self._idle(gpu, row["time"])]
        return alerts

    def check_driver(self, seconds: float) -> list[Alert]:
        """Return an alert if a driver call has been blocked for SILENT_SECONDS."""
        if seconds < SILENT_SECONDS:
            return []
        line = f"the NVIDIA driver has not responded for {seconds:.0f} s; it may hang"
        return [*self._once("silent", line, about="driver")]

    def _once(self, key: str, line: str, about: str = "GPUs") -> Iterator[Alert]:
        if key not in self._reported:
            self._reported.add(key)
            yield Alert(f"node {self.node}: {line}", about=about)

    def _of_host(self, host: Row) -> Iterator[Alert]:
        used, limit = host.get("ram_gb", 0.0), host.get("ram_limit_gb", 0.0)
        if used > RAM_SHARE * limit > 0:
            line = f"{used:.1f} of {limit:.1f} GB of memory in use; at the limit it is killed"
            yield from self._once("ram", line, about="memory")
        free, whole = host.get("disk_free_gb"), host.get("disk_gb")
        if free is not None and whole and free < min(DISK_SHARE * whole, DISK_GB):
            line = f"the disk is nearly full: {free:.1f} of {whole:.1f} GB free"
            yield from self._once("disk", line, about="disk")

    def _errors(self, gpu: Row) -> Iterator[Alert]:
        """Yield an alert per error; a repeated Xid is a new error."""
        name = _gpu_name(gpu)
        for number in gpu.get("xid", ()):
            xid = XIDS.get(number, UNKNOWN)
            line = f"node {self.node}, {name}: Xid {number}: {xid.meaning} ({xid.advice})"
            yield Alert(line, self._event(gpu, xid=number, meaning=xid.meaning, doubtful=xid.doubtful))
        if gpu.get("lost"):
            for alarm in self._once(f"lost {name}", f"{name} is lost: it returns only after a reboot of the machine"):
                yield alarm._replace(event=self._event(gpu, lost=True, meaning="the GPU is lost", doubtful=False))
        yield from self._memory_errors(gpu)

    def _memory_errors(self, gpu: Row) -> Iterator[Alert]:
        """Yield an alert for errors since the first sample; the node's health check has reported earlier ones."""
        errors = gpu.get("ecc_uncorrected")
        if errors is None:
            return
        before = self._ecc.setdefault(gpu["gpu"], errors)
        self._ecc[gpu["gpu"]] = errors
        if errors > before:
            what = f"{errors - before} uncorrectable memory errors"
            line = f"node {self.node}, {_gpu_name(gpu)}: {what}; its results may be wrong ({_MACHINE})"
            yield Alert(line, self._event(gpu, ecc_uncorrected=errors - before, meaning=what, doubtful=True))

    def _event(self, gpu: Row, **fields: object) -> Row:
        return {"node": self.node, "gpu": gpu["gpu"], **fields}

    def _heat(self, gpu: Row) -> Iterator[Alert]:
        index = gpu["gpu"]
        if "throttle" not in gpu:
            return
        self._samples[index] += 1
        for reason in THROTTLE_REASONS.keys() & set(gpu["throttle"]):
            self._throttled[index, reason] += 1
            share = self._throttled[index, reason] / self._samples[index]
            if self._samples[index] >= MIN_SAMPLES and share > MIN_THROTTLED_SHARE:
                line = f"{_gpu_name(gpu)} is throttled {share:.0%} of the time: {THROTTLE_REASONS[reason]} ({reason})"
                yield from self._once(f"{reason} {index}", line)

    def _idle(self, gpu: Row, now: float) -> Iterator[Alert]:
        """Yield an alert for an idle GPU: a peer may have failed, or the data loader may hang."""
        index = gpu["gpu"]
        if "util" not in gpu:
            return
        if gpu["util"] >= IDLE_SHARE:
            self._worked.add(index)
            self._busy[index] = now
            return
        limit = IDLE_SECONDS if index in self._worked else FIRST_SECONDS
        if now - self._busy.setdefault(index, now) >= limit:
            yield from self._once(f"idle {index}", f"{_gpu_name(gpu)} has been idle for {limit / 60:.0f} minutes")


def _gpu_name(gpu: Row) -> str:
    return "a GPU" if gpu["gpu"] is None else f"GPU {gpu['gpu']}"
