"""Find figures far below what these machines should reach. Pure: figures in, findings out.

A healthy GPU reaches 65 to 85 % of its peak in a large matrix product (less the longer it is at its power limit) and 80
to 93 % in a large copy. The thresholds (peaks.csv) are lower, so that a GPU below them is faulty: throttled, on a link
of half the width, correcting ECC errors, or shared with another process. Higher thresholds would end runs on healthy
machines; a slightly slow GPU shows in the comparison with the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from launch_train.bench import peaks
from launch_train.bench.figures import Measured, names, values

PCIE_FLOOR: Final = 0.2
"""Share of the link's rate, to and from pinned memory. Two GPUs may share a path to the host, all are measured at once,
and the memory may belong to the other processor: a healthy machine may reach 0.4 or less. A link of an older generation
or with lost lanes reaches 0.2 or less; cases in between show in the comparison with the other GPUs."""
NVLINK_FLOOR: Final = 0.3
"""Share of NVLink's rate in one direction: an all-reduce of 64 MB or more reaches at least half; over PCIe or the
host's memory it is less than a tenth."""
SLOWER: Final = 0.10
"""A rank slower than the others by this share is reported: training waits for it in every step."""
TOO_SLOW: Final = 0.20
"""GPUs of one type may differ by a tenth (silicon, position in the airflow), but not by a fifth."""
COPIES_SLOWER: Final = 0.30
"""The path to the host or to another GPU may be longer for one GPU than for others: reported, but not a fault."""
MIXED: Final = 1.5
"""Expected speed-up of mixed precision on tensor cores."""


class BenchFinding(NamedTuple):
    """`unfit`: the machine should be replaced. Otherwise the finding is for information."""

    unfit: bool
    text: str


class Mark(NamedTuple):
    """The best possible figure, and the share of it that a healthy machine reaches."""

    peak: float
    floor: float


