"""Show a run on this machine: `launch status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launch_train.common import contract
from launcher.cli.options import Output
from launcher.cli.ui.streams import say
from launcher.gcp.storage import open_folder
from launcher.runs.local_records import read_record, time_of
from launcher.runs.metrics.gpu_nodes import Node
from launcher.services.local.attempts import End, state_of

if TYPE_CHECKING:
    from launcher.errors import LaunchError
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.metrics.progress import Progress
    from launcher.runs.run_story import RunStory


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
            "time": time_of(self.facts),
            "exit_codes": self.end.exit_codes if self.end else None,
            "seconds": self.end.seconds if self.end else None,
            "ended": self.end.time if self.end else None,
        }


class LocalSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of a run folder."""

    attempts: tuple[Attempt, ...]
    is_running: bool
    is_cancelled: bool = False
    """`launch cancel` stopped the newest attempt, or is about to."""
    labels: Mapping[str, str] = {}
    progress: Progress | None
    nodes: tuple[Node, ...]
    problem: str = ""
    """Why the folder could not be read completely."""

    @property
    def state(self) -> str:
        """Return the state, as in the cloud. INTERRUPTED: the process ended without recording how; UNKNOWN: a record
        is unreadable."""
        if self.problem and not self.is_running:
            return "UNKNOWN"
        end = self.attempts[-1].end if self.attempts else None
        return state_of(len(self.attempts), end, is_running=self.is_running, is_cancelled=self.is_cancelled)


def show_local(run: LocalRun, output: Output, error: LaunchError | None = None, *, events: bool = False) -> None:
    """Show a run on this machine; `error` ends the command. Raises LaunchError: its folder is unreadable."""
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.story_text import event_lines, events_data, story_data
    from launcher.runs.find_local_run import shown
    from launcher.runs.run_story import local_story

    snapshot = read_snapshot(run)
    number = snapshot.attempts[-1].number if snapshot.attempts else 0
    story = local_story(run, is_running=snapshot.is_running, number=number, whole=events)
    if snapshot.problem and not snapshot.is_running:
        story = story._replace(advice=f"restore that file, or delete the run: launch rm {shown(run)}")
    if output is Output.text:
        print("\n".join([*lines(run, snapshot, story), *(event_lines(story.run) if events else ())]))
        return
    if snapshot.problem:
        say(f"{run.id}: {snapshot.problem}")
    data = as_data(run, snapshot) | story_data(story.chapters, story.cap, story.advice)
    printed(data | ({"events": events_data(story.run)} if events else {}), output, error)


def read_snapshot(run: LocalRun) -> LocalSnapshot:
    """Read a run folder. Raises LaunchError."""
    from launcher.gcp.storage import use_errors
    from launcher.runs.metrics.gpu_nodes import read_nodes
    from launcher.runs.metrics.progress import ProgressReader
    from launcher.services.local.attempts import attempt_numbers, read_end, read_facts
    from launcher.services.local.folder_lock import is_taken

    storage = open_folder(str(run.folder))
    with use_errors():
        is_running = is_taken(run.folder)
        numbers = attempt_numbers(storage)
        attempts = tuple(Attempt(number, read_facts(storage, number), read_end(storage, number)) for number in numbers)
    last = max(numbers, default=0)
    progress = ProgressReader(storage, attempt=max(1, last)).read_new()
    record = read_record(run.folder)
    return LocalSnapshot(
        attempts=attempts,
        is_running=is_running,
        is_cancelled=(run.folder / contract.attempt_cancel(last)).exists(),
        labels=record.labels if record else {},
        progress=progress,
        nodes=read_nodes(storage),
        problem=record.problem if record else "",
    )


def lines(run: LocalRun, snapshot: LocalSnapshot, story: RunStory) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    from launch_train.common.text import elapsed
    from launcher.cli.ui import gpu_monitor
    from launcher.cli.ui.event_printer import STATES
    from launcher.cli.ui.plan_page import LABEL, WIDTH, labelled, wrapped
    from launcher.cli.ui.story_text import story_lines
    from launcher.cli.ui.text import stamp
    from launcher.runs.find_local_run import relative

    end = snapshot.attempts[-1].end if snapshot.attempts else None
    if snapshot.problem and not snapshot.is_running:
        end = None  # of a run whose state is unknown, no time is given
    after = f" after {elapsed(end.seconds)}" if end and not snapshot.is_running else ""
    yield from wrapped(f"{run.id}  {STATES.get(snapshot.state, snapshot.state.lower())}{after}", WIDTH)
    yield ""
    if snapshot.problem:
        yield from labelled("problem", snapshot.problem)
    yield from story_lines(story.chapters, story.cap, story.advice, snapshot.progress)
    for label, text in gpu_monitor.labelled_lines(snapshot.nodes):
        yield from labelled(label, text)
    yield ""
    yield from labelled("machine", "this machine")
    yield f"{'folder':{LABEL}}{relative(str(run.folder))}"
    if snapshot.attempts and (time := time_of(snapshot.attempts[-1].facts)):
        yield f"{'started':{LABEL}}{stamp(time)}"
    if end and not snapshot.is_running:
        yield f"{'ended':{LABEL}}{stamp(end.time)}"


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
        "created": time_of(first.facts) if first else None,
        "started": time_of(last.facts) if last else None,
        "ended": last.end.time if last and last.end and not snapshot.is_running else None,
        "error": None,
        "console": None,
        "labels": dict(snapshot.labels),
        "progress": msgspec.to_builtins(snapshot.progress),
        "nodes": [node.to_dict() for node in snapshot.nodes],
        "attempts": [attempt.to_dict() for attempt in snapshot.attempts],
        "jobs": [],
    }
