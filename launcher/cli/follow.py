"""`launch follow`: watch a run in the cloud, and take its attempts up where another launch left them."""

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

    Its states, lines and progress; and its next attempts, where one ends for want of capacity. Ctrl-C leaves it to
    itself.
    """
    from launcher.cli.following import follow_run
    from launcher.cli.preemption import seconds_of
    from launcher.cli.runs import one_run, searched
    from launcher.cli.world import here

    seconds = None if watch_for is None else seconds_of(watch_for, "--watch-for")
    world = here()
    follow_run(world, one_run(world, run, searched(regions)), output_format, watch_seconds=seconds)
