"""Show a run on this machine: `launch status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launcher.cli.options import Output
from launcher.cli.ui.gpu_monitor import Node
from launcher.gcp.storage import open_folder
from launcher.rehearsal.attempts import End

if TYPE_CHECKING:
    from launcher.cli.flows.find_local_run import LocalRun
    from launcher.runs.metrics.progress import Progress


class Attempt(Struct, frozen=True):
    """One attempt: its number, the facts in its lock, and how it ended (None: not recorded)."""

    number: int
    facts: Mapping[str, Any]
    end: End | None

    def to_dict(self) -> dict[str, Any]:
        """Return the attempt for scripts; times in Unix seconds."""
        return {
            "number": self.number,
            "machine": self.facts.get("machine"),
            "provisioning": self.facts.get("provisioning"),
            "time": self.facts.get("time"),
            "exit_codes": self.end.exit_codes if self.end else None,
            "seconds": self.end.seconds if self.end else None,
            "ended": self.end.time if self.end else None,
        }


class LocalSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of a run folder."""

    attempts: tuple[Attempt, ...]
    is_running: bool
    progress: Progress | None
    nodes: tuple[Node, ...]

    @property
    def state(self) -> str:
        """Return the state, as in the cloud; INTERRUPTED: the process ended without recording how."""
        if self.is_running:
            return "RUNNING"
        if not self.attempts:
            return "UNKNOWN"
        end = self.attempts[-1].end
        return "INTERRUPTED" if end is None else "SUCCEEDED" if end.succeeded else "FAILED"


def show_local(run: LocalRun, output: Output) -> None:
    """Show a run on this machine. Raises LaunchError: its folder is unreadable."""
    from launcher.cli.ui.documents import printed

    snapshot = read_snapshot(run)
    if output is Output.text:
        print("\n".join(lines(run, snapshot)))
    else:
        printed(as_data(run, snapshot), output)


def read_snapshot(run: LocalRun) -> LocalSnapshot:
    """Read a run folder. Raises LaunchError."""
    from launcher.cli.ui.gpu_monitor import read_nodes
    from launcher.gcp.storage import use_errors
    from launcher.rehearsal.attempts import newest_attempt, read_end, read_facts
    from launcher.rehearsal.folder_lock import is_taken
    from launcher.runs.metrics.progress import ProgressReader

    storage = open_folder(str(run.folder))
    with use_errors():
        is_running = is_taken(run.folder)
        last = newest_attempt(storage)
        attempts = tuple(
            Attempt(number, read_facts(storage, number), read_end(storage, number)) for number in range(1, last + 1)
        )
    progress = ProgressReader(storage, attempt=max(1, last)).read_new()
    return LocalSnapshot(attempts=attempts, is_running=is_running, progress=progress, nodes=read_nodes(storage))


def lines(run: LocalRun, snapshot: LocalSnapshot) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    from launcher.cli.ui import gpu_monitor
    from launcher.cli.ui.event_printer import STATES, progress_text
    from launcher.cli.ui.plan_page import LABEL, WIDTH, labelled, wrapped
    from launcher.cli.ui.run_summary import relative
    from launcher.cli.ui.text import stamp

    end = snapshot.attempts[-1].end if snapshot.attempts else None
    after = f" after {ended_after(end)}" if end and not snapshot.is_running else ""
    yield from wrapped(f"{run.id}  {STATES.get(snapshot.state, snapshot.state.lower())}{after}", WIDTH)
    yield ""
    yield from labelled("machine", "this machine")
    yield f"{'folder':{LABEL}}{relative(str(run.folder))}"
    if snapshot.attempts and (time := snapshot.attempts[-1].facts.get("time")):
        yield f"{'started':{LABEL}}{stamp(time)}"
    if end and not snapshot.is_running:
        yield f"{'ended':{LABEL}}{stamp(end.time)}"
    if snapshot.progress:
        yield from labelled("progress", progress_text(snapshot.progress))
    for number, text in enumerate(gpu_monitor.lines(snapshot.nodes)):
        yield from labelled("" if number else "GPUs", text)
    for attempt in snapshot.attempts:
        how = attempt_text(attempt, is_running=snapshot.is_running and attempt is snapshot.attempts[-1])
        yield from labelled("" if attempt.number > 1 else "attempts", f"{attempt.number}. {how}")


def attempt_text(attempt: Attempt, *, is_running: bool) -> str:
    """Return `succeeded after 7 s` or `failed after 7 s: workerpool0-0 exited with 1`."""
    if attempt.end is None:
        return "running" if is_running else "interrupted"
    if attempt.end.succeeded:
        return f"succeeded after {ended_after(attempt.end)}"
    failed = (f"{name} exited with {code}" for name, code in attempt.end.exit_codes.items() if code)
    return f"failed after {ended_after(attempt.end)}: {', '.join(failed)}"


def ended_after(end: End) -> str:
    """Return how long an attempt took."""
    from launcher.cli.ui.text import elapsed

    return elapsed(end.seconds)


def as_data(run: LocalRun, snapshot: LocalSnapshot) -> dict[str, Any]:
    """Return the run for scripts, with the keys of a run in the cloud; those that need a cloud are null."""
    import msgspec

    first, last = (snapshot.attempts[0], snapshot.attempts[-1]) if snapshot.attempts else (None, None)
    return {
        "run": run.id,
        "state": snapshot.state,
        "job": None,
        "region": "local",
        "zone": None,
        "machine": last.facts.get("machine") if last else None,
        "provisioning": last.facts.get("provisioning") if last else None,
        "image": None,
        "output": str(run.folder),
        "created": first.facts.get("time") if first else None,
        "started": last.facts.get("time") if last else None,
        "ended": last.end.time if last and last.end and not snapshot.is_running else None,
        "error": None,
        "console": None,
        "labels": {},
        "progress": msgspec.to_builtins(snapshot.progress),
        "nodes": [node.to_dict() for node in snapshot.nodes],
        "attempts": [attempt.to_dict() for attempt in snapshot.attempts],
        "jobs": [],
    }
