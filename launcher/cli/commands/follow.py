"""`launch follow`: watch a run, and start its remaining attempts in the cloud."""

from __future__ import annotations

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
    from launcher.cli.flows.find_run import find_run
    from launcher.cli.ui.text import flag_seconds
    from launcher.runs.find_local_run import LocalRun

    seconds = None if watch_for is None else flag_seconds(watch_for, "--watch-for")
    found = find_run(run, regions, last=last)
    if isinstance(found, LocalRun):
        from launcher.cli.flows.local_output import follow_local

        follow_local(found, output_format, watch_seconds=seconds)
    else:
        from launcher.cli.flows.cloud import of_run
        from launcher.cli.flows.launch import follow_run

        follow_run(of_run(run)[0], found, output_format, watch_seconds=seconds)
