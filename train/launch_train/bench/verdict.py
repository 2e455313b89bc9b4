"""What is far below what these machines should give. Pure: figures in, findings out.

A healthy card reaches 65 to 85 % of its peak in a large matrix product, the less the longer it is at its power limit,
and 80 to 93 % in a large copy. What is asked here is less (train/launch_train/bench/peaks.csv), so that who is found
wanting is ill: throttled, half as wide a link, ECC at work, a stranger on the GPU. Too much asked would end runs on
machines that are well; a card that is a little ill shows beside the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from launch_train.bench import peaks
from launch_train.bench.figures import Measured, names, values

PCIE_FLOOR: Final = 0.2
"""Of the link's rate, to and from pinned memory. Two GPUs may share a way to the host, all are measured at once, and
the memory may be the other processor's: a machine that is well may have 0.4 of it and less. What is an older
generation, or has lost lanes, has 0.2 and less; what lies between shows beside the others."""
NVLINK_FLOOR: Final = 0.3
"""Of NVLink's rate in one direction: an all-reduce of 64 MB and more has half of it and more; what has found no NVLink
and goes over PCIe or the host's memory has less than a tenth."""
SLOWER: Final = 0.10
"""A rank that is so much slower than the others is named: training waits for it in every step."""
TOO_SLOW: Final = 0.20
"""Two cards of one kind may differ by a tenth, by their silicon and their place in the airflow. Not by a fifth."""
COPIES_SLOWER: Final = 0.30
"""The way to the host, or to another GPU, may be longer for one GPU than for the others: told, but no fault."""
MIXED: Final = 1.5
"""How much faster mixed precision should be, on tensor cores."""


class Finding(NamedTuple):
    """`unfit`: the machine should be replaced. Otherwise it is only worth knowing."""

    unfit: bool
    text: str


class Mark(NamedTuple):
    """What a figure could be at best, and the share of it that a machine which is well has."""

    peak: float
    floor: float


def judge(ranks: Sequence[Measured], asked: Mapping[str, float | None] | None = None) -> list[Finding]:
    """All that is wrong, the worst first. `asked`: the request's peaks, which beat the table's."""
    found = [
        *(finding for rank in ranks for finding in _troubles(rank)),
        *_below(ranks, asked or {}),
        *_slower(ranks),
        *_mixed(ranks),
        *_unknown(ranks, asked or {}),
    ]
    return sorted(found, key=lambda finding: not finding.unfit)


def marks(ranks: Sequence[Measured], rank: Measured, asked: Mapping[str, float | None]) -> dict[str, Mark]:
    """What one rank's figures are held against; figures without an entry are not."""
    if not rank.on_gpu:
        return {}
    card = peaks.of(rank.device)
    tflops = {**(card.tflops if card else {}), **{kind: peak for kind, peak in asked.items() if peak}}
    floor = card.floor if card else 0.25  # not known whether it holds its clocks
    found = {f"matmul {kind}": Mark(peak, floor) for kind, peak in tflops.items() if peak}
    if card and card.memory_gbs:
        found["memory copy"] = found["memory triad"] = Mark(card.memory_gbs, card.memory_floor)
    if rank.pcie:
        found["to GPU, pinned"] = found["from GPU, pinned"] = Mark(pcie_gbs(*rank.pcie), PCIE_FLOOR)
    if card and card.nvlink_gbs and len({one.node for one in ranks}) == 1 and (largest := _largest(rank)):
        found[largest] = found["link to the next"] = Mark(card.nvlink_gbs, NVLINK_FLOOR)
    return found


def pcie_gbs(generation: int, lanes: int) -> float:
    """GB/s of a PCIe link in one direction: 2.5 GT/s a lane in the first generation, 5 in the second (8 bits in 10
    sent), then 8, doubled with each (128 in 130)."""
    rate = {1: 2.5 * 0.8, 2: 5 * 0.8}.get(generation, 2.0**generation * 128 / 130)
    return rate * lanes / 8


def _largest(rank: Measured) -> str | None:
    """The name of the largest all-reduce: the last one measured. In small ones the start of each takes the time."""
    return next((one.name for one in reversed(rank.figures) if one.name.startswith("all-reduce")), None)


