"""`launch runs`: list the runs on this machine and in the cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from launcher.cli.help_page import WHERE, option
from launcher.cli.options import AllRuns, Mine, Output, OutputFormat, Regions


def runs(
    *,
    local: Annotated[bool, option(WHERE, "--local", help="Only runs on this machine.")] = False,
    cloud: Annotated[bool, option(WHERE, "--cloud", help="Only runs in the cloud.")] = False,
    folder: Annotated[
        Path | None, option(WHERE, "--folder", help="Folder of the local runs; default: ./runs.", metavar="DIR")
    ] = None,
    regions: Regions = None,
    mine: Mine = False,
    states: Annotated[
        list[str] | None,
        option(WHERE, "--state", help="Only runs in this state (running, failed …); repeatable.", metavar="STATE"),
    ] = None,
    name: Annotated[
        str | None, option(WHERE, "--name", help="Only runs of this name; * stands for any text.", metavar="NAME")
    ] = None,
    labels: Annotated[
        list[str] | None,
        option(WHERE, "--label", help="Only runs with this label; repeatable.", metavar="KEY[=VALUE]"),
    ] = None,
    since: Annotated[
        str | None, option(WHERE, "--since", help="Only runs that began within this time (12h, 7d).", metavar="TIME")
    ] = None,
    everything: AllRuns = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """List runs, on this machine and in the cloud.

    Newest first. Finds local runs in ./runs, and runs in the cloud by the labels of their jobs. COST is the cost of
    the machines so far, without disks.
    """
    from launcher.cli.flows.runs import check_states, label_filter, show_runs, start_time
    from launcher.runs.run_list import RunFilter

    wanted = RunFilter(
        mine=mine,
        states=check_states(states or ()),
        name=name,
        labels=label_filter(labels or ()),
        since=start_time(since),
    )
    show_runs(wanted, output_format, local=local, cloud=cloud, folder=folder, regions=regions, everything=everything)
