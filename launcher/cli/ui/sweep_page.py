"""Print the plan of a sweep: a table of its points, or JSON with their requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.cli.options import Output
from launcher.cli.ui.documents import printed
from launcher.cli.ui.plan_page import WIDTH, closing_lines, labelled, machine_lines, target_text
from launcher.cli.ui.text import columns
from launcher.runs.sweep.plan import point_settings
from launcher.text import plural, usd_text

if TYPE_CHECKING:
    from launcher.runs.sweep.plan import SweepPlan


def show(sweep: SweepPlan, output: Output) -> None:
    """Print a planned sweep."""
    printed(sweep.to_dict(), output, page=page(sweep))


def page(sweep: SweepPlan) -> Iterator[str]:
    """Yield the page of a planned sweep, in at most 80 columns."""
    first = sweep.points[0].plan
    yield f"{sweep.name}  {plural(len(sweep.points), 'point')} on {target_text(sweep.target, sweep.project)}"
    yield ""
    yield from labelled("machine", next(machine_lines(first, explain=False)))
    yield from labelled("output", sweep.output)
    yield from labelled("at most", total_text(sweep))
    yield ""
    yield from table(sweep)
    yield from closing_lines(sweep.warnings, sweep.target)


def total_text(sweep: SweepPlan) -> str:
    """Return the upper bound of all points together, with `limits.usd`."""
    if sweep.target == "local":
        return "nothing: it runs on this machine"
    total, limit = sweep.usd_at_most, sweep.usd_limit
    text = "unknown: the price of a machine is unknown" if total is None else f"{usd_text(total)} for all points"
    return f"{text} (limits.usd: {usd_text(limit)})" if limit is not None else text


def table(sweep: SweepPlan) -> Iterator[str]:
    """Yield a line for each point: its settings in columns, or in one column if the columns are too wide."""
    bounds = ["" if (usd := point.plan.limits.usd_at_most) is None else usd_text(usd) for point in sweep.points]
    cost = sweep.target != "local"
    ends = [[point.run, *([bound] if cost else [])] for point, bound in zip(sweep.points, bounds, strict=True)]
    settings = point_settings([point.values for point in sweep.points])
    head = ["point", *settings[0], "run", *(["at most"] if cost else [])]
    rows = [
        [str(number), *texts.values(), *end] for number, (texts, end) in enumerate(zip(settings, ends, strict=True), 1)
    ]
    lines = [*columns([head, *rows])]
    if max(map(len, lines)) <= WIDTH:
        yield from lines
        return
    yield from columns(
        [["point", *head[-len(ends[0]) :]], *([row[0], *end] for row, end in zip(rows, ends, strict=True))]
    )
    yield ""
    for number, texts in enumerate(settings, 1):
        yield from labelled(str(number), " ".join(f"{name}={value}" for name, value in texts.items()))
