"""Summarise a run's attempts: wait, machines, steps, losses and end of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.report.goodput import AttemptTime, attempt_times
from launch_train.runfolder.run import AttemptRecord, RunData
from launch_train.runfolder.starts import Start
from launcher.diagnosis import diagnose_end
from launcher.jobs.job import WAITING, Job
from launcher.services import request

AttemptState = Literal["waiting", "running", "ended", "interrupted"]


class Resumed(Struct, frozen=True, kw_only=True):
    """A start of the processes that resumed an earlier one: the step reached before, and the step resumed from."""

    stopped_at: int
    resumed_from: int
    was_preempted: bool = False
    """Whether the processes before reported a preemption."""

    @property
    def lost(self) -> int:
        """Return the number of steps that had to be repeated."""
        return max(0, self.stopped_at - self.resumed_from)


class AttemptSummary(Struct, frozen=True, kw_only=True):
    """One attempt. Times are in seconds; None: unknown."""

    number: int
    machine: str
    place: str
    """`spot in us-central1`; empty: on this machine."""
    state: AttemptState
    waited: float = 0.0
    ran: float = 0.0
    usd: float | None = None
    resumed: Resumed | None = None
    """How it resumed from earlier attempts; None: it began from scratch, or that is not known yet."""
    lost_usd: float | None = None
    """Cost in USD of the steps that it repeats."""
    restarts: tuple[Resumed, ...] = ()
    """Starts of its processes after the first one."""
    reached: int | None = None
    """Its newest step."""
    kind: str = ""
    """Kind of its end: succeeded, preempted, stockout and so on (launcher.diagnosis); empty while it has not ended."""
    left_nothing: bool = False
    """The program exited with 0 within minutes, without a step, a checkpoint or another result."""
    cause: str = ""
    fix: str = ""


def live_of(job: Job, number: int, project: str | None, now: float) -> AttemptSummary:
    """Return an attempt according to its job, and why it ended in `project`; None: it has not ended."""
    diagnosis = diagnose_end(job, request.context_of_job(job, project)) if project else None
    asked = request.read(job.request)
    until = job.ended or now
    return AttemptSummary(
        number=number,
        machine=f"{asked.nodes} × {asked.machine_type}" if asked.nodes > 1 else asked.machine_type,
        place=f"{asked.provisioning.partition(':')[0] or 'standard'} in {job.place}",
        state="ended" if job.is_over else "waiting" if job.state in WAITING else "running",
        waited=max(0.0, (job.started or until) - job.begun),
        ran=max(0.0, until - job.started) if job.started else 0.0,
        kind=diagnosis.kind if diagnosis else "",
        cause=diagnosis.cause if diagnosis else "",
        fix=diagnosis.fix if diagnosis else "",
    )


def summarize_attempts(run: RunData, now: float, live: AttemptSummary | None = None) -> tuple[AttemptSummary, ...]:
    """Return a summary of each attempt, in order. `live` is the newest one according to its job, which the folder may
    not have yet."""
    records = {attempt.number: attempt for attempt in run.attempts}
    found: list[AttemptSummary] = []
    for times in attempt_times(run, now):
        starts = [start for start in run.starts if start.key[0] == times.number]
        summary = _summary(run, records.get(times.number), times, starts)
        before = [start for start in run.starts if start.key[0] < times.number]
        summary = replace(summary, resumed=_resumed(before, starts[:1]))
        if live and live.number == summary.number:
            summary = _with_live(summary, live, times.usd_per_hour)
        if found and summary.resumed and summary.resumed.lost:
            last = found[-1]  # the repeated steps took as long as those of the attempt before
            seconds = [value for start in before[-1:] for value in start.rows.values.get("step_s", ()) if value > 0]
            if seconds and last.usd and last.ran:
                lost = summary.resumed.lost * float(median_low(seconds)) * last.usd / last.ran
                summary = replace(summary, lost_usd=lost)
        found.append(summary)
    if live and live.number not in records and not any(one.number == live.number for one in found):
        found.append(live)
    return tuple(found)


def total_usd(found: Sequence[AttemptSummary]) -> float | None:
    """Return the cost of all attempts so far; None: the price of one that ran is unknown."""
    costs = [one.usd for one in found if one.ran > 0]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def cap_usd(plan: Any) -> float | None:
    """Return the upper bound of a run's cost: the spec's limit, else that of the plan; None: unknown, or no cost."""
    limits = plan.get("limits") or {} if isinstance(plan, dict) else {}
    values = (limits.get("usd"), limits.get("usd_at_most"))
    return next((float(value) for value in values if isinstance(value, int | float) and value > 0), None)


def _summary(run: RunData, record: AttemptRecord | None, times: AttemptTime, starts: Sequence[Start]) -> AttemptSummary:
    entry, end = (record.entry, record.end) if record else ({}, {})
    nodes = (run.plan.get("machine") or {}).get("nodes", 1)
    machine = str(entry.get("machine") or "")
    is_local = run.plan.get("target") == "local" or entry.get("region") == "local"
    where = f"{entry.get('provisioning') or 'standard'} in {entry.get('zone') or entry.get('region')}" if entry else ""
    codes, stopped = end.get("exit_codes"), end.get("stopped")
    kind, cause = str(end.get("kind") or ""), str(end.get("cause") or "")
    if stopped:
        kind, cause = ("cancelled", "it was cancelled") if stopped == "cancelled" else ("", "")
    elif isinstance(codes, dict):
        failed = [f"{name} exited with {code}" for name, code in codes.items() if code]
        kind, cause = ("failed", ", ".join(failed)) if failed else ("succeeded", "")
        if not codes:
            kind, cause = "failed", "it could not be started"
    return AttemptSummary(
        number=times.number,
        machine=f"{nodes} × {machine}" if nodes != 1 and machine else machine,
        place="" if is_local else where,
        state="interrupted" if not end or (stopped and not kind) else "ended",
        waited=0.0 if is_local else times.parts["queue"],
        ran=times.paid,
        usd=None if is_local else times.usd,
        restarts=tuple(
            one for place in range(1, len(starts)) if (one := _resumed(starts[:place], starts[place : place + 1]))
        ),
        reached=max((start.rows.steps[-1] for start in starts if start.rows.steps), default=None),
        kind=kind,
        cause=cause,
        fix=str(end.get("fix") or ""),
        left_nothing=bool(starts) and starts[-1].event(runfolder.NO_STEP) is not None,
    )


def _with_live(summary: AttemptSummary, live: AttemptSummary, usd_per_hour: float | None) -> AttemptSummary:
    """Return a summary with what the service says; a recorded end stays."""
    if summary.kind:
        return replace(summary, state="ended") if live.state == "ended" else summary
    usd = None if usd_per_hour is None or not summary.place else live.ran / 3600 * usd_per_hour
    waited = live.waited if summary.place else 0.0
    ended = {"kind": live.kind, "cause": live.cause, "fix": live.fix}
    return replace(summary, state=live.state, waited=waited, ran=live.ran, usd=usd, **ended)


def _resumed(before: Sequence[Start], first: Sequence[Start]) -> Resumed | None:
    """Return how a start continued those before it; None: none had a step, or it has not begun."""
    reached = [start.rows.steps[-1] for start in before if start.rows.steps]
    begins = first[0].begins_after if first else None
    if not reached or begins is None:
        return None
    preempted = before[-1].event("preempted") is not None
    return Resumed(stopped_at=max(reached), resumed_from=begins, was_preempted=preempted)
