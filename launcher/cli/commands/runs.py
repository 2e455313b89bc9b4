"""`launch runs`: list the runs on this machine and in the cloud."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from launcher.cli.flows.cloud import here, say_not_searched
from launcher.cli.help_page import WHERE, option
from launcher.cli.options import AcceptHostKey, AllRuns, Mine, Output, OutputFormat, Regions, time_option
from launcher.cli.ui import run_table
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import WIDTH
from launcher.errors import UsageError, refuse_with
from launcher.jobs.job import SWEEP_LABEL
from launcher.remote.connection import connect_to
from launcher.runs.find import RUNS
from launcher.runs.on_host import HostContext, remembered_hosts
from launcher.runs.run_list import RunFilter, RunList, list_runs
from launcher.text import did_you_mean, either, near


def runs(
    *,
    local: Annotated[bool, option(WHERE, "--local", help="Only runs on this machine.")] = False,
    cloud: Annotated[bool, option(WHERE, "--cloud", help="Only runs in the cloud.")] = False,
    on: Annotated[
        str | None, option(WHERE, "--on", help="Only runs on this host, by SSH (here: this-machine).", metavar="HOST")
    ] = None,
    accept_host_key: AcceptHostKey = False,
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
        float | None,
        time_option(WHERE, "--since", "Only runs that began within this time (12h, 7d)."),
    ] = None,
    everything: AllRuns = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """List runs, on this machine and in the cloud.

    Newest first. Finds local runs in ./runs, and runs in the cloud by the labels of their jobs; --on HOST lists those
    on a host or in its Slurm. COST is the cost of the machines so far, without disks.
    """
    for state in states or ():
        if state.lower() not in STATES:
            use = did_you_mean(near(state, STATES), f"Use {either(STATES)}.")
            raise UsageError(f"--state: no state {state!r}", use)
    wanted = RunFilter(
        mine=mine,
        states=tuple(states or ()),
        name=name,
        labels=label_filter(labels or ()),
        since=None if since is None else time.time() - since,
    )
    if accept_host_key and not on:
        raise UsageError("--accept-host-key needs a host", "Name it: --on HOST")
    if on:
        refuse_with(
            "--on", {"--local": local, "--cloud": cloud, "--folder": folder, "--region": regions, "--mine": mine}
        )
        host = HostContext(connection=connect_to(on, accept_host_key=accept_host_key))
        show_list(list_runs(lambda: host, wanted, "cloud"), wanted, output_format, everything=everything)
        return
    show_runs(wanted, output_format, local=local, cloud=cloud, folder=folder, regions=regions, everything=everything)


SHOWN_HOSTS: Final = 4
RECENT_SECONDS: Final = 7 * 86400.0
"""Hosts of older runs are not named."""
STATES: Final = (
    *("queued", "pending", "running", "succeeded", "failed", "cancelling", "cancelled", "paused", "expired"),
    *("updating", "partially_succeeded", "interrupted", "unknown", "deleted"),
)


def show_runs(
    wanted: RunFilter,
    output: Output,
    *,
    local: bool = False,
    cloud: bool = False,
    folder: Path | None = None,
    regions: Sequence[str] | None = None,
    everything: bool = False,
) -> None:
    """Print the runs that a filter asks for. Raises LaunchError: the cloud was asked for, and it cannot be listed."""
    target = only_target(local, cloud, folder, regions)
    run_list = list_runs(here, wanted, target, folder or Path(RUNS), regions)
    show_list(run_list, wanted, output, everything=everything)
    hosts = list(dict.fromkeys(remembered_hosts(lambda _run: True, since=time.time() - RECENT_SECONDS).values()))
    if target is None and hosts:
        name = hosts[0] if len(hosts) == 1 else "HOST"
        say(f"not listed: runs on {', '.join(hosts[:SHOWN_HOSTS])} (launch runs --on {name})")


def show_list(run_list: RunList, wanted: RunFilter, output: Output, *, everything: bool) -> None:
    if output is not Output.text:
        printed(run_table.list_data(run_list), output)
        return
    width = max(WIDTH, shutil.get_terminal_size().columns)
    fold = SWEEP_LABEL not in wanted.labels
    print("\n".join(run_table.run_lines(run_list, everything=everything, fold=fold, width=width)))
    if run_list.unlisted:
        say_not_searched(run_list.unlisted)


def only_target(
    local: bool, cloud: bool, folder: Path | None, regions: Sequence[str] | None
) -> Literal["local", "cloud"] | None:
    """Return where to list runs; None: everywhere. Raises UsageError: flags that cannot be combined."""
    here = {"--local": local, "--folder": folder is not None}
    there = {"--cloud": cloud, "--region": bool(regions)}
    if (flag := next((flag for flag, is_given in here.items() if is_given), "")) and (
        other := next((flag for flag, is_given in there.items() if is_given), "")
    ):
        raise UsageError(f"{flag} cannot be combined with {other}", "Remove one of them.")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--folder: {folder} is not a folder", "launch runs without --folder lists those in ./runs.")
    return "local" if any(here.values()) else "cloud" if any(there.values()) else None


def label_filter(texts: Sequence[str]) -> dict[str, str | None]:
    """Return the labels of --label KEY=VALUE, or KEY for any value. Raises UsageError: the key is missing."""
    labels: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key:
            raise UsageError(f"--label {text} has no key", "Use --label KEY=VALUE or --label KEY.")
        labels[key] = value if equals else None
    return labels
