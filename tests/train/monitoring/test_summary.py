"""What looks come to."""

from __future__ import annotations

from launch_train.monitoring.summary import MonitorSummary


def test_means_and_tops_over_all_gpus_and_looks() -> None:
    sums = MonitorSummary()
    for util, hot in ((1.0, ["sw_power_cap"]), (0.5, ["idle"])):
        gpus = [{"gpu": 0, "util": util, "power_w": 100.0, "memory_gb": 10 * util, "temp_c": 60, "throttle": hot}]
        gpus += [{"gpu": 1, "util": 0.0, "throttle": []}]
        sums.add({"time": 0.0, "host": {"cpu": util / 2, "ram_gb": 3.0, "net_rx_mbps": 8.0}, "gpus": gpus})
    assert sums.facts() == {
        "looks": 2,
        "gpu_util_mean": 0.375,
        "gpu_power_mean_w": 100.0,
        "gpu_mem_max_gb": 10.0,
        "gpu_temp_max_c": 60,
        "cpu_mean": 0.375,
        "ram_max_gb": 3.0,
        "net_rx_mbps": 8.0,
        "throttled": {"sw_power_cap": 0.25},
    }


def test_without_gpus_and_without_looks() -> None:
    sums = MonitorSummary()
    assert sums.facts() == {}
    sums.add({"time": 0.0})
    assert sums.facts() == {"looks": 1}
    sums.add({"time": 0.0, "gpus": [{"gpu": None, "xid": [79]}, {"gpu": 1, "lost": True}]})
    assert sums.facts() == {"looks": 2}, "a GPU that is lost has no share of anything"
