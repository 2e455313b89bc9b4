"""This node's GPUs by NVML, the driver's own library: utilisation, memory, heat, power, clocks, errors.

What a GPU or its driver doesn't say (MIG, an old driver, a virtual GPU) is left out. NVML says of utilisation only
that some kernel ran. https://docs.nvidia.com/deploy/nvml-api
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
"""nvmlClocksEventReason…: why the clocks are not higher."""

MOST_XIDS: Final = 64
"""Events that one look takes."""

Nvml = Any
"""The module pynvml, which has no types."""


def open_gpus(environ: Mapping[str, str], nvml: Nvml = None) -> Gpus | None:
    """The GPUs that CUDA_VISIBLE_DEVICES shows; None without NVML, a driver or a GPU. May take seconds, or hang."""
    try:
        nvml = nvml or _pynvml()
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except Exception:  # noqa: BLE001 - not installed, no driver, no permission: nothing that training needs
        return None
    chosen = shown(names, environ.get("CUDA_VISIBLE_DEVICES"))
    return Gpus(nvml, [Gpu(index, handles[index]) for index in chosen]) if chosen else None


def _pynvml() -> Nvml:
    import pynvml

    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def shown(uuids: Sequence[str], visible: str | None) -> list[int]:
    """The numbers of the GPUs that CUDA_VISIBLE_DEVICES shows, by number or by the beginning of a name. With a MIG
    instance in it all are looked at: an instance belongs to one of them."""
    if visible is None or "MIG" in visible:
        return list(range(len(uuids)))
    found = (_place(uuids, entry.strip()) for entry in visible.split(","))
    return sorted({place for place in takewhile(lambda place: place is not None, found) if place is not None})


def _place(uuids: Sequence[str], entry: str) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    return next((index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)), None)


@dataclass
class Gpu:
    """One of them; `reads` are what it has an answer for."""

    index: int
    handle: Any
    reads: list[Read] = field(default_factory=lambda: list(READS))
    pcie: Rates = field(default_factory=Rates)


class Gpus:
    """Looks at them. Every call may hang while the driver does."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu]) -> None:
        self._nvml, self._gpus = nvml, gpus
        self._events = self._event_set()

    def sample(self) -> list[Row]:
        """A row of each GPU: see READS; `gpu` is its number, `xid` the errors since the last look."""
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
            except AttributeError:  # an old pynvml, as some images have it, doesn't know what was asked
                gpu.reads.remove(read)
        moved: dict[str, float] = {name: row.pop(name) for name in ("pcie_rx", "pcie_tx") if name in row}
        rates = gpu.pcie.of(moved, time.monotonic())
        return row | {f"{name}_mb_s": round(rate / 1e6, 2) for name, rate in rates.items()}

    def _never(self, error: Any) -> bool:
        """Whether this GPU, or its driver, will have no answer the next time either."""
        nvml = self._nvml
        never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        return error.value in never

    def _event_set(self) -> Any:
        """For Xid errors, of those GPUs that tell theirs; None where they can't be had."""
        nvml = self._nvml
        with suppress(nvml.NVMLError, AttributeError):
            events = nvml.nvmlEventSetCreate()
            for gpu in self._gpus:
                with suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _xids(self) -> Iterator[tuple[int | None, int]]:
        """The GPU, if it still says which it is, and the error."""
        with suppress(self._nvml.NVMLError, AttributeError):  # at the latest a timeout: there are no more
            for _ in range(MOST_XIDS if self._events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                yield self._index(event.device), int(event.eventData)

    def _index(self, handle: Any) -> int | None:
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetIndex(handle))
        return None


Read = Callable[[Nvml, Any], Row]


def _util(nvml: Nvml, handle: Any) -> Row:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"util": rates.gpu / 100, "memory_util": rates.memory / 100}


def _memory(nvml: Nvml, handle: Any) -> Row:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_gb": round(memory.used / 1e9, 3), "memory_total_gb": round(memory.total / 1e9, 3)}


def _heat(nvml: Nvml, handle: Any) -> Row:
    return {"temp_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}


def _power(nvml: Nvml, handle: Any) -> Row:
    return {"power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1)}


def _power_limit(nvml: Nvml, handle: Any) -> Row:
    return {"power_limit_w": round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3, 1)}


def _clocks(nvml: Nvml, handle: Any) -> Row:
    sm = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return {"sm_mhz": sm, "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)}


def _throttle(nvml: Nvml, handle: Any) -> Row:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):  # its name before driver 535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle": [name for bit, name in THROTTLES.items() if bits & bit]}


def _ecc(nvml: Nvml, handle: Any) -> Row:
    """Uncorrectable errors since the driver was loaded."""
    kind, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_boot)}


def _ecc_ever(nvml: Nvml, handle: Any) -> Row:
    """The same over the GPU's life."""
    kind, ever = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    return {"ecc_uncorrected_ever": nvml.nvmlDeviceGetTotalEccErrors(handle, kind, ever)}


def _counters(nvml: Nvml, handle: Any) -> Row:
    """Bytes over PCIe and errors of NVLink, in one call: the one made for PCIe alone takes 20 ms for each direction."""
    values = _fields(nvml, handle, [number for numbers in _FIELDS.values() for number in _numbers(nvml, numbers)])
    sums: Row = {}
    for name, numbers in _FIELDS.items():
        known = [values[number] for number in _numbers(nvml, numbers) if number in values]
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


def _numbers(nvml: Nvml, names: Sequence[str]) -> list[int]:
    """Those that this pynvml knows."""
    return [number for name in names if (number := getattr(nvml, f"NVML_FI_DEV_{name}", None)) is not None]


def _fields(nvml: Nvml, handle: Any, numbers: Sequence[int]) -> dict[int, int]:
    """Those that this GPU has."""
    values = nvml.nvmlDeviceGetFieldValues(handle, list(numbers))
    return {value.fieldId: _whole(nvml, value) for value in values if value.nvmlReturn == nvml.NVML_SUCCESS}


def _whole(nvml: Nvml, value: Any) -> int:
    short = value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(value.value.uiVal if short else value.value.ullVal)


READS: Final[tuple[Read, ...]] = (
    *(_util, _memory, _heat, _power, _power_limit, _clocks),
    *(_throttle, _ecc, _ecc_ever, _counters),
)
