"""Compare measurements of alternating loops, and format them as tables. Pure.

Two loops are compared turn by turn. The result of a round is the median of its turns; the overall result is the median
of the rounds, given with their minimum and maximum, which show the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Loop:
    """A loop that is compared: its title, program, the program's JSON input, and the number of ranks."""

    title: str
    program: str
    told: Mapping[str, Any]
    ranks: int = 1


class Turn(NamedTuple):
    """Seconds per step: wall time, and CPU time of all ranks."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Measured:
    """The turns of a loop, by round."""

    loop: Loop
    rounds: Sequence[Sequence[Turn]]
    said: str = ""
    """Output of its rank 0 in the last round."""


class Spread(NamedTuple):
    """Median, minimum and maximum over the rounds."""

    middle: float
    least: float
    most: float


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of one value per round."""
    found = list(values)
    return Spread(median(found), min(found), max(found))


def wall(one: Measured) -> Spread:
    """Return the wall seconds of a step."""
    return spread(median(turn.wall for turn in turns) for turns in one.rounds)


def cpu(one: Measured) -> Spread:
    """Return the CPU seconds of a step, summed over all ranks."""
    return spread(median(turn.cpu for turn in turns) for turns in one.rounds)


def speed(one: Measured, other: Measured) -> Spread:
    """Return the speed of a loop relative to `other`."""
    return _compared(one, other, lambda ours, theirs: theirs.wall / ours.wall)


def more_wall(one: Measured, other: Measured) -> Spread:
    """Return the additional wall seconds of a step compared with `other`."""
    return _compared(one, other, lambda ours, theirs: ours.wall - theirs.wall)


def more_cpu(one: Measured, other: Measured) -> Spread:
    """Return the additional CPU seconds of a step compared with `other`, over all ranks."""
    return _compared(one, other, lambda ours, theirs: ours.cpu - theirs.cpu)


def _compared(one: Measured, other: Measured, how: Callable[[Turn, Turn], float]) -> Spread:
    pairs = zip(one.rounds, other.rounds, strict=True)
    return spread(median(map(how, ours, theirs)) for ours, theirs in pairs)


# --- Markdown --------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Work of a step on all ranks: its units (tokens, images) and floating-point operations.

    `peak` is the device's peak rate in FLOP/s. None: unknown or irrelevant.
    """

    units: int
    unit: str = "tokens"
    flops: float | None = None
    peak: float | None = None


def steps_table(measured: Sequence[Measured], title: str, step: Step) -> list[str]:
    """Return a table of each loop's speed, also relative to the first loop."""
    first = measured[0]
    head = [title, "ms a step", f"{step.unit}/s", f"× {first.loop.title}", "least to most", "CPU ms a step"]
    head += ["TFLOP/s"] * bool(step.flops) + ["MFU"] * bool(step.flops and step.peak)
    rows = []
    for one in measured:
        seconds, times = wall(one).middle, speed(one, first)
        row = [one.loop.title, f"{1e3 * seconds:.2f}", f"{step.units / seconds:,.0f}", f"{times.middle:.3f}"]
        row += [f"{times.least:.3f} to {times.most:.3f}", f"{1e3 * cpu(one).middle:.2f}"]
        if step.flops:
            row += [f"{step.flops / seconds / 1e12:.3g}"]
        if step.flops and step.peak:
            row += [f"{100 * step.flops / seconds / step.peak:.1f} %"]
        rows.append(row)
    return markdown(head, rows)


def cost_table(measured: Sequence[Measured], title: str, step: float | None = None) -> list[str]:
    """Return a table of each loop's own overhead compared with the first loop, measured with a tiny model.

    `step`: seconds of the first loop's step with a real model, used to express the overhead as a share.
    """
    first = measured[0]
    head = [title, "µs a step", f"beyond {first.loop.title}", "least to most", "CPU beyond it", "least to most"]
    rows = []
    for one in measured:
        beyond, work = more_wall(one, first), more_cpu(one, first)
        row = [one.loop.title, f"{1e6 * wall(one).middle:,.0f}"]
        row += [f"{1e6 * beyond.middle:+,.0f}", f"{1e6 * beyond.least:+,.0f} to {1e6 * beyond.most:+,.0f}"]
        row += [f"{1e6 * work.middle:+,.0f}", f"{1e6 * work.least:+,.0f} to {1e6 * work.most:+,.0f}"]
        rows.append(row + ([f"{100 * beyond.middle / step:+.2f} %"] if step else []))
    return markdown([*head, *([f"of a real step ({1e3 * step:.1f} ms)"] if step else [])], rows)


def start_table(seconds: Mapping[str, Sequence[float]], title: str, *, against: str, empty: str) -> list[str]:
    """Return a table of start times in seconds: relative to the script `against`, and minus those of `empty`."""
    head = [title, "s", f"× {against}", "least to most", f"s beyond {empty}"]
    rows = []
    for name, found in seconds.items():
        times = spread(ours / theirs for ours, theirs in zip(found, seconds[against], strict=True))
        beyond = spread(ours - theirs for ours, theirs in zip(found, seconds[empty], strict=True))
        row = [name, f"{median(found):.2f}", f"{times.middle:.2f}", f"{times.least:.2f} to {times.most:.2f}"]
        rows.append([*row, f"{beyond.middle:.2f}"])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned numbers, and an empty line."""
    under = ["---", *("---:" for _ in head[1:])]
    return [*(f"| {' | '.join(row)} |" for row in (head, under, *rows)), ""]
