"""`launch logs`: print the log of a run."""

from __future__ import annotations

from typing import Annotated

from launcher.cli.flows.find_run import find_run
from launcher.cli.flows.print_logs import print_log
from launcher.cli.help_page import COMMON, OUTPUT, option
from launcher.cli.options import Last, Output, Regions, RunName


def logs(
    run: RunName,
    *,
    regions: Regions = None,
    last: Last = False,
    follow: Annotated[bool, option(OUTPUT, "-f", "--follow", help="Print new lines until the run ends.")] = False,
    tail: Annotated[
        int | None,
        option(OUTPUT, "--tail", help="Print only the last N lines.", metavar="N", min=0),
    ] = None,
    output_format: Annotated[
        Output, option(COMMON, "-o", help="Output format; json: one line for each entry.")
    ] = Output.text,
) -> None:
    """Print the log of a run.

    Reads Cloud Logging, or else the run's folder. Prints the newest job (`launch status` lists the others). Of a
    run on this machine it prints all attempts; with --tail, only the newest.
    """
    found = find_run(run, regions, last=last)
    job = next((job for job in found.jobs if run in (job.name, job.id)), found.job)
    print_log(found, job, output_format, tail=tail, follow=follow)
