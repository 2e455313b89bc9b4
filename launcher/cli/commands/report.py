"""`launch report`: write a page with the curves of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.flows.find_run import folders_of
from launcher.cli.flows.report import write_report
from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Last, Output, Regions
from launcher.errors import UsageError


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Names, IDs or folders of runs, or a sweep.")],
    *,
    target: Annotated[
        Path | None,
        option(OUTPUT, "--output", "-o", help="A file; default: in a local run's folder, else here.", metavar="FILE"),
    ] = None,
    show: Annotated[bool, option(OUTPUT, "--open", help="Open the page in the browser.")] = False,
    regions: Regions = None,
    last: Last = False,
) -> None:
    """Write an HTML report of runs or a sweep.

    The page shows a run's curves, times and costs, and what differs between several runs. It needs no network and no
    server. Its charts can be zoomed, and show values under the cursor.
    """
    if target and str(target) in [*Output]:
        raise UsageError(f"-o {target}: -o names the file here", f"For a file of that name: -o ./{target}")
    folders = dict(each for run in runs for each in folders_of(run, regions, last=last))
    path = write_report(folders, target, "-".join(runs) if len(folders) > len(runs) else "")
    print(path)
    if show:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
