"""Find figures far below what these machines should reach, and report all as JSON and as a table. Pure.

A healthy GPU reaches 65 to 85 % of its peak in a large matrix product (less the longer it is at its power limit) and 80
to 93 % in a large copy. The thresholds (peaks.csv) are lower, so that a GPU below them is faulty: throttled, on a link
of half the width, correcting ECC errors, or shared with another process. Higher thresholds would end runs on healthy
machines; a slightly slow GPU shows in the comparison with the others.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from launch_train.bench import peaks
from launch_train.bench.figures import SCHEMA, Measured, names, values

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
COPIES: Final = ("to GPU, pinned", "from GPU, pinned", "link to the next")
MIXED: Final = 1.5
"""Expected speed-up of mixed precision on tensor cores."""
WIDTH: Final = 60
"""Columns of the table: launch adds a prefix."""


class BenchFinding(NamedTuple):
    """`unfit`: the machine should be replaced. Otherwise the finding is for information."""

    unfit: bool
    text: str


class Mark(NamedTuple):
    """The best possible figure, and the share of it that a healthy machine reaches."""

    peak: float
    floor: float


class Report(NamedTuple):
    """One run of the bench. `requested`: the request's peaks; `time`: Unix seconds; `seconds`: duration."""

    ranks: tuple[Measured, ...]
    requested: Mapping[str, float | None]
    quick: bool
    torch: str
    time: float
    seconds: float

    @property
    def findings(self) -> list[BenchFinding]:
        return judge(self.ranks, self.requested)

    @property
    def unfit(self) -> list[str]:
        """Return why these machines should be replaced; empty if they are fine."""
        return [finding.text for finding in self.findings if finding.unfit]

    @property
    def marks(self) -> dict[str, Mark]:
        return reference_figures(self.ranks, self.ranks[0], self.requested)


# --- The verdict ------------------------------------------------------------------------------------------------------


