"""Summarise a node's samples over the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launch_train.telemetry.rows import Row

MEANS = {"util": "gpu_util_mean", "power_w": "gpu_power_mean_w"}
TOPS = {"memory_gb": "gpu_mem_max_gb", "temp_c": "gpu_temp_max_c", "nvlink_errors": "nvlink_errors"}
HOST_MEANS = {
    "cpu": "cpu_mean",
    "net_rx_mbps": "net_rx_mbps",
    "net_tx_mbps": "net_tx_mbps",
    "disk_read_mb_s": "disk_read_mb_s",
    "disk_write_mb_s": "disk_write_mb_s",
}
HOST_TOPS = {
    "ram_gb": "ram_max_gb",
    "swap_gb": "swap_max_gb",
    "processes_gb": "processes_max_gb",
    "shm_gb": "shm_max_gb",
}
"""Names of values in a row, and the names of their mean or maximum in the summary. Means are over all GPUs."""

NO_THROTTLE = ("idle", "application_clocks", "sync_boost", "display_clocks")
"""Throttle reasons that do not slow down a busy GPU, or that were set on purpose."""


@dataclass
class MonitorSummary:
    """Running summary of the rows so far, in constant memory."""

    looks: int = 0
    _totals: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)
    _tops: dict[str, float] = field(default_factory=dict)
    _reasons: Counter[str] = field(default_factory=Counter)
    _gpu_looks: int = 0

    def add(self, row: Row) -> None:
        """Add a sample (a row of launch_train.monitoring.monitor)."""
        self.looks += 1
        self._take([row.get("host", {})], HOST_MEANS, HOST_TOPS)
        gpus = [gpu for gpu in row.get("gpus", ()) if "util" in gpu or "throttle" in gpu or "memory_gb" in gpu]
        self._take(gpus, MEANS, TOPS)
        self._gpu_looks += len(gpus)
        self._reasons.update(reason for gpu in gpus for reason in gpu.get("throttle", ()) if reason not in NO_THROTTLE)

    def _take(self, rows: Iterable[Row], means: dict[str, str], tops: dict[str, str]) -> None:
        for row in rows:
            for key in means.keys() & row.keys():
                self._totals[means[key]] += row[key]
                self._counts[means[key]] += 1
            for key in tops.keys() & row.keys():
                self._tops[tops[key]] = max(self._tops.get(tops[key], row[key]), row[key])

    def facts(self) -> dict[str, Any]:
        """Return the summary; `throttled` maps reasons to their share of GPU samples. Empty before the first sample."""
        if not self.looks:
            return {}
        facts: dict[str, Any] = {"looks": self.looks, **dict(sorted(self._numbers()))}
        shares = {reason: round(count / self._gpu_looks, 4) for reason, count in sorted(self._reasons.items())}
        return facts | ({"throttled": shares} if self._gpu_looks else {})

    def _numbers(self) -> Iterator[tuple[str, float]]:
        for name, total in self._totals.items():
            yield name, round(total / self._counts[name], 4)
        yield from self._tops.items()
