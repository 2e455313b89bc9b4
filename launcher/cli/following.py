"""A run in the cloud, followed from this terminal: what it is looked at with, and the page at its end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.apply import running
from launcher.apply.book import NoLedger
from launcher.apply.endings import RunEnded, RunSucceeded
from launcher.apply.ledger import Ledger
from launcher.apply.running import Clock
from launcher.apply.vertex import Vertex
from launcher.cli.eyes import Looker
from launcher.cli.inputs import project
from launcher.cli.jobtext import run_folder_of
from launcher.cli.options import Output
from launcher.cli.runs import Run
from launcher.cli.show import LABEL
from launcher.cli.telling import Teller, attempt_of
from launcher.driver import Course, Gave, Took, drive, failure
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.jobs import GONE, Job
from launcher.plan.model import Plan

if TYPE_CHECKING:
    from launcher.apply.book import Book
    from launcher.results import Results
    from launcher.watch import Event, Eyes
    from train.storage import Storage


ENDS = {"CANCELLED": "was cancelled after", "EXPIRED": "expired after", GONE: "was deleted: seen to run for"}
"""Ends that are no failures of the job's own."""


class World(Struct, frozen=True, kw_only=True):
    """The cloud, as seen from here."""

    vertex: Vertex
    project: str
    clock: Clock


def world(name: str) -> World:
    """A project's. Endpoints and credentials are those of the environment."""
    gc.enable()  # from here on this process may live for days
    clock = running.REAL
    vertex = Vertex(name, os.environ, clock, notice=lambda text: print(f"launch: {text}", file=sys.stderr, flush=True))
    return World(vertex=vertex, project=name, clock=clock)


def here() -> World:
    """That of gcloud's own project. Raises UsageError: none is set."""
    return world(project("vertex", os.environ))


class Screen:
    """The driver's watcher: eyes for each job, and a teller. `job` is the newest that was seen."""

    def __init__(self, world: World, teller: Teller, folder: Storage | None) -> None:
        self._world = world
        self._teller = teller
        self._folder = folder
        self.job: Job | None = None

    def eyes(self, job: Job, number: int) -> Eyes:
        """Fresh ones for each job."""
        return Looker(self._world, job, number, self._folder, self._teller.say)

    def tell(self, event: Event | Took | Gave) -> None:
        """On to the terminal."""
        self.job = getattr(event, "job", None) or self.job
        self._teller(event)

    def said(self) -> str:
        """The first error in the job's lines."""
        return self._teller.error


def follow(
    world: World,
    made: Plan,
    output: Output,
    *,
    ready: Callable[[Plan], Plan],
    fresh: bool,
    resume: bool = False,
    detach: bool = False,
    watch_seconds: float | None = None,
) -> None:
    """See a plan's run to its end, and show that. Raises LaunchError: see `drive`."""
    teller = Teller(made)
    folder = made.run_folder
    book: Book = NoLedger(world.clock)
    if folder:
        book = Ledger.open(folder, world.clock, teller.say, project=world.project, region=made.attempts[0].region)
    screen = Screen(world, teller, storage_of(folder))
    course = Course(
        plan=made, vertex=world.vertex, book=book, watcher=screen, say=teller.say, ready=ready, clock=world.clock
    )
    with shown(screen, teller, made, made.run, output):
        teller.say(f"looking for jobs of {made.run}")  # the network may be slow, and nothing else would be said
        try:
            job = drive(course, fresh=fresh, resume=resume, detach=detach, watch_seconds=watch_seconds)
        except RunSucceeded as ended:
            teller.say(f"{ended.problem}\n{ended.hint}")
            if ended.job is None:  # Vertex AI keeps no job for ever
                show_gone(made, output)
                return
            job = ended.job
        show_end(job, made, output) if job.has_ended else show_begun(job, output)


def follow_run(world: World, run: Run, output: Output, *, watch_seconds: float | None = None) -> None:
    """See a run to its end from here on: its attempts too, where its folder has the plan. Raises LaunchError."""
    folder = run_folder_of(run.job)
    made = plan_of(folder)
    if made and made.run == run.id:
        follow(world, made, output, ready=unchanged, fresh=False, watch_seconds=watch_seconds)
        return
    teller = Teller(None)
    if run.is_active:
        teller.say("its folder has no plan that can be read: this job alone is followed, and nothing is tried after it")
    screen = Screen(world, teller, storage_of(folder))
    with shown(screen, teller, None, run.id, output):
        job = watched(world, screen, run.job, watch_seconds)
        show_end(job, None, output)


def watched(world: World, screen: Screen, job: Job, watch_seconds: float | None) -> Job:
    """One job to its end. Raises LaunchError: it ended badly, or `watch` did."""
    from launcher.asked import tried
    from launcher.verdicts import of_end
    from launcher.watch import watch

    screen.tell(Took(job=job, number=0, made=False))
    eyes = screen.eyes(job, 0)
    ended = watch(eyes, screen.tell, world.clock, wait_seconds=None, watch_seconds=watch_seconds).job
    verdict = of_end(ended, tried(world.project, ended.region, ended.request), screen.said())
    if verdict.kind != "succeeded":
        raise failure(ended, verdict)
    return ended


