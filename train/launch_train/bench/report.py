"""The figures of all ranks and the verdict, as JSON and as a table of at most 60 columns (launch adds a prefix)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from launch_train.bench.figures import SCHEMA, Measured, names, values
from launch_train.bench.verdict import BenchFinding, Mark, judge, marks

WIDTH: Final = 60


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

    def marks(self) -> dict[str, Mark]:
        """Return the reference figures of the first rank."""
        return marks(self.ranks, self.ranks[0], self.requested)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the data for `bench.json`. `figures`: medians over the ranks, and the lowest."""
    held = report.marks()
    return {
        "schema": SCHEMA,
        "time": report.time,
        "seconds": report.seconds,
        "torch": report.torch,
        "quick": report.quick,
        "world_size": len(report.ranks),
        "figures": {
            name: {
                "value": statistics.median(measured),
                "least": min(measured),
                "unit": unit,
                "peak": held[name].peak if name in held else None,
            }
            for name, unit in names(report.ranks).items()
            if (measured := values(report.ranks, name))
        },
        "ranks": [rank.to_dict() for rank in report.ranks],
        "findings": [finding._asdict() for finding in report.findings],
        "ok": not report.unfit,
    }


def table(report: Report) -> Iterator[str]:
    """Yield the figures, then the verdict. With several ranks: the median and the lowest."""
    first, several = report.ranks[0], len(report.ranks) > 1
    yield from _wrapped(f"{len(report.ranks)} x {first.device}, torch {report.torch}, {report.seconds:.0f} s")
    if not names(report.ranks):
        yield "none of the selected parts can be measured on this machine"
    head = ("", "median" if several else "", "min" if several else "", "", "of peak")
    held = report.marks()
    rows = [_row(name, unit, values(report.ranks, name), held.get(name)) for name, unit in names(report.ranks).items()]
    digits = max(row[4].find(" ") for row in rows) if rows else 0
    rows = [(*row[:4], f"{'':{digits - row[4].find(' ')}}{row[4]}" if row[4] else "") for row in rows]
    if not any(row[4] for row in rows):
        head = (*head[:4], "")
    rows = [head, *rows] if rows and any(head) else rows
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(5)]
    for row in rows:  # names and units to the left, numbers to the right
        cells = [f"{text:{'>' if at in (1, 2) else '<'}{widths[at]}}" for at, text in enumerate(row) if widths[at]]
        yield "  ".join(cells).rstrip()
    yield from verdict(report)


def verdict(report: Report) -> Iterator[str]:
    """Yield a line per finding, or one line that all is well."""
    for finding in report.findings:
        yield from _wrapped(f"{'TOO SLOW' if finding.unfit else 'note'}: {finding.text}")
    if not report.findings:
        well = "all figures are as fast as expected"
        yield well if report.marks() else "no GPU, so no reference figures to compare with"


Row = tuple[str, str, str, str, str]


def _row(name: str, unit: str, by_rank: Sequence[float], mark: Mark | None) -> Row:
    """Return name, median, lowest (if there are several), unit, share of the peak."""
    median = statistics.median(by_rank)
    share = f"{100 * median / mark.peak:.0f} % of {mark.peak:.4g}" if mark else ""
    return name, cell(median), cell(min(by_rank)) if len(by_rank) > 1 else "", unit, share


def cell(value: float) -> str:
    """Format with three significant digits and at most six characters: 4,200, 12.3k, 1.23M."""
    if value < 999.5:
        return f"{value:.3g}"
    if value < 9999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:.3g}k" if value < 999.5e3 else f"{value / 1e6:.3g}M"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