def judge(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> list[BenchFinding]:
    """Return all findings, the worst first. `requested`: the request's peaks, which precede the table's."""
    unmeasured = (  # faults on a GPU, except the DataLoader, which runs on the host
        BenchFinding(rank.on_gpu and part != "loader", f"{rank.title}: {part} could not be measured: {why}")
        for rank in ranks
        for part, why in rank.troubles
    )
    findings = (
        *unmeasured,
        *_below_peak(ranks, requested),
        *_behind_others(ranks),
        *_small_speed_ups(ranks),
        *_unknown_peaks(ranks, requested),
    )
    return sorted(findings, key=lambda finding: not finding.unfit)


def reference_figures(
    ranks: Sequence[Measured], rank: Measured, requested: Mapping[str, float | None]
) -> dict[str, Mark]:
    if not rank.on_gpu:
        return {}
    card = peaks.of(rank.device)
    tflops = {**(card.tflops if card else {}), **{kind: peak for kind, peak in requested.items() if peak}}
    floor = card.floor if card else 0.25  # unknown whether it can sustain its clocks
    marks = {f"matmul {kind}": Mark(peak, floor) for kind, peak in tflops.items() if peak}
    if card and card.memory_gbs:
        marks["memory copy"] = marks["memory triad"] = Mark(card.memory_gbs, card.memory_floor)
    if rank.pcie:
        marks["to GPU, pinned"] = marks["from GPU, pinned"] = Mark(pcie_gbs(*rank.pcie), PCIE_FLOOR)
    all_reduces = [figure.name for figure in rank.figures if figure.name.startswith("all-reduce")]
    if card and card.nvlink_gbs and len({other.node for other in ranks}) == 1 and all_reduces:
        largest = all_reduces[-1]  # the last one measured; latency limits small ones
        marks[largest] = marks["link to the next"] = Mark(card.nvlink_gbs, NVLINK_FLOOR)
    return marks


def pcie_gbs(generation: int, lanes: int) -> float:
    """Return the GB/s of a PCIe link in one direction.

    Per lane: 2.5 GT/s in generation 1, 5 in 2 (8b/10b encoding), 8 in 3, then doubled each time (128b/130b).
    """
    rate = {1: 2.5 * 0.8, 2: 5 * 0.8}.get(generation, 2.0**generation * 128 / 130)
    return rate * lanes / 8


def _below_peak(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> Iterator[BenchFinding]:
    for rank in ranks:
        for name, mark in reference_figures(ranks, rank, requested).items():
            value, is_shared = rank.value(name), name.startswith("all-reduce")  # which all ranks measure together
            if value is not None and value < mark.floor * mark.peak and (rank.rank == 0 or not is_shared):
                reached, peak = (f"{n:.4g}" if n < 1000 else f"{n:,.0f}" for n in (value, mark.peak))
                title = "" if is_shared else f"{rank.title}: "
                yield BenchFinding(True, f"{title}{name} reaches {reached} of {peak}: {100 * value / mark.peak:.0f} %")


def _behind_others(ranks: Sequence[Measured]) -> Iterator[BenchFinding]:
    """Yield the worst figure of each GPU that is slower than the others of its type."""
    for rank in ranks:
        others = [other for other in ranks if other.rank != rank.rank and other.device == rank.device and other.on_gpu]

        own = [name for name in names([rank]) if name.startswith(("matmul ", "memory ")) and "CPU" not in name]
        for compared, limit, too_slow in ((own, SLOWER, TOO_SLOW), (COPIES, COPIES_SLOWER, 1.0)):
            share, name = max(((_lag(rank, others, name), name) for name in compared), default=(0.0, ""))
            if share >= limit:
                other = "the others" if len(others) > 1 else "the other"
                yield BenchFinding(
                    share >= too_slow, f"{rank.title} is {100 * share:.0f} % slower than {other} ({name})"
                )


def _lag(rank: Measured, others: Sequence[Measured], name: str) -> float:
    """Return by which share the rank is slower than the median of the others; 0 if there is nothing to compare."""
    value, theirs = rank.value(name), values(others, name)
    usual = statistics.median(theirs) if theirs else 0.0
    return 0.0 if value is None or not usual else max(0.0, 1 - value / usual)


def _small_speed_ups(ranks: Sequence[Measured]) -> Iterator[BenchFinding]:
    """Yield mixed-precision speed-ups that are too small, of the slowest rank. Only on GPUs with tensor cores, that is
    with a peak well above fp32's."""
    for name in [name for name in names(ranks) if name.endswith("/fp32")]:
        kind = name.removesuffix("/fp32").rpartition(" ")[2]
        speed_ups = []
        for rank in ranks:
            tflops = peaks.tflops(rank.device) if rank.on_gpu else {}
            mixed, plain, speed_up = tflops.get(kind), tflops.get("fp32"), rank.value(name)
            if mixed and plain and mixed > 2.5 * plain and speed_up is not None:
                speed_ups.append(speed_up)
        if min(speed_ups, default=MIXED) < MIXED:
            yield BenchFinding(False, f"{name} is {min(speed_ups):.2f}; expected: {MIXED} or more")


def _unknown_peaks(ranks: Sequence[Measured], requested: Mapping[str, float | None]) -> Iterator[BenchFinding]:
    for device in sorted({rank.device for rank in ranks if rank.on_gpu}):
        if not any(requested.values()) and not any(peaks.tflops(device).values()):
            yield BenchFinding(False, f"{device}: unknown peak, so matrix products can't be compared with it")


# --- The report -------------------------------------------------------------------------------------------------------


def to_dict(report: Report) -> dict[str, Any]:
    """Return the data for `bench.json`. `figures`: medians over the ranks, and the lowest."""
    marks = report.marks
    return {
        "schema": SCHEMA,
        "time": report.time,
        "seconds": report.seconds,
        "torch": report.torch,
        "quick": report.quick,
        "world_size": len(report.ranks),
        "figures": {
            name: {
                "value": statistics.median(by_rank := values(report.ranks, name)),
                "least": min(by_rank),
                "unit": unit,
                "peak": marks[name].peak if name in marks else None,
            }
            for name, unit in names(report.ranks).items()
        },
        "ranks": [rank.to_dict() for rank in report.ranks],
        "findings": [finding._asdict() for finding in report.findings],
        "ok": not report.unfit,
    }


def table(report: Report) -> Iterator[str]:
    """Yield the figures (with several ranks: median and lowest), then a line per finding, or that all is well."""
    wrapped = partial(textwrap.wrap, width=WIDTH, subsequent_indent="  ")
    device, units = report.ranks[0].device, names(report.ranks)
    yield from wrapped(f"{len(report.ranks)} x {device}, torch {report.torch}, {report.seconds:.0f} s")
    if not units:
        yield "none of the selected parts can be measured on this machine"
    medians = {name: statistics.median(values(report.ranks, name)) for name in units}
    marks, is_several = report.marks, len(report.ranks) > 1
    percents = {name: f"{100 * medians[name] / mark.peak:.0f}" for name, mark in marks.items() if name in medians}
    digits = max(map(len, percents.values()), default=0)
    rows = []
    if units and (is_several or percents):
        head = ("median", "min") if is_several else ("", "")
        rows.append(("", *head, "", "of peak" if percents else ""))
    for name, unit in units.items():
        lowest = cell(min(values(report.ranks, name))) if len(values(report.ranks, name)) > 1 else ""
        of_peak = f"{percents[name]:>{digits}} % of {marks[name].peak:.4g}" if name in percents else ""
        rows.append((name, cell(medians[name]), lowest, unit, of_peak))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # names and units to the left, numbers to the right
        cells = [f"{text:{'>' if at in (1, 2) else '<'}{widths[at]}}" for at, text in enumerate(row) if widths[at]]
        yield "  ".join(cells).rstrip()
    for finding in report.findings:
        yield from wrapped(f"{'TOO SLOW' if finding.unfit else 'note'}: {finding.text}")
    if not report.findings:
        yield "all figures are as fast as expected" if marks else "no GPU, so no reference figures to compare with"


def cell(value: float) -> str:
    """Format with three significant digits and at most six characters: 4,200, 12.3k, 1.23M."""
    if value < 999.5:
        return f"{value:.3g}"
    if value < 9999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:.3g}k" if value < 999.5e3 else f"{value / 1e6:.3g}M"
