"""The supervisor of a local run: a process that locks the run folder, runs the replicas and records how they ended.

It outlives the launch that started it by the time that the replicas need to save: when that launch is interrupted,
killed or loses its terminal, their connection ends, and the supervisor stops the replicas as a preemption does. If it
is killed itself, the kernel kills them (train/launch_train/node/parent_death.py).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launcher.errors import LaunchError
from launcher.services.local import on_host, preemption, run_folder
from launcher.services.local.attempts import End
from launcher.services.local.job import KILL, Event, LocalJob, Message, Outcome, Printed, Started
from launcher.services.local.preemption import ReplicaExits
from launcher.services.local.request import ParsedJob, fingerprint, parse_request, with_image
from launcher.services.local.supervisor import Ended, Preemption
from launcher.services.local.workdirs import WrittenFiles, left_text, make_numbered_folder, snapshot
from launcher.signals import signals_stop

Report = Callable[[Event], None]
WORKDIRS: Final = "workdirs"
"""Folder in a local run folder with the files that each start left in its working directory, by number."""
CANCEL_SECONDS: Final = 0.5
"""Poll interval for a cancellation."""
SIGNAL_SECONDS: Final = 0.2
"""Between two signals of a stop."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Stops this process's replicas by SIGTERM to itself. `reason` says why."""

    def __init__(self) -> None:
        self.reason: Literal["", "cancelled", "interrupted"] = ""
        self._done = threading.Event()

    def __call__(self, reason: Literal["cancelled", "interrupted"]) -> None:
        """Begin to stop, unless that has begun. The signal is repeated, as it has no effect while it is deferred."""
        if not self.reason:
            self.reason = reason
            threading.Thread(target=self._signal, name="stop", daemon=True).start()

    def _signal(self) -> None:
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            if self._done.wait(SIGNAL_SECONDS):
                return

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let signals raise nothing but within `supervisor.run`: an attempt that has begun gets its end, and files are
        moved whole. A stop that comes before is repeated until the replicas run."""
        numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, lambda *_: self("interrupted")) for number in numbers}
        try:
            yield
        finally:
            self._done.set()
            for number, handler in before.items():
                signal.signal(number, handler)


def main() -> None:
    """Run the job that the connection sends, and report its events there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # whoever started the launch may block or ignore them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection, stop, lock = Connection(int(sys.argv[1])), Stop(), threading.Lock()
    try:
        job: LocalJob = connection.recv()
    except (EOFError, OSError):  # the launch was interrupted before it could send the job
        return
    threading.Thread(target=stop_on_command, args=(connection, stop), name="commands", daemon=True).start()

    def report(event: Event) -> None:
        with lock, suppress(OSError):  # nobody listens any more: what remains is to save and to record the end
            connection.send(event)

    with suppress(KeyboardInterrupt), signals_stop():
        try:
            supervise(job, report, os.environ, stop)
        except LaunchError as error:
            report(error)


def stop_on_command(connection: Connection, stop: Stop) -> None:
    """Stop when the launch sends a command, or is gone."""
    with suppress(EOFError, OSError):
        while connection.recv() != KILL:
            stop("interrupted")
        os.kill(os.getpid(), signal.SIGINT)  # ends the wait for replicas that save
    stop("interrupted")


def supervise(job: LocalJob, report: Report, environ: Mapping[str, str], stop: Stop) -> None:
    """Run a job to its end. A run that has already succeeded is only reported.

    Raises:
        UsageError: the request cannot run here, or its run folder is unusable or in use.
        LaunchError: a replica, an image or the code is not available.
    """
    request = parse_request(with_image(job.request, job.image) if job.image else job.request)
    if job.job_id:
        run_attempt(job, request, None, lambda: 0, report, environ, stop)
        return

    def say(text: str) -> None:
        report(Message(text))

    if not job.docker:
        on_host.check_program(request, job.code, environ, job.python or sys.executable)
    job_fingerprint = fingerprint(request, content(job, request))
    with run_folder.opened(request.run_folder) as storage:
        if storage and (before := run_folder.ended_well(storage, job_fingerprint)):
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(before.time))
            again = "--output DIR" if job.plan is None else "--new"
            say(f"this run finished on {when} UTC; nothing to do ({again} runs it again)")
            report(Outcome(end=before, is_earlier=True))
            return
        if job.docker:  # before anything is written: without an engine or an image there is no attempt
            from launcher.services.local.in_docker import ensure_images

            ensure_images(request, environ, say)

        def begin() -> int:
            if not storage:
                return 0
            return run_folder.prepare(
                storage, job.plan, job.request, request, job_fingerprint, say, job.recorded_python
            )

        run_attempt(job, request, storage, begin, report, environ, stop)


