"""`launch compare`: show what differs between runs, and their figures side by side."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from launcher.cli.flows.find_run import run_folder_of
from launcher.cli.flows.report import read_whole_run
from launcher.cli.options import Last, Output, OutputFormat, Regions
from launcher.cli.ui import compare_page
from launcher.cli.ui.documents import printed
from launcher.errors import UsageError
from launcher.gcp.storage import read_errors


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Names, IDs or folders of two or more runs.")],
    *,
    regions: Regions = None,
    last: Last = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Compare two or more runs.

    Shows what differs in their specs, code, image and machine. Below are the metrics (final, best, and at the newest
    step that all runs have), speed, time, goodput and cost, each with its difference from the first run.
    """

    if len(runs) < 2:
        raise UsageError(f"only one run to compare: {runs[0]}", "Name another: launch compare RUN RUN")
    folders = [run_folder_of(run, regions, last=last) for run in runs]
    with read_errors():
        compared = compare_page.compared([read_whole_run(storage) for _, storage in folders], time.time())
    printed(compare_page.comparison_data(compared), output_format, page=compare_page.comparison_lines(compared))
