"""Run a plan on this machine, in a separate process.

Supervising replicas needs signal handlers and adopts their orphans. Both apply to a whole process, and a notebook or a
task pool has its own. So a child process, `launch local`, runs the plan's request, and this module parses its output
(docs/output.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from msgspec import Struct

from launch_train.common import contract
from launch_train.common.scratch import temporary_folder
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.images.source_files import write_installed
from launcher.runs.run_folder import read_results, storage_of
from launcher.services.local.workdirs import copy

if TYPE_CHECKING:
    from launch_train.runfolder.starts import RunMetrics
    from launcher.inputs.gather import Inputs
    from launcher.inputs.planning import Plan

OnLine = Callable[[str, str], None]
LINE: Final = re.compile(r"\[(?P<replica>[a-z]+\d+-\d+)\] (?P<text>.*)|launch: (?P<message>.*)")
STOP_SECONDS: Final = 45.0
"""Time to stop the replicas after an interrupt: 30 s until SIGKILL (rehearsal.supervisor), and some to report."""


class LocalResult(Struct, frozen=True, kw_only=True):
    """A run on this machine that succeeded."""

    run: str
    seconds: float
    """Duration of the start that succeeded, which may be an earlier one."""
    exit_codes: dict[str, int]
    """Replica -> exit code."""
    folder: str | None

    def metrics(self) -> RunMetrics | None:
        """Return the metrics that the run has written, as `Run.metrics` does; None: none."""
        return read_results(storage_of(self.folder))


def local(plan: Plan, *, on_line: OnLine | None = None, preempt_after: str | None = None) -> LocalResult:
    """Run a plan with the target `local` to its end on this machine, as Vertex AI would run it (docs/local.md).

    A run that has already succeeded is only read. One that failed or was interrupted resumes from its checkpoints.
    `on_line` gets the replica and the text of each line of output, on another thread; messages of launch come from the
    replica `launch`. `preempt_after` preempts the job after this time (15s), then restarts it.

    Raises:
        UsageError: the plan is for the cloud, or cannot run here, or its run folder is in use.
        JobFailed: a replica failed; the error names the cause in its output.
        LaunchError: the processes could not be started.
    """
    if plan.target != "local":
        raise UsageError(f"the plan's target is {plan.target}, not local", 'Plan it for this machine: target="local"')
    with temporary_folder("request") as name:
        request, code = Path(name) / "request.json", Path(name) / "code"
        request.write_text(json.dumps(plan.requests[0]), encoding="utf-8")
        copy(plan.inputs.source.code, code)
        installed = write_installed(plan.inputs.source.installed, Path(name) / "project")
        environ = {contract.PROJECT: str(Path(name) / "project")} if installed else {}
        words = ["local", "--request", str(request), "--code", str(code), "-o", "json"]
        words += python_words(plan.inputs) + (["--preempt-after", preempt_after] if preempt_after else [])
        shown, code_of_exit = run_child(words, on_line or (lambda _replica, _text: None), environ=environ)
    if code_of_exit:
        raise error_of(shown, code_of_exit)
    return LocalResult(
        run=shown["run"], seconds=shown["seconds"], exit_codes=shown["exit_codes"], folder=shown["run_folder"]
    )


def python_words(inputs: Inputs) -> list[str]:
    """Return the flag that names the plan's interpreter, if the spec does. Raises UsageError: it can't run the job.

    Another one is chosen by the child, by the same rules: a run's earlier attempts come before the environment.
    """
    python = inputs.python
    if python and python.error:
        raise python.error
    return ["--python", python.path] if python and python.is_named else []


def run_child(
    words: list[str],
    on_line: OnLine,
    *,
    environ: Mapping[str, str] | None = None,
    on_start: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> tuple[dict[str, Any], int]:
    """Run a command of launch; return its JSON document and its exit code. Stops it on KeyboardInterrupt.

    `environ` has variables that are added to this process's. `on_start` gets the process. It has its own session, so
    that Ctrl-C in the terminal does not reach it and only one signal stops it.
    """
    command = [sys.executable, "-P", "-m", "launcher", *words]
    with (
        subprocess.Popen(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=on_start is not None,
        ) as child,
        stopped_at_last(child),
    ):
        if on_start:
            on_start(child)
        reader = threading.Thread(target=pass_on, args=(child.stderr, on_line), daemon=True)
        reader.start()
        out = child.stdout.read() if child.stdout else b""
        child.wait()
        reader.join()
    try:
        document: dict[str, Any] = json.loads(out)
    except ValueError:
        document = {}
    return document, child.returncode


@contextmanager
def stopped_at_last(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop the child, and with it the replicas, if the block is left before the child exits."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            child.kill()


def pass_on(stream: IO[bytes] | None, on_line: OnLine) -> None:
    """Pass on the lines of stderr, those of the replicas and of launch."""
    for raw in stream or ():
        line = raw.decode(errors="replace").rstrip("\r\n")
        if match := LINE.fullmatch(line):
            on_line(match["replica"] or "launch", match["text"] or match["message"] or "")


def error_of(shown: dict[str, Any], code: int) -> LaunchError:
    """Return the error that the child reported."""
    error = shown.get("error") or {}
    kinds = {kind.exit_code: kind for kind in (JobFailed, UsageError)}
    kind = kinds.get(error.get("exit_code", code), LaunchError)
    return kind(error.get("problem", f"launch local ended with exit code {code}"), error.get("hint", ""))
