"""List runs: `launch runs`, and `launch status` without a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from launcher.cli.options import Output
from launcher.cli.ui import run_table
from launcher.errors import UsageError
from launcher.jobs.job import SWEEP_LABEL
from launcher.runs.find import RUNS
from launcher.runs.run_list import RunFilter, list_runs
from launcher.text import did_you_mean, either, near

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
    from launcher.cli.flows.cloud import here, say_not_searched

    run_list = list_runs(here, wanted, only_target(local, cloud, folder, regions), folder or Path(RUNS), regions)
    if output is not Output.text:
        from launcher.cli.ui.documents import printed

        printed(run_table.list_data(run_list), output)
        return
    width = max(run_table.WIDTH, shutil.get_terminal_size().columns)
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


def check_states(names: Sequence[str]) -> tuple[str, ...]:
    """Return the values of --state. Raises UsageError: no state has this name."""
    for name in names:
        if name.lower() not in STATES:
            raise UsageError(f"--state: no state {name!r}", did_you_mean(near(name, STATES), f"Use {either(STATES)}."))
    return tuple(names)


def label_filter(texts: Sequence[str]) -> dict[str, str | None]:
    """Return the labels of --label KEY=VALUE, or KEY for any value. Raises UsageError: the key is missing."""
    labels: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key:
            raise UsageError(f"--label {text} has no key", "Use --label KEY=VALUE or --label KEY.")
        labels[key] = value if equals else None
    return labels


def start_time(text: str | None) -> float | None:
    """Return the Unix time of --since, or None. Raises UsageError."""
    from launcher.cli.ui.text import flag_seconds

    return None if text is None else time.time() - flag_seconds(text, "--since")
