"""NVML without a GPU: pynvml's own names and errors, and answers that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace as Space
from typing import Any, Final

import pynvml

NOT_SUPPORTED: Final[Exception] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST: Final[Exception] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
UNKNOWN: Final[Exception] = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def answers() -> dict[str, Any]:
    """Of one GPU at work, by the name of the function without its nvmlDeviceGet."""
    return {
        "UtilizationRates": Space(gpu=97, memory=41),
        "MemoryInfo": Space(used=60_000_000_000, total=85_520_809_984, free=0),
        "Temperature": 61,
        "PowerUsage": 653_400,
        "EnforcedPowerLimit": 700_000,
        "ClockInfo": 1755,
        "CurrentClocksEventReasons": 0x4,
        "CurrentClocksThrottleReasons": 0x4,
        "TotalEccErrors": 0,
    }


@dataclass
class Device:
    """One GPU. An answer that is an exception is raised; `fields` are counters by pynvml's names."""

    answers: dict[str, Any] = field(default_factory=answers)
    fields: dict[str, int] = field(default_factory=lambda: {"PCIE_COUNT_RX_BYTES": 0, "PCIE_COUNT_TX_BYTES": 0})
    uuid: str = "GPU-0"


@dataclass
class FakeNvml:
    """The functions that launch_train.monitoring.nvml calls; what isn't here is pynvml's. `asked`: the names of all
    calls."""

    devices: list[Device]
    xids: list[tuple[int, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    deaf: bool = False
    """No events can be had."""
    missing: tuple[str, ...] = ()
    """Names that this pynvml doesn't know yet."""

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        if name.startswith("nvmlDeviceGet"):
            return self._get(name.removeprefix("nvmlDeviceGet"))
        return getattr(pynvml, name)

    def _get(self, name: str) -> Callable[..., Any]:
        def get(device: Device, *_: Any) -> Any:
            self.asked.append(name)
            answer = device.answers.get(name, NOT_SUPPORTED)
            if isinstance(answer, Exception):
                raise answer
            return answer() if callable(answer) else answer

        return get

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetIndex(self, device: Device) -> int:
        if device.answers.get("Temperature") is LOST:
            raise LOST
        return next(index for index, one in enumerate(self.devices) if one is device)

    def nvmlDeviceGetFieldValues(self, device: Device, numbers: list[int]) -> list[Space]:
        known: Mapping[int, int] = {getattr(pynvml, f"NVML_FI_DEV_{name}"): n for name, n in device.fields.items()}
        return [_value(number, known.get(number)) for number in numbers]

    def nvmlEventSetCreate(self) -> str:
        if self.deaf:
            raise NOT_SUPPORTED
        return "events"

    def nvmlDeviceRegisterEvents(self, device: Device, kinds: int, events: str) -> None:
        assert (kinds, events) == (pynvml.nvmlEventTypeXidCriticalError, "events")
        if "Events" in device.answers:
            raise device.answers["Events"]

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Space:
        assert milliseconds == 0, "a look waits for nothing"
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        index, xid = self.xids.pop(0)
        return Space(device=self.devices[index], eventType=8, eventData=xid)


def _value(number: int, value: int | None) -> Space:
    status = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
    kind = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    return Space(fieldId=number, nvmlReturn=status, valueType=kind, value=Space(ullVal=value, uiVal=None))
