"""`launch follow`: watch a run in the cloud and start its remaining attempts."""

from __future__ import annotations

from launcher.cli.options import Output, OutputFormat, Regions, RunName, WatchFor


def follow(
    run: RunName,
    *,
    regions: Regions = None,
    watch_for: WatchFor = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Watch a run to its end.

    Prints the job's states, log lines and progress, and starts the next attempt when one ends for lack of capacity.
    Ctrl-C stops watching; the run continues.
    """
    from launcher.cli.flows.cloud import here
    from launcher.cli.flows.find_run import one_run, searched
    from launcher.cli.flows.launch import follow_run
    from launcher.cli.ui.text import flag_seconds

    seconds = None if watch_for is None else flag_seconds(watch_for, "--watch-for")
    cloud = here()
    follow_run(cloud, one_run(cloud, run, searched(regions)), output_format, watch_seconds=seconds)
