"""`launch logs`: print the log of a run's job."""

from __future__ import annotations

from typing import Annotated

from launcher.cli.help_page import COMMON, OUTPUT, option
from launcher.cli.options import Output, Regions, RunName


def logs(
    run: RunName,
    *,
    regions: Regions = None,
    follow: Annotated[bool, option(OUTPUT, "-f", "--follow", help="Print new lines until the job ends.")] = False,
    tail: Annotated[
        int | None,
        option(OUTPUT, "--tail", help="Print only the last N lines.", metavar="N", min=0),
    ] = None,
    output_format: Annotated[
        Output, option(COMMON, "-o", help="Output format; json: one line for each entry.")
    ] = Output.text,
) -> None:
    """Print the log of a run's job.

    Reads Cloud Logging, or else the run's folder. Prints the newest attempt; `launch status` lists the other jobs.
    """
    from launcher.cli.flows.cloud import here
    from launcher.cli.flows.find_run import one_job, searched
    from launcher.cli.flows.print_logs import show

    cloud = here()
    show(cloud, one_job(cloud, run, searched(regions)), output_format, tail=tail, follow=follow)
