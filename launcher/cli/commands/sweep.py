"""`launch sweep`: run a spec once for each of several settings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.cli.commands.vertex import NoPreflight
from launcher.cli.help_page import OUTPUT, RUN, WHERE, option
from launcher.cli.options import (
    BuilderFlag,
    CreateRepository,
    DryRun,
    Flags,
    Offline,
    Output,
    OutputFormat,
    SpecFile,
    WatchFor,
    Yes,
    flags_of,
    gather,
)
from launcher.cli.ui.documents import printed
from launcher.cli.ui.plan_page import closing_lines, machine_lines, target_text
from launcher.cli.ui.text import WIDTH, columns, labelled
from launcher.errors import UsageError, refuse_with
from launcher.inputs.code_files import CodeCache
from launcher.plan.model import Target
from launcher.runs.sweep.plan import SweepPlan, plan_sweep, point_settings
from launcher.spec.sweep import parse_axes
from launcher.text import plural, usd_text

To = Literal["local", "vertex", "vm"]
Where = Annotated[To, option(WHERE, "--to", help="Vertex AI, VMs, or this machine.")]
Random = Annotated[int | None, option(RUN, "--random", help="Draw N random points instead of the grid.", metavar="N")]
Seed = Annotated[int | None, option(RUN, "--seed", help="Seed of the random points; default: 0.", metavar="N")]
Parallel = Annotated[
    int | None,
    option(
        RUN,
        "--max-parallel",
        help="Points at a time; default: all, or on this machine what its GPUs allow (at least 1).",
        metavar="N",
    ),
]
Detach = Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as all jobs are created.")]
Retry = Annotated[bool, option(RUN, "--retry-failed", help="Also run failed points again.")]


def sweep(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    to: Where = "vertex",
    random: Random = None,
    seed: Seed = None,
    max_parallel: Parallel = None,
    retry_failed: Retry = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    no_preflight: NoPreflight = False,
    watch_for: WatchFor = None,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    yes: Yes = False,
    offline: Offline = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a spec once for each combination of several values.

    A --set with several values (lr=1e-4,3e-4) is swept; with --random it may be a range: log(1e-5,1e-2),
    uniform(0,0.3), int(1,8). limits.usd limits the cost of all points together. The same command continues the sweep.
    """
    flags = flags_of(ctx)
    check_sweep_flags(dry_run, detach, watch_for, to, max_parallel, flags)
    for flag, count in {"--random": random, "--max-parallel": max_parallel}.items():
        if count is not None and count < 1:
            raise UsageError(f"{flag} {count}: expected at least 1", f"For example: {flag} 4")
    if seed is not None and random is None:
        raise UsageError("--seed needs --random", "A grid has no random points. For example: --random 20")
    planned = plan_of(to, spec, flags, random=random, seed=seed or 0, offline=offline)
    if dry_run:
        printed(planned.to_dict(), output_format, page=sweep_lines(planned))
        return
    from launcher.cli.flows.launch import LaunchOptions
    from launcher.cli.flows.sweep import run_sweep
    from launcher.runs.submit import SubmitOptions

    options = LaunchOptions(
        detach=detach,
        target=planned.target,
        watch_seconds=watch_for,
        yes=yes,
        offline=offline,
        submit=SubmitOptions(builder=builder, create_repository=create_repository, preflight=not no_preflight),
    )
    run_sweep(planned, options, output_format, spec, flags, max_parallel=max_parallel, retry_failed=retry_failed)


def check_sweep_flags(
    dry_run: bool, detach: bool, watch_for: float | None, to: To, max_parallel: int | None, flags: Flags
) -> None:
    """Check combinations of flags. Raises UsageError."""
    if flags.run_id is not None:
        raise UsageError("--run-id cannot be used in a sweep", "Each point has its own run ID; --name names the sweep.")
    watched = {"--detach": detach, "--watch-for": watch_for}
    if dry_run:
        refuse_with("--dry-run", watched)
    if to == "local":
        refuse_with("--to local", watched, "Points on this machine end with the command.")
    if detach and (watch_for or max_parallel):
        other = "--watch-for" if watch_for else "--max-parallel"
        raise UsageError(
            f"{other} cannot be combined with --detach", "--detach submits all points and returns. Remove one of them."
        )


def plan_of(
    target: Target, spec: Path | None, flags: Flags, *, random: int | None, seed: int, offline: bool
) -> SweepPlan:
    """Return the plan of a sweep; `--name` is its name. Raises as `plan_sweep` does."""
    single, axes = parse_axes(flags.set or ())
    of_point = partial(gather, target, spec, flags._replace(set=single, name=None), cache=CodeCache())
    name = flags.name or ""
    return plan_sweep(lambda point: of_point(more=point), axes, random=random, seed=seed, name=name, offline=offline)


def sweep_lines(sweep: SweepPlan) -> Iterator[str]:
    """Yield the page of a planned sweep, in at most 80 columns."""
    first = sweep.points[0].plan
    yield f"{sweep.name}  {plural(len(sweep.points), 'point')} on {target_text(sweep.target, sweep.project)}"
    yield ""
    yield from labelled("machine", next(machine_lines(first, explain=False)))
    yield from labelled("output", sweep.output)
    yield from labelled("at most", total_text(sweep))
    yield ""
    yield from point_table(sweep)
    yield from closing_lines(sweep.warnings, sweep.target)


def total_text(sweep: SweepPlan) -> str:
    """Return the upper bound of all points together, with `limits.usd`."""
    if sweep.target == "local":
        return "nothing: it runs on this machine"
    total, limit = sweep.usd_at_most, sweep.usd_limit
    text = "unknown: the price of a machine is unknown" if total is None else f"{usd_text(total)} for all points"
    return f"{text} (limits.usd: {usd_text(limit)})" if limit is not None else text


def point_table(sweep: SweepPlan) -> Iterator[str]:
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
