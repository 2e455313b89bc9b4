"""Which VMs are one job's: those that their own metadata names together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from launcher.jobs.job import Job
from launcher.jobs.vm import Machine

TOGETHER_SECONDS: Final = 60.0
"""Between the first and the last VM of one bulkInsert."""


def nodes_of(machine: Machine) -> tuple[str, ...]:
    """The names of all VMs that train together with this one, itself included; node 0 first."""
    found = machine.parameters.get("nodes")
    return tuple(map(str, found)) if isinstance(found, list) and found else (machine.name,)


def is_head(machine: Machine) -> bool:
    """Whether it is node 0, which the job is known by."""
    return nodes_of(machine)[0] == machine.name


def set_of(machine: Machine, fleet: Sequence[Machine]) -> tuple[Machine, ...]:
    """A VM that is there, and those of `fleet` that train together with it: no other can have their names meanwhile."""
    names = nodes_of(machine)
    others = (one for one in fleet if one.name in names and one.zone == machine.zone and one.run == machine.run)
    return (machine, *(one for one in others if one.id != machine.id and one.trains))


def left_of(job: Job, fleet: Sequence[Machine]) -> tuple[Machine, ...]:
    """The VMs of `fleet` that an ended job has left: never those of another attempt in the same zone, which has
    another node 0, or was made later."""
    here = [one for one in fleet if one.zone == job.zone and one.run == job.run and one.trains]
    if any(is_head(one) and one.id != job.id for one in here):
        return tuple(one for one in here if one.id == job.id)
    return tuple(one for one in here if one.id == job.id or abs(one.created - job.created) <= TOGETHER_SECONDS)
