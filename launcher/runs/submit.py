"""One job for one run, whatever dies when: the way from a plan to the run's active job.

Three things keep a run from having two jobs, each where the one before can't:

1. The lock (`attempts/NNNN.json`, create-only). Who has created it, and nobody else, sends one create request: to
   Vertex AI once; to Compute Engine again for some seconds where no answer comes, with the id by which it makes nothing
   twice. Nobody writes NNNN+1 before NNNN is known to have ended. So as long as a lock's create can't land after the
   lock was given up, there is never a second job.
2. The look-up by label, in every region that a job of the run may be in. It finds what a launch has made that died, or
   lost its answer, before it could note the job's name.
3. What lands all the same after its lock was given up is found at the next look (the younger job is cancelled), and at
   the latest by its own node, which finds the attempt claimed and ends without having touched the run.

The times belong together. A lock is given up when it is 60 s old by the bucket's clock and has no job. Its owner sends
first no later than 20 s after it began to write it, last (to Compute Engine) no more than 8 s after that, and waits
30 s for the answer: whatever the request does, it has begun to do it by then. An answer that was lost is looked for
20 s long, as a request may be slow to have its effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from random import SystemRandom
from typing import Final

from launcher.backend.base import Service
from launcher.clock import Clock, stopwatch
from launcher.plan.model import Plan
from launcher.runs.endings import RunEnded, RunSucceeded, cancel_and_confirm, settle
from launcher.runs.ledger_base import Ledger
from launcher.runs.snapshot import RunObserver
from launcher.runs.submission import Submission, Submitted

__all__ = ["RunEnded", "RunSucceeded", "Submitted", "cancel_and_confirm", "settle", "submit"]

CHANCE: Final = SystemRandom().random


def submit(
    plan: Plan,
    service: Service,
    ledger: Ledger,
    clock: Clock,
    say: Callable[[str], None],
    *,
    fresh: bool,
    resume: bool = False,
    ready: Callable[[Plan], Plan],
    also: Iterable[str] | None = None,
    wall: Callable[[], float] = time.time,
    chance: Callable[[], float] = CHANCE,
) -> Submitted:
    """The run's active job; made, attempt after attempt, if there is none.

    `fresh`: a person has asked for the run now, so a round of attempts that had come to nothing before is begun anew;
    else the attempts are taken up where they were left. `resume`: a run that has ended goes on. `ready` puts the
    plan's image into the registry, before the first create of a run that has had no job. `also` are regions to look in
    beside the plan's where there is no ledger, as far as they can be read; None: wherever Vertex AI trains. `wall` is
    a clock that goes on while this machine sleeps.

    Raises:
        RunEnded: it has ended, and nobody asked to resume it. RunSucceeded: well.
        UsageError: the run id belongs to something else; or the run folder can't be used.
        NoCapacity: no place of the plan is left in this round; every attempt is told with its cause and fix.
        NotAuthorised, JobFailed, LaunchError: a refusal that no other place can change.
        UnreachableError: a region can't be read, or whether there is a job isn't known. Nothing was created, or it is
            found by the same command once it can be.
    """
    watch = partial(stopwatch, clock, wall)
    observe = RunObserver(plan, service, ledger, watch, also)
    submission = Submission(
        plan=plan,
        service=service,
        ledger=ledger,
        clock=clock,
        say=say,
        observe=observe,
        make_ready=ready,
        stopwatch=watch,
        chance=chance,
        fresh=fresh,
        resume=resume,
    )
    while True:
        if got := submission.step(observe()):
            return got
