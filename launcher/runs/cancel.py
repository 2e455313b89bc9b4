"""To end a run that has no job just now, but whose next attempt somebody may be about to make."""

from __future__ import annotations

from typing import Final

from launcher.diagnosis import Diagnosis
from launcher.jobs.job import Job
from launcher.runs.attempts import RUN_ENDS, Entry
from launcher.runs.ledger_base import Facts, Ledger

CANCELLED: Final = Diagnosis(scope="permanent", kind="cancelled", cause="cancelled before it was made (launch cancel)")


def bar(ledger: Ledger, last: Job, diagnosis: Diagnosis) -> bool:
    """Whether the run's next attempt was barred: its number is taken, with an end that is a person's wish.

    `diagnosis` is that of its last job, which nobody may have noted yet. Who has looked and goes for that number finds
    it taken, looks again, and sees that the run has ended. False: it had ended before, nobody has launched it with this
    ledger, or somebody was quicker and is making a job.
    """
    entries = ledger.entries()
    newest = next((entry for entry in reversed(entries) if entry.round), None)
    if newest is None or nothing_follows(newest, last, diagnosis):
        return False
    facts = Facts(
        number=entries[-1].number + 1,
        round=newest.round,
        region=newest.region,
        zone=newest.zone,
        provisioning=newest.provisioning,
        machine=newest.machine,
        identity=newest.identity,
    )
    entry = ledger.lock(facts)
    if entry is None:
        return False
    ledger.note_end(entry.number, CANCELLED, "CANCELLED")
    return True


def nothing_follows(newest: Entry, last: Job, diagnosis: Diagnosis) -> bool:
    """Whether nothing would follow; or a job may be on its way, which can be cancelled once it is there."""
    if newest.end:
        return newest.end.ends_run
    return newest.job is None or (newest.job == last.name and diagnosis.kind in RUN_ENDS)