def unchanged(made: Plan) -> Plan:
    """The image is the plan's own."""
    return made


@contextmanager
def shown(screen: Screen, teller: Teller, made: Plan | None, run: str, output: Output) -> Iterator[None]:
    """A failure with what there is to show of its job; and what Ctrl-C, SIGTERM and SIGHUP leave behind."""
    try:
        with running.signals_stop():
            yield
    except LaunchError as error:
        last_words(teller)
        job = error.job if isinstance(error, RunEnded) else screen.job
        if job and isinstance(error, JobFailed | RunEnded):
            show_end(job, made, output)
        elif job:
            show_job(job, output)
        raise
    except KeyboardInterrupt:
        last_words(teller, left(screen.job, run))
        raise
    except BrokenPipeError:  # `launch … 2>&1 | head`: nobody reads on, and no success may be told of
        raise running.Stopped(signal.SIGPIPE) from None
    finally:
        last_words(teller)


def left(job: Job | None, run: str) -> str:
    """What goes on when nobody watches any longer."""
    if job is None:
        return f"interrupted before a job was seen\nlaunch status {run} shows whether one was made all the same"
    if job.is_over:
        return f"interrupted; its job has ended\nlaunch follow {run} shows the end, or makes the next attempt"
    what = "is being cancelled" if job.state == "CANCELLING" else "goes on"
    return f"no longer watching; the job {what}\nlaunch follow {run} watches it; launch cancel {run} ends it"


def last_words(teller: Teller, text: str = "") -> None:
    """Leave the terminal in order. It may have gone: then nobody is told."""
    try:
        teller.close()
        if text:
            teller.say(text)
    except OSError:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as we run


def plan_of(folder: str | None) -> Plan | None:
    """The plan in a run's folder; None where there is none that can be read."""
    try:
        return Ledger.open(folder).plan() if folder else None
    except LaunchError:
        return None


def stored_plan(run: Run) -> Plan:
    """The plan that a run was launched with. Raises UsageError: it isn't there."""
    folder = run_folder_of(run.job)
    made = plan_of(folder)
    if made is None or made.run != run.id:
        raise UsageError(
            f"the folder of {run.id} ({folder or 'none'}) has no plan that can be read",
            f"Name the spec: launch vertex SPEC --resume {run.id}",
        )
    return made


def storage_of(folder: str | None) -> Storage | None:
    """The run's folder; None where it can't be opened."""
    from launcher.apply.attempts import open_folder

    try:
        return open_folder(folder) if folder else None
    except LaunchError:
        return None


# --- What is shown -----------------------------------------------------------------------------------------------


def show_job(job: Job, output: Output) -> None:
    """For scripts, a job as it was last seen: of a watch that has ended without its end."""
    from launcher.cli.status import job_data, printed

    if output is not Output.text:
        printed(job_data(job.run, job), output)


def show_gone(made: Plan, output: Output) -> None:
    """For scripts, a run that has succeeded and whose job is no more to be seen."""
    from launcher.cli.status import printed
    from launcher.cli.summary import as_data

    if output is not Output.text:
        found = results_of(made.run_folder)
        printed({"run": made.run, "state": "SUCCEEDED", "job": None, "results": as_data(found)}, output)


def show_begun(job: Job, output: Output) -> None:
    """A job that goes on without us."""
    if output is not Output.text:
        show_job(job, output)
        return
    print(f"{job.run} is {job.state} in {job.region}")
    print(f"launch follow {job.run}\n    watches it; only then is another place tried where there are no machines")
    print(f"launch cancel {job.run}\n    ends it")


def show_end(job: Job, made: Plan | None, output: Output) -> None:
    """How the run ended, what was learned, and where it lies."""
    from launcher.cli.status import job_data, printed
    from launcher.cli.summary import as_data, lines

    folder = run_folder_of(job)
    found = results_of(folder)
    seconds = max(0.0, (job.ended or job.created) - (job.started or job.ended or job.created))
    usd = usd_of(job, made, seconds)
    if output is Output.text:
        print("\n".join(lines(job.run, folder, job.state == "SUCCEEDED", seconds, found, how=ENDS.get(job.state, ""))))
        if usd is not None:
            print(f"{'cost':{LABEL}}≈${usd:,.2f} for the machines of this attempt")
        return
    printed({**job_data(job.run, job), "seconds": seconds, "usd": usd, "results": as_data(found)}, output)


def results_of(folder: str | None) -> Results | None:
    """The run's metrics, where they can be read."""
    from launcher.cli.runfolder import read_results

    try:
        return read_results(storage_of(folder))
    except LaunchError as error:
        print(f"launch: its metrics can't be read: {error.problem}", file=sys.stderr)
        return None


def usd_of(job: Job, made: Plan | None, seconds: float) -> float | None:
    """What the attempt's machines cost; None where a price is unknown."""
    planned = attempt_of(made, job)
    if made is None or planned is None or planned.usd_per_hour is None or job.ended is None:
        return None
    return planned.usd_per_hour * made.machine.nodes * seconds / 3600
