"""What is said at once."""

from __future__ import annotations

from typing import Any

import pytest

from launch_train.monitoring.alerts import UNKNOWN, XIDS, Alert, Alerts


def look(time: float = 0.0, **gpu: Any) -> dict[str, Any]:
    return {"time": time, "gpus": [{"gpu": 3, "util": 0.9, **gpu}]}


def test_a_machine_that_is_fine_says_nothing() -> None:
    alarms = Alerts(0)
    fine = {"ram_gb": 50.0, "ram_limit_gb": 100.0, "disk_free_gb": 50.0, "disk_gb": 100.0}
    for second in range(200):
        row = look(second, throttle=["sw_power_cap", "idle"], ecc_uncorrected=2) | {"host": fine}
        assert alarms.check(row) == []
    assert alarms.check({"time": 0.0}) == []


@pytest.mark.parametrize(
    ("number", "doubtful"), [(48, True), (63, False), (74, True), (79, False), (94, True), (149, True), (999, False)]
)
def test_an_xid_is_a_line_and_an_event(number: int, doubtful: bool) -> None:
    [alarm] = Alerts(1).check(look(xid=[number]))
    known = XIDS.get(number, UNKNOWN)
    assert alarm.line == f"node 1, GPU 3: Xid {number}: {known.meaning} ({known.advice})"
    assert alarm.event == {"node": 1, "gpu": 3, "xid": number, "meaning": known.meaning, "doubtful": doubtful}


def test_each_xid_counts() -> None:
    alarms = Alerts(0)
    assert len(alarms.check(look(xid=[94, 94]))) == 2
    assert len(alarms.check(look(xid=[94]))) == 1
    assert alarms.check({"time": 0.0, "gpus": [{"gpu": None, "xid": [79]}]})[0].line.startswith("node 0, a GPU: Xid 79")


def test_a_lost_gpu_is_said_once() -> None:
    alarms = Alerts(0)
    [alarm] = alarms.check(look(lost=True))
    assert alarm.line == "node 0: GPU 3 is lost: it returns only after a reboot of the machine"
    assert alarm.event is not None
    assert alarm.event["lost"]
    assert alarms.check(look(lost=True)) == []


def test_memory_errors_since_the_first_look() -> None:
    alarms = Alerts(0)
    assert alarms.check(look(ecc_uncorrected=5)) == [], "they were there before"
    [alarm] = alarms.check(look(ecc_uncorrected=7))
    assert "2 uncorrectable memory errors; its results may be wrong" in alarm.line
    assert alarm.event is not None
    assert (alarm.event["ecc_uncorrected"], alarm.event["doubtful"]) == (2, True)
    assert alarms.check(look(ecc_uncorrected=7)) == []
    assert len(alarms.check(look(ecc_uncorrected=8))) == 1


def test_heat_is_said_once_and_not_for_a_moment_of_it() -> None:
    alarms = Alerts(0)
    found = [alarms.check(look(second, throttle=["hw_thermal"] if second < 2 else [])) for second in range(40)]
    assert not any(found), "two looks of the first eleven are no share yet"
    alarms = Alerts(0)
    found = [alarms.check(look(second, throttle=["sw_thermal"])) for second in range(40)]
    assert [len(one) for one in found] == [0] * 11 + [1] + [0] * 28
    assert found[11] == [Alert("node 0: GPU 3 is throttled 100% of the time: too hot (sw_thermal)")]


def test_a_gpu_without_work() -> None:
    alarms = Alerts(0)
    assert alarms.check(look(0, util=0.9)) == []
    assert not [alarm for second in range(5, 300, 5) for alarm in alarms.check(look(second, util=0.02))]
    [alarm] = alarms.check(look(300, util=0.02))
    assert alarm == Alert("node 0: GPU 3 has been idle for 5 minutes")
    assert alarms.check(look(900, util=0.02)) == []
    alarms = Alerts(0)
    found = [alarms.check(look(second, util=0.9 if second % 200 == 0 else 0.0)) for second in range(0, 2000, 5)]
    assert not any(found), "now and then it has some"


def test_memory_and_disk_of_the_host() -> None:
    alarms = Alerts(2)
    full = {"time": 0.0, "host": {"ram_gb": 96.0, "ram_limit_gb": 100.0, "disk_free_gb": 4.0, "disk_gb": 100.0}}
    assert [alarm.line for alarm in alarms.check(full)] == [
        "node 2: 96.0 of 100.0 GB of memory in use; at the limit it is killed",
        "node 2: the disk is nearly full: 4.0 of 100.0 GB free",
    ]
    assert alarms.check(full) == []


def test_a_driver_that_does_not_answer() -> None:
    alarms = Alerts(0)
    assert alarms.check_driver(5.0) == []
    assert alarms.check_driver(31.0) == [
        Alert("node 0: the NVIDIA driver has not responded for 31 s; it may hang", about="driver")
    ]
    assert alarms.check_driver(60.0) == []
