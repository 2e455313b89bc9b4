"""The GPUs by NVML: on a fake with pynvml's names, and for real where there is a GPU."""

from __future__ import annotations

import os
import time

import pytest

from launch_train.monitoring.nvml import READS, Gpus, open_gpus, visible_indices
from tests.train.monitoring.fakenvml import LOST, NOT_SUPPORTED, UNKNOWN, Device, FakeNvml


def opened(nvml: FakeNvml, visible: str | None = None) -> Gpus:
    gpus = open_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, nvml)
    assert gpus is not None
    return gpus


def test_a_look_at_two_gpus() -> None:
    rows = opened(FakeNvml([Device(), Device()])).sample()
    assert [row["gpu"] for row in rows] == [0, 1]
    expected: dict[str, object] = {
        "util": 0.97,
        "memory_util": 0.41,
        "memory_gb": 60.0,
        "memory_total_gb": 85.521,
        "temp_c": 61,
    }
    expected |= {"power_w": 653.4, "power_limit_w": 700.0, "sm_mhz": 1755, "memory_mhz": 1755}
    expected |= {"throttle": ["sw_power_cap"], "ecc_uncorrected": 0, "ecc_uncorrected_ever": 0}
    assert rows[0] == {"gpu": 0, **expected}


def test_what_a_gpu_does_not_say_is_left_out_and_not_asked_again() -> None:
    device = Device(fields={})
    device.answers |= {"UtilizationRates": NOT_SUPPORTED, "PowerUsage": NOT_SUPPORTED}
    nvml = FakeNvml([device])
    gpus = opened(nvml)
    assert not {"util", "power_w", "pcie_rx_mb_s", "nvlink_errors"} & gpus.sample()[0].keys()
    nvml.asked.clear()
    assert gpus.sample()[0]["temp_c"] == 61
    assert not {"UtilizationRates", "PowerUsage"} & set(nvml.asked)


def test_a_gpu_that_is_lost() -> None:
    device = Device(answers=dict.fromkeys(("UtilizationRates", "MemoryInfo", "Temperature"), LOST))
    rows = opened(FakeNvml([Device(), device], xids=[(1, 79)])).sample()
    assert rows[1] == {"gpu": 1, "lost": True}
    assert rows[2] == {"gpu": None, "xid": [79]}, "it can't say any more which one it is"


def test_counters_become_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gpus = opened(FakeNvml([device]))
    assert "pcie_rx_mb_s" not in gpus.sample()[0]
    now += 2
    device.fields |= {"PCIE_COUNT_RX_BYTES": 50_000_000, "PCIE_COUNT_TX_BYTES": 8_000_000}
    device.fields |= {"NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 2, "NVLINK_REPLAY_ERROR_COUNT_TOTAL": 1}
    row = gpus.sample()[0]
    assert (row["pcie_rx_mb_s"], row["pcie_tx_mb_s"], row["nvlink_errors"]) == (25.0, 4.0, 3)
    now += 2
    device.fields["PCIE_COUNT_RX_BYTES"] = 5
    row = gpus.sample()[0]
    assert ("pcie_rx_mb_s" in row, row["pcie_tx_mb_s"]) == (False, 0.0), "a counter that wrapped gives none"


def test_a_gpu_that_tells_no_xids_leaves_those_of_the_others() -> None:
    mute = Device()
    mute.answers["Events"] = NOT_SUPPORTED
    rows = opened(FakeNvml([mute, Device()], xids=[(1, 79)])).sample()
    assert [row.get("xid") for row in rows] == [None, [79]]


def test_xids_since_the_last_look() -> None:
    nvml = FakeNvml([Device(), Device()], xids=[(1, 63), (1, 94), (0, 13)])
    gpus = opened(nvml)
    assert [row.get("xid") for row in gpus.sample()] == [[13], [63, 94]]
    assert [row.get("xid") for row in gpus.sample()] == [None, None]
    nvml.xids = [(0, 13)] * 1000
    assert len(gpus.sample()[0]["xid"]) == 64, "a storm of them doesn't hold a look up"
    assert opened(FakeNvml([Device()], deaf=True)).sample()[0]["util"] == 0.97


def test_gpus_that_are_shown() -> None:
    uuids = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]
    for visible, expected in [
        (None, [0, 1, 2]),
        ("0,2", [0, 2]),
        (" 2 , 1", [1, 2]),
        ("GPU-bb", [1]),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("", []),
        ("MIG-0,MIG-1", [0, 1, 2]),
    ]:
        assert visible_indices(uuids, visible) == expected
    assert [row["gpu"] for row in opened(FakeNvml([Device(), Device(uuid="GPU-1")]), "GPU-1").sample()] == [1]
    assert open_gpus({"CUDA_VISIBLE_DEVICES": ""}, FakeNvml([Device()])) is None


def test_without_gpus_there_is_nothing_to_look_at() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise UNKNOWN

    assert open_gpus({}, NoDriver([])) is None
    assert open_gpus({}, FakeNvml([])) is None


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    gpus = open_gpus(os.environ)
    assert gpus is not None
    gpus.sample()
    row = gpus.sample()[0]
    assert {"gpu", "memory_gb", "memory_total_gb"} <= row.keys()
    assert 0 < row["memory_gb"] < row["memory_total_gb"]
    assert len(row) > len(READS) / 2
