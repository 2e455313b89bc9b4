"""Run a plan, or a request from a file, on this machine: as `launch local` does, and from a notebook or a task pool."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launch_train.common import contract
from launch_train.common.faults import NEEDS_GPU
from launcher.diagnosis.output_cause import Cause, CauseFinder
from launcher.errors import JobFailed, UsageError
from launcher.inputs.interpreter import OWN, TRAINER, Interpreter, Wanted, find_interpreter
from launcher.runs.run_folder import read_results, storage_of
from launcher.services.local.attempts import End, earlier_python
from launcher.services.local.client import OnStart, run_job
from launcher.services.local.job import Event, LocalJob, Message, Outcome, Printed, Started
from launcher.services.local.request import parse_request
from launcher.services.local.workdirs import Code
from launcher.spec.kinds import DURATION
from launcher.text import parse_duration

if TYPE_CHECKING:
    from launch_train.runfolder.starts import RunMetrics
    from launcher.inputs.gather import Inputs
    from launcher.inputs.planning import Plan
    from launcher.plan import model

OnLine = Callable[[str, str], None]


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
    `on_line` gets the replica and the text of each line of output; messages of launch come from the replica `launch`.
    `preempt_after` preempts the job after this time (15s), then restarts it.

    Raises:
        UsageError: the plan is for the cloud, or cannot run here, or its run folder is in use.
        JobFailed: a replica failed; the error names the cause in its output.
        LaunchError: the processes could not be started.
    """
    if plan.target != "local":
        raise UsageError(f"the plan's target is {plan.target}, not local", 'Plan it for this machine: target="local"')
    if preempt_after is not None and not re.search(DURATION, preempt_after):
        raise UsageError(f"preempt_after: invalid duration {preempt_after!r}; use for example 15s")
    after = parse_duration(preempt_after) if preempt_after else None
    outcome = run_planned(plan.data, plan.inputs, on_line or (lambda _replica, _text: None), preempt_after=after)
    end = outcome.end
    return LocalResult(run=plan.run, seconds=end.seconds, exit_codes=end.exit_codes, folder=plan.folder)


def run_planned(
    plan: model.Plan,
    inputs: Inputs,
    on_line: OnLine,
    *,
    code: Code | None = None,
    preempt_after: float | None = None,
    environ: Mapping[str, str] = os.environ,
    on_start: OnStart | None = None,
) -> Outcome:
    """Run a plan to its end with the Python that its spec names, else that of its earlier attempts, else the active
    environment's. `code` takes the place of the inputs' files.

    Raises as `local`.
    """
    request = plan.attempts[0].request
    python = inputs.python if inputs.python and inputs.python.is_named else python_of_request(request, None, environ)
    if python.error:
        raise python.error
    job = local_job(
        request,
        code or Code(inputs.source.code, None, inputs.source.installed),
        inputs.context.code.digest,
        plan=plan,
        python=python,
        preempt_after=preempt_after,
    )
    causes = CauseFinder()

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            causes.reset()
        elif isinstance(event, Message):
            on_line("launch", event.text)
        elif isinstance(event, Printed):
            causes.add(event.replica, event.text)
            on_line(event.replica, event.text)

    outcome = run_job(job, on_event, environ=environ, on_start=on_start)
    if not outcome.end.succeeded:
        raise failure(outcome.end, plan.run, plan.run_folder, causes.cause)
    return outcome


def local_job(
    request: dict[str, Any],
    code: Code,
    content: str,
    *,
    python: Interpreter | None,
    plan: model.Plan | None = None,
    **options: Any,
) -> LocalJob:
    """Return the job of a request; `python` runs its processes (None: containers, with `docker`). `content`: the
    digest of the code. `options` are further fields of LocalJob."""
    substitutes = [f"image not used: runs with {python.text}"] if python else []
    if code.in_place:
        substitutes.insert(0, f"running in {code.in_place} itself, including files that the image would exclude")
    if plan and plan.spec.get("image", {}).get("uri"):
        substitutes.append("the code in your custom image is not available here; running in an empty folder")
    return LocalJob(
        request=request,
        code=code,
        content=content,
        plan=plan,
        python=python.path if python else "",
        # launch's own is not recorded: an environment that is activated afterwards is used.
        recorded_python=python.path if python and python.origin != OWN else "",
        substitutes=tuple(substitutes),
        **options,
    )


def python_of_request(body: dict[str, Any], option: str | None, environ: Mapping[str, str]) -> Interpreter:
    """Return the Python that runs a request; `option`: that of --python. Raises UsageError: it can't."""
    job = parse_request(body)
    needs = [("torch", "torchrun")] if job.uses_torch else []
    if job.is_builtin:  # as a spec's
        needs = [("torch", TRAINER), ("numpy", TRAINER)]
    if (job.run_folder or "").startswith("gs://"):
        needs.append(("google-cloud-storage", f"output: {job.run_folder}"))
    earlier = earlier_python(job.run_folder)
    interpreter = find_interpreter(Wanted(tuple(needs)), environ, option=option, setting=None, earlier=earlier)
    if interpreter.error:
        raise interpreter.error
    return interpreter


def failure(end: End, run: str, folder: str | None, cause: Cause | None) -> JobFailed:
    """Return the error of a job that did not succeed: its cause, if its output names one, and the replica's exit
    code."""
    if end.stopped == "cancelled":
        return JobFailed(f"{run} was cancelled", "The same command continues it.")
    failed = {name: code for name, code in end.exit_codes.items() if code}
    if not failed:
        return JobFailed(f"{run} was interrupted", "The same command continues it.")
    name = cause.replica if cause and cause.replica in failed else next(iter(failed))
    code = failed[name]
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    ended = "the job was stopped" if code == contract.Exit.PREEMPTED else "the job failed"
    hint = [f"{name} {how}"] if cause else []
    if cause and NEEDS_GPU in cause.text:
        hint += ["This machine has no GPU. Use the CPU if torch.cuda.is_available() is false,"]
        hint += ["or run the job on Google Cloud (launch vertex, launch vm)."]
    hint += ["The same command resumes from there."] if code == contract.Exit.PREEMPTED else []
    hint += [f"See the output above{f'; the run folder is {folder}' if folder else ''}."]
    return JobFailed(f"{ended}: {cause.text if cause else f'{name} {how}'}", "\n".join(hint))


def meaning(code: int) -> str:
    """Return the meaning of an exit code of the contract, or the signal that killed a container, or nothing."""
    words = {
        contract.Exit.USAGE: "invalid config or code",
        contract.Exit.UNFIT: "this machine failed a check",
        contract.Exit.PREEMPTED: "interrupted; checkpoint saved",
        contract.Exit.DISAGREED: "the ranks' parameters differ",
        contract.Exit.SUPERSEDED: "another start of this run took over",
        contract.Exit.TERMINAL: "the run folder says that the run failed permanently",
    }
    if code - 128 in {*signal.Signals}:  # the convention of shells and container engines
        return f" ({signal.Signals(code - 128).name})"
    return next((f" ({text})" for known, text in words.items() if known == code), "")