def _troubles(rank: Measured) -> Iterator[Finding]:
    """On a GPU whatever can't be measured is a fault, but for the DataLoader, which is the host's."""
    for part, why in rank.troubles:
        yield Finding(rank.on_gpu and part != "loader", f"{_who(rank)}: {part} could not be measured: {why}")


def _below(ranks: Sequence[Measured], asked: Mapping[str, float | None]) -> Iterator[Finding]:
    for rank in ranks:
        for name, mark in marks(ranks, rank, asked).items():
            value = rank.value(name)
            if value is not None and value < mark.floor * mark.peak and (rank.rank == 0 or not _shared(name)):
                who = "" if _shared(name) else f"{_who(rank)}: "
                yield Finding(
                    True, f"{who}{name} has {_few(value)} of {_few(mark.peak)}: {_percent(value / mark.peak)}"
                )


def _shared(name: str) -> bool:
    """Of all ranks together, so that each has the same."""
    return name.startswith("all-reduce")


def _slower(ranks: Sequence[Measured]) -> Iterator[Finding]:
    """The worst figure of each GPU that is slower than the others of its kind."""
    for rank in ranks:
        others = [one for one in ranks if one.rank != rank.rank and one.device == rank.device and one.on_gpu]
        behind = [
            (_behind(rank, others, name), name)
            for name in names([rank])
            if name.startswith(("matmul ", "memory ")) and "CPU" not in name
        ]
        share, name = max(behind, default=(0.0, ""))
        if share >= SLOWER:
            yield Finding(share >= TOO_SLOW, _slow(rank, share, name, len(others)))
        share, name = max(((_behind(rank, others, name), name) for name in _COPIES), default=(0.0, ""))
        if share >= COPIES_SLOWER:
            yield Finding(False, _slow(rank, share, name, len(others)))


_COPIES: Final = ("to GPU, pinned", "from GPU, pinned", "link to the next")


def _behind(rank: Measured, others: Sequence[Measured], name: str) -> float:
    """By which share it is slower than the median of the others; 0 where there is nothing to compare."""
    value, theirs = rank.value(name), values(others, name)
    if value is None or not theirs or not (usual := statistics.median(theirs)):
        return 0.0
    return max(0.0, 1 - value / usual)


def _slow(rank: Measured, share: float, name: str, others: int) -> str:
    return f"{_who(rank)} is {_percent(share)} slower than the other{'s' if others > 1 else ''} ({name})"


def _mixed(ranks: Sequence[Measured]) -> Iterator[Finding]:
    """Of the slowest rank. Only where there are tensor cores, that is a peak for these numbers well above fp32's."""
    for name in [name for name in names(ranks) if name.endswith("/fp32")]:
        kind = name.removesuffix("/fp32").rpartition(" ")[2]
        found = [rank for rank in ranks if rank.value(name) is not None and _has_tensor_cores(rank, kind)]
        slowest = min((rank.value(name) or 0.0 for rank in found), default=MIXED)
        if slowest < MIXED:
            yield Finding(False, f"{name} is {slowest:.2f}; {MIXED} and more is usual")


def _has_tensor_cores(rank: Measured, kind: str) -> bool:
    card = peaks.of(rank.device) if rank.on_gpu else None
    mixed, plain = (card.tflops.get(kind), card.tflops.get("fp32")) if card else (None, None)
    return bool(mixed and plain and mixed > 2.5 * plain)


def _unknown(ranks: Sequence[Measured], asked: Mapping[str, float | None]) -> Iterator[Finding]:
    for device in sorted({rank.device for rank in ranks if rank.on_gpu}):
        card = peaks.of(device)
        if not any(asked.values()) and not (card and any(card.tflops.values())):
            yield Finding(False, f"{device}: its peak is unknown, so its products are held against nothing")


def _who(rank: Measured) -> str:
    what = f"GPU {rank.gpu}" if rank.on_gpu else f"process {rank.gpu}"
    return f"{what} of node {rank.node}"


def _few(value: float) -> str:
    """Three or four digits: 0.123, 63.02, 4,800."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
