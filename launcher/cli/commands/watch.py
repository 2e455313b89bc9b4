"""`launch watch`: show runs live."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Last, Regions, WatchFor


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Names, IDs or folders of runs, or a sweep.")],
    *,
    regions: Regions = None,
    last: Last = False,
    watch_for: WatchFor = None,
    plain: Annotated[bool, option(OUTPUT, "--plain", help="Print lines, as without a terminal.")] = False,
) -> None:
    """Show one or several runs live, until they end.

    Shows progress, curves, GPUs, cost, attempts and the last lines of output. Only watches: launch follow also starts
    the remaining attempts. Keys: q quits, c cancels a run, r opens its report, w its page in the console.
    """
    from launcher.cli.flows.watch import watch_runs
    from launcher.cli.ui.text import flag_seconds

    seconds = None if watch_for is None else flag_seconds(watch_for, "--watch-for")
    watch_runs(runs, regions, last=last, watch_seconds=seconds, plain=plain)
