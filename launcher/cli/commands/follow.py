"""`launch follow`: watch a run, and start its remaining attempts in the cloud."""

from __future__ import annotations

from launcher.cli.flows.find_run import find_run
from launcher.cli.flows.launch import follow_run
from launcher.cli.options import Last, Output, OutputFormat, Regions, RunName, WatchFor


def follow(
    run: RunName,
    *,
    regions: Regions = None,
    last: Last = False,
    watch_for: WatchFor = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Watch a run to its end.

    Prints the job's states, log lines and progress, and starts the next attempt when one ends for lack of capacity.
    Ctrl-C stops watching; the run continues.
    """
    follow_run(find_run(run, regions, last=last), output_format, watch_seconds=watch_for)