def judge(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> list[BenchFinding]:
    """Return all findings, the worst first. `requested`: the request's peaks, which precede the table's."""
    findings = (
        *_troubles(ranks),
        *_below(ranks, requested),
        *_slower(ranks),
        *_mixed(ranks),
        *_unknown(ranks, requested),
    )
    return sorted(findings, key=lambda finding: not finding.unfit)


def marks(ranks: Sequence[Measured], rank: Measured, requested: Mapping[str, float | None]) -> dict[str, Mark]:
    """Return the reference figures of one rank, by the figure's name."""
    if not rank.on_gpu:
        return {}
    card = peaks.of(rank.device)
    tflops = {**(card.tflops if card else {}), **{kind: peak for kind, peak in requested.items() if peak}}
    floor = card.floor if card else 0.25  # unknown whether it can sustain its clocks
    figures = {f"matmul {kind}": Mark(peak, floor) for kind, peak in tflops.items() if peak}
    if card and card.memory_gbs:
        figures["memory copy"] = figures["memory triad"] = Mark(card.memory_gbs, card.memory_floor)
    if rank.pcie:
        figures["to GPU, pinned"] = figures["from GPU, pinned"] = Mark(pcie_gbs(*rank.pcie), PCIE_FLOOR)
    all_reduces = [figure.name for figure in rank.figures if figure.name.startswith("all-reduce")]
    if card and card.nvlink_gbs and len({other.node for other in ranks}) == 1 and all_reduces:
        largest = all_reduces[-1]  # the last one measured; latency limits small ones
        figures[largest] = figures["link to the next"] = Mark(card.nvlink_gbs, NVLINK_FLOOR)
    return figures


def pcie_gbs(generation: int, lanes: int) -> float:
    """Return the GB/s of a PCIe link in one direction.

    Per lane: 2.5 GT/s in generation 1, 5 in 2 (8b/10b encoding), 8 in 3, then doubled each time (128b/130b).
    """
    rate = {1: 2.5 * 0.8, 2: 5 * 0.8}.get(generation, 2.0**generation * 128 / 130)
    return rate * lanes / 8


def _troubles(ranks: Sequence[Measured]) -> Iterator[BenchFinding]:
    """Yield parts that could not be measured: faults on a GPU, except the DataLoader, which runs on the host."""
    for rank in ranks:
        for part, why in rank.troubles:
            yield BenchFinding(rank.on_gpu and part != "loader", f"{_who(rank)}: {part} could not be measured: {why}")


def _below(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> Iterator[BenchFinding]:
    for rank in ranks:
        for name, mark in marks(ranks, rank, requested).items():
            value, shared = rank.value(name), name.startswith("all-reduce")  # which all ranks measure together
            if value is not None and value < mark.floor * mark.peak and (rank.rank == 0 or not shared):
                who, share = "" if shared else f"{_who(rank)}: ", _percent(value / mark.peak)
                yield BenchFinding(True, f"{who}{name} reaches {_few(value)} of {_few(mark.peak)}: {share}")


def _slower(ranks: Sequence[Measured]) -> Iterator[BenchFinding]:
    """Yield the worst figure of each GPU that is slower than the others of its type."""
    for rank in ranks:
        others = [other for other in ranks if other.rank != rank.rank and other.device == rank.device and other.on_gpu]
        behind = [
            (_behind(rank, others, name), name)
            for name in names([rank])
            if name.startswith(("matmul ", "memory ")) and "CPU" not in name
        ]
        share, name = max(behind, default=(0.0, ""))
        if share >= SLOWER:
            yield BenchFinding(share >= TOO_SLOW, _slow(rank, share, name, len(others)))
        share, name = max(((_behind(rank, others, name), name) for name in _COPIES), default=(0.0, ""))
        if share >= COPIES_SLOWER:
            yield BenchFinding(False, _slow(rank, share, name, len(others)))


_COPIES: Final = ("to GPU, pinned", "from GPU, pinned", "link to the next")


def _behind(rank: Measured, others: Sequence[Measured], name: str) -> float:
    """Return by which share the rank is slower than the median of the others; 0 if there is nothing to compare."""
    value, theirs = rank.value(name), values(others, name)
    if value is None or not theirs or not (usual := statistics.median(theirs)):
        return 0.0
    return max(0.0, 1 - value / usual)


def _slow(rank: Measured, share: float, name: str, others: int) -> str:
    return f"{_who(rank)} is {_percent(share)} slower than the other{'s' if others > 1 else ''} ({name})"


def _mixed(ranks: Sequence[Measured]) -> Iterator[BenchFinding]:
    """Yield mixed-precision speed-ups that are too small, of the slowest rank. Only on GPUs with tensor cores, that is
    with a peak well above fp32's."""
    for name in [name for name in names(ranks) if name.endswith("/fp32")]:
        kind = name.removesuffix("/fp32").rpartition(" ")[2]
        speed_ups = (rank.value(name) for rank in ranks if _has_tensor_cores(rank, kind))
        slowest = min((speed_up for speed_up in speed_ups if speed_up is not None), default=MIXED)
        if slowest < MIXED:
            yield BenchFinding(False, f"{name} is {slowest:.2f}; expected: {MIXED} or more")


def _has_tensor_cores(rank: Measured, kind: str) -> bool:
    card = peaks.of(rank.device) if rank.on_gpu else None
    mixed, plain = (card.tflops.get(kind), card.tflops.get("fp32")) if card else (None, None)
    return bool(mixed and plain and mixed > 2.5 * plain)


def _unknown(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> Iterator[BenchFinding]:
    for device in sorted({rank.device for rank in ranks if rank.on_gpu}):
        card = peaks.of(device)
        if not any(requested.values()) and not (card and any(card.tflops.values())):
            yield BenchFinding(False, f"{device}: unknown peak, so matrix products can't be compared with it")


def _who(rank: Measured) -> str:
    return f"{'GPU' if rank.on_gpu else 'process'} {rank.gpu} of node {rank.node}"


def _few(value: float) -> str:
    """Format with up to four digits: 0.1234, 63.02, 4,800."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