def content(job: LocalJob, request: ParsedJob) -> str:
    """Return the identity of the code: its digest, or the images that contain it."""
    return " ".join(request.images) if job.docker and not job.plan else job.content


def run_attempt(
    job: LocalJob,
    request: ParsedJob,
    storage: Storage | None,
    begin: Callable[[], int],
    report: Report,
    environ: Mapping[str, str],
    stop: Stop,
) -> None:
    """Run one attempt, and record and report how it ended. `begin` records its beginning and returns its number (0:
    there is no run folder)."""
    exits, refused = ReplicaExits(exit_codes={}, stopped=True), None
    with stop.deferred():
        attempt, begun = begin(), time.monotonic()
        for line in [f"running in containers of {uri}" for uri in request.images] if job.docker else job.substitutes:
            report(Message(line))
        with stopped_by_cancel(storage, attempt, stop):
            try:
                exits = run_replicas(job, request, report, environ)
            except LaunchError as error:
                exits, refused = ReplicaExits(exit_codes={}), error
        end = End(
            exit_codes=exits.exit_codes,
            seconds=time.monotonic() - begun,
            time=time.time(),
            stopped=(stop.reason or "interrupted") if exits.stopped else "",
        )
        if storage:
            run_folder.record_end(storage, attempt, end, lambda text: report(Message(text)))
        if refused:
            raise refused
        report(Outcome(end=end, attempt=attempt, preempted=exits.preempted))


@contextmanager
def stopped_by_cancel(storage: Storage | None, attempt: int, stop: Stop) -> Iterator[None]:
    """Stop when the attempt in a local run folder is cancelled (launcher.services.local.service)."""
    done = threading.Event()

    def watch(path: Path) -> None:
        while not done.wait(CANCEL_SECONDS):
            if path.exists():
                stop("cancelled")
                return

    if isinstance(storage, LocalFolder):
        path = storage.folder / runfolder.attempt_cancel(attempt)
        threading.Thread(target=watch, args=(path,), name="cancel", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def run_replicas(job: LocalJob, request: ParsedJob, report: Report, environ: Mapping[str, str]) -> ReplicaExits:
    """Run the replicas, as containers or as processes with the user's code, and preempt them if the job says so."""
    job_id = job.job_id or str(time.time_ns())

    def say(text: str) -> None:
        report(Message(text))

    def on_left(left: WrittenFiles) -> None:
        report(left)
        if not job.job_id and (lost := left_text(left, job.plan)):
            say(lost)

    def run(start: Callable[..., Ended]) -> ReplicaExits:
        def start_job(preempted: Preemption | None) -> Ended:
            report(Started())
            return start(
                request,
                job_id=job_id,
                environ=environ,
                on_line=lambda replica, text: report(Printed(replica, text)),
                on_left=on_left,
                say=say,
                preemption=preempted,
            )

        return preemption.run(start_job, job.preempt_after, say, builtin=request.is_builtin)

    if job.docker:
        from launcher.services.local import in_docker

        return run(in_docker.rehearse)
    keep = None if job.job_id else partial(folder_for_left, request.run_folder)
    with snapshot(job.code._replace(keep=keep)) as code:
        return run(partial(on_host.rehearse, code=code, python=job.python or sys.executable))


def folder_for_left(run_folder: str | None) -> Path:
    """Create the folder for the files that a start left: in a local run folder, otherwise a temporary one."""
    if run_folder and not run_folder.startswith("gs://"):
        return make_numbered_folder(Path(run_folder) / WORKDIRS)
    return Path(tempfile.mkdtemp(prefix="launch-workdirs-"))


if __name__ == "__main__":
    main()
