"""Sample this node's GPUs with NVML: utilisation, memory, temperature, power, clocks and errors.

Values that a GPU or its driver does not report (MIG, an old driver, a virtual GPU) are omitted. NVML's utilisation is
the share of time in which any kernel ran. https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from launch_train.monitoring.rates import Rates
from launch_train.telemetry.rows import Row

THROTTLES: Final = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlClocksEventReason…: reasons why the clocks are not higher."""

MOST_XIDS: Final = 64
"""Upper bound of events read per sample."""

Nvml = Any
"""The module pynvml, which has no type annotations."""


def open_gpus(environ: Mapping[str, str], nvml: Nvml = None) -> Gpus | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; None without NVML, a driver or a GPU. May take seconds, or hang."""
    try:
        if not nvml:
            import pynvml

            nvml = pynvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        names = [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]
    except Exception:  # noqa: BLE001 - not installed, no driver or no permission; training does not need it
        return None
    chosen = visible_indices(names, environ.get("CUDA_VISIBLE_DEVICES"))
    return Gpus(nvml, [Gpu(index, handles[index]) for index in chosen]) if chosen else None


def visible_indices(uuids: Sequence[str], visible: str | None) -> list[int]:
    """Return the indices of the GPUs in CUDA_VISIBLE_DEVICES, given as numbers or UUID prefixes.

    With a MIG instance in it, return all GPUs: the instance belongs to one of them.
    """
    if visible is None or "MIG" in visible:
        return list(range(len(uuids)))
    places = (_gpu_index(uuids, entry.strip()) for entry in visible.split(","))
    return sorted({place for place in takewhile(lambda place: place is not None, places) if place is not None})


def _gpu_index(uuids: Sequence[str], entry: str) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    return next((index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)), None)


@dataclass
class Gpu:
    """A GPU; `reads` are the functions that it supports."""

    index: int
    handle: Any
    reads: list[Read] = field(default_factory=lambda: list(READS))
    pcie: Rates = field(default_factory=Rates)


class Gpus:
    """Samples the GPUs. Every call may hang if the driver hangs."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu]) -> None:
        self._nvml, self._gpus = nvml, gpus
        self._events = self._event_set()

    def sample(self) -> list[Row]:
        """Return a row per GPU (see READS); `gpu` is its index, `xid` lists the errors since the last sample."""
        rows = [self._row(gpu) for gpu in self._gpus]
        for index, xid in self._xids():
            place = next((row for row in rows if row["gpu"] == index), None)
            if place is None:
                rows.append(place := {"gpu": index})
            place.setdefault("xid", []).append(xid)
        return rows

    def _row(self, gpu: Gpu) -> Row:
        row: Row = {"gpu": gpu.index}
        for read in list(gpu.reads):
            try:
                row |= read(self._nvml, gpu.handle)
            except self._nvml.NVMLError as error:
                if self._never(error):
                    gpu.reads.remove(read)
                elif error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    return row | {"lost": True}
            except AttributeError:  # an old pynvml, which some images have, lacks the function
                gpu.reads.remove(read)
        moved: dict[str, float] = {name: row.pop(name) for name in ("pcie_rx", "pcie_tx") if name in row}
        rates = gpu.pcie.of(moved, time.monotonic())
        return row | {f"{name}_mb_s": round(rate / 1e6, 2) for name, rate in rates.items()}

    def _never(self, error: Any) -> bool:
        """Return whether the GPU or its driver does not support the call at all."""
        nvml = self._nvml
        never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        return error.value in never

    def _event_set(self) -> Any:
        """Return an event set for Xid errors of the GPUs that report them; None if events are unavailable."""
        nvml = self._nvml
        with suppress(nvml.NVMLError, AttributeError):
            events = nvml.nvmlEventSetCreate()
            for gpu in self._gpus:
                with suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _xids(self) -> Iterator[tuple[int | None, int]]:
        """Yield the index of the GPU (None if unavailable) and the Xid of each pending event."""
        with suppress(self._nvml.NVMLError, AttributeError):  # ends with a timeout when no event is pending
            for _ in range(MOST_XIDS if self._events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                yield self._index(event.device), int(event.eventData)

    def _index(self, handle: Any) -> int | None:
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetIndex(handle))
        return None


Read = Callable[[Nvml, Any], Row]


def _throttle(nvml: Nvml, handle: Any) -> Row:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):  # the name before driver 535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle": [name for bit, name in THROTTLES.items() if bits & bit]}


def _counters(nvml: Nvml, handle: Any) -> Row:
    """Return PCIe bytes and NVLink errors in one call; the dedicated PCIe call takes 20 ms per direction."""
    fields = [number for numbers in _FIELDS.values() for number in _field_ids(nvml, numbers)]
    values = nvml.nvmlDeviceGetFieldValues(handle, fields)
    values = {value.fieldId: _whole(nvml, value) for value in values if value.nvmlReturn == nvml.NVML_SUCCESS}
    sums: Row = {}
    for name, numbers in _FIELDS.items():
        known = [values[number] for number in _field_ids(nvml, numbers) if number in values]
        if known:
            sums[name] = sum(known)
    return sums


_FIELDS: Final = {
    "pcie_rx": ("PCIE_COUNT_RX_BYTES",),
    "pcie_tx": ("PCIE_COUNT_TX_BYTES",),
    "nvlink_errors": (
        "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    ),
}


def _field_ids(nvml: Nvml, names: Sequence[str]) -> list[int]:
    """Return the ids of the fields that this pynvml version knows."""
    return [number for name in names if (number := getattr(nvml, f"NVML_FI_DEV_{name}", None)) is not None]


def _whole(nvml: Nvml, value: Any) -> int:
    short = value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(value.value.uiVal if short else value.value.ullVal)


def _memory(nvml: Nvml, handle: Any) -> Row:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_gb": round(memory.used / 1e9, 3), "memory_total_gb": round(memory.total / 1e9, 3)}


def _utilization(nvml: Nvml, handle: Any) -> Row:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"util": rates.gpu / 100, "memory_util": rates.memory / 100}


def _clocks(nvml: Nvml, handle: Any) -> Row:
    sm = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return {"sm_mhz": sm, "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)}


def _uncorrected(nvml: Nvml, handle: Any, counter: str) -> int:
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, getattr(nvml, counter)))


READS: Final[tuple[Read, ...]] = (
    *(_utilization, _memory, _clocks, _throttle, _counters),
    lambda nvml, handle: {"temp_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
    lambda nvml, handle: {"power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1)},
    lambda nvml, handle: {"power_limit_w": round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3, 1)},
    # Since the driver was loaded, and over the GPU's lifetime.
    lambda nvml, handle: {"ecc_uncorrected": _uncorrected(nvml, handle, "NVML_VOLATILE_ECC")},
    lambda nvml, handle: {"ecc_uncorrected_ever": _uncorrected(nvml, handle, "NVML_AGGREGATE_ECC")},
)
"""Each read is given up alone if the GPU or its driver doesn't support it."""
