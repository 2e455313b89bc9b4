"""Follow a run that exists: with its driver, or its job alone if the plan in its folder cannot be trusted."""

from __future__ import annotations

from contextlib import suppress

from msgspec.structs import replace

from launcher.diagnosis import diagnose_end
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.jobs.job import Job
from launcher.plan.binding import NewerFormat
from launcher.plan.model import Plan
from launcher.runs.context import LaunchContext
from launcher.runs.driver import AttemptFailed, AttemptStarted, end_error, is_final
from launcher.runs.find import FoundRun
from launcher.runs.ledger import Ledger
from launcher.runs.run_story import story_of
from launcher.runs.stored_plan import refusal
from launcher.runs.submit import RunWatcher, check_output
from launcher.runs.watch import intervals_of, watch
from launcher.services import request


def watch_job(
    run: FoundRun, watcher: RunWatcher, watch_seconds: float | None, refused: NotAuthorised | None = None
) -> Job:
    """Watch a run's job until it ends. Raises LaunchError: the job or `watch` failed; `refused` if another attempt is
    due."""
    ended, context = run.job, run.context
    watcher.report(AttemptStarted(job=ended, number=0, created=False))
    if context.of_run(run.storage).outlives_client or not ended.is_over:
        intervals = intervals_of(context.of_run(run.storage).poll_seconds)
        view = watcher.view(ended, 0)
        ended = watch(
            view, watcher.report, context.clock, wait_seconds=None, watch_seconds=watch_seconds, intervals=intervals
        ).job
    diagnosis = diagnose_end(ended, request.context_of_job(ended, context.project), watcher.error_in_output())
    if diagnosis.kind == "succeeded":
        return ended
    if ended.is_here and (storage := run.storage):
        with suppress(LaunchError):  # unreadable
            fix = story_of(replace(run, jobs=(ended,)), context.attempts(storage)).advice
            diagnosis = replace(diagnosis, fix=fix or diagnosis.fix)
    if refused and not is_final(diagnosis):
        watcher.report(AttemptFailed(job=ended, number=0, diagnosis=diagnosis))
        raise refused
    raise end_error(ended, diagnosis)


def stored_plan(cloud: LaunchContext, run: FoundRun) -> Plan:
    """Return the plan that a run was launched with. Raises UsageError: none exists; NotAuthorised: it isn't the
    run's."""
    plan, refused = checked_plan(cloud, run)
    if refused:
        raise refused
    if plan is None:
        raise UsageError(
            f"the folder of {run.id} ({run.folder or 'none'}) has no readable plan",
            f"Add the spec: {run.job.command} --resume {run.id}",
        )
    return plan


def checked_plan(cloud: LaunchContext, run: FoundRun) -> tuple[Plan | None, NotAuthorised | None]:
    """Return the plan in a run's folder (None: no readable one), and the error if it must not be submitted. Raises
    LaunchError: the records to check it against cannot be read."""
    try:
        ledger = Ledger.open(run.folder) if run.folder else None
        stored = ledger.stored() if ledger else None
    except NewerFormat:
        raise
    except LaunchError:
        return None, None
    if ledger is None or stored is None or stored.plan.run != run.id:
        return None, None
    plan = stored.plan
    if refused := refusal(stored, run.jobs, ledger, cloud.of_run(None)):
        return plan, refused
    try:
        check_output(plan, cloud)
    except NotAuthorised as error:
        return plan, error
    return plan, None
