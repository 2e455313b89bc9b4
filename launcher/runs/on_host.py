"""A host that is reached by SSH as a place of runs, and which host has a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

import launcher.clock
from launcher.remote.connection import Connection
from launcher.runs.ledger import Ledger
from launcher.services.hosts.service import OnHost

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.clock import Clock
    from launcher.jobs.job import Job
    from launcher.runs.attempts import AttemptEntry
    from launcher.runs.logs.folder_logs import TextLogReader
    from launcher.services.base import Listing


class HostContext(Struct, frozen=True, kw_only=True):
    """One host, and the clock."""

    connection: Connection
    notice: Callable[[str], None] = lambda _text: None

    @property
    def project(self) -> str:
        """Return the host's name."""
        return self.connection.host.name

    @property
    def clock(self) -> Clock:
        return launcher.clock.REAL

    @property
    def service(self) -> OnHost:
        return OnHost(self.connection)

    def with_notice(self, say: Callable[[str], None]) -> HostContext:
        """Return this host with another receiver of messages."""
        return HostContext(connection=self.connection, notice=say)

    def of_run(self, folder: Storage | None) -> OnHost:
        return self.service

    def find_jobs(self, filter_: str, regions: Sequence[str], *, all_vms: bool = False) -> Listing:
        """Return the host's jobs that match a filter of labels. Raises LaunchError: it can't be read."""
        return self.service.find(filter_, regions)

    def attempts(self, folder: Storage) -> tuple[AttemptEntry, ...]:
        """Return the attempts that the ledger in a run folder records. Raises LaunchError."""
        return Ledger(folder, self.clock).entries()

    def open_log(
        self, job: Job, folder: Storage | None, say: Callable[[str], None], *, attempt: int = 0, tail: int | None = None
    ) -> TextLogReader:
        """Return the reader of the output in the run folder. Raises LaunchError."""
        from launcher.gcp.storage import open_folder
        from launcher.runs.logs.folder_logs import TextLogReader
        from launcher.services import request

        storage = folder or open_folder(request.run_folder(job.request) or "")
        return TextLogReader(storage, attempt or None, tail=tail)


def host_records() -> Path:
    """Return the folder in which this machine remembers the host of each run: a file for each run ID."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "launch", "hosts")


def remember(run: str, host: str | None) -> None:
    """Remember which host has a run; None: it is on no host any more."""
    if host is None:
        (host_records() / run).unlink(missing_ok=True)
        return
    host_records().mkdir(parents=True, exist_ok=True)
    (host_records() / run).write_text(f"{host}\n", encoding="utf-8")


def remembered_hosts(is_wanted: Callable[[str], bool], since: float = 0.0) -> dict[str, str]:
    """Return the hosts of the runs whose ID is wanted, by ID, the newest first. `since`: remembered after this time."""
    try:
        paths = sorted(host_records().iterdir(), key=lambda path: -path.stat().st_mtime)
        return {
            path.name: path.read_text(encoding="utf-8").strip()
            for path in paths
            if is_wanted(path.name) and path.stat().st_mtime >= since
        }
    except OSError:
        return {}


def host_and_run(text: str) -> tuple[str, str] | None:
    """Return the host and the run's ID or name in ssh://HOST/…/RUN or HOST:RUN; None: `text` is neither."""
    if match := re.fullmatch(r"ssh://([^/]+)/(?:.*/)?([^/]+)/?", text):
        return match[1], match[2]
    match = re.fullmatch(r"((?:colab:)?[^/:\s]+(?::\d+)?):([a-z][a-z0-9-]*)", text)
    return (match[1], match[2]) if match else None
