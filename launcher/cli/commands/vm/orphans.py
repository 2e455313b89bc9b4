"""`launch vm list --orphans`: list launch's unneeded resources that cost money, with the commands that remove them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.cli.options import Output

if TYPE_CHECKING:
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import VmInstance
    from launcher.services.compute.client import Compute
    from launcher.services.compute.job_state import Record


class Orphan(Struct, frozen=True, kw_only=True):
    """An unneeded VM or disk, why it is unneeded, its monthly cost (None: unknown), and the command that removes it.

    `because` is the error with which a VM that ran a job failed to delete itself.
    """

    what: str
    name: str
    zone: str
    about: str
    why: str
    usd_per_month: float | None
    remove: str
    because: str = ""


def show_orphans(
    compute: Compute, machines: Sequence[VmInstance], disks: Sequence[Disk], now: float, output: Output
) -> None:
    """Print the orphans. Raises LaunchError."""
    import msgspec

    from launcher.cli.ui.documents import printed

    ends = ends_of(machines)
    idle = [*of_machines(machines, disks, now, ends), *of_disks(disks, machines, compute.project)]
    printed({"orphans": [dict(msgspec.to_builtins(orphan)) for orphan in idle]}, output, page=orphan_lines(idle))


def ends_of(machines: Sequence[VmInstance]) -> dict[str, Record]:
    """Return how the jobs of VMs ended, by VM number; print the run folders that could not be read."""
    from launcher.cli.ui.streams import say
    from launcher.errors import LaunchError
    from launcher.gcp.parallel import together
    from launcher.services.compute.job_state import training_end

    training = {machine.id: machine for machine in machines if machine.trains}
    ends = {}
    for number, answer in together(
        {number: partial(training_end, machine) for number, machine in training.items()}
    ).items():
        if isinstance(answer, LaunchError):
            say(f"cannot check whether {training[number].name} has ended: {answer.problem}")
        elif answer is not None:
            ends[number] = answer
    return ends


def of_machines(
    machines: Sequence[VmInstance], disks: Sequence[Disk], now: float, ends: Mapping[str, Record]
) -> Iterator[Orphan]:
    """Yield the orphaned VMs."""
    from launcher.cli.ui.vm_text import vm_state
    from launcher.jobs.orphans import orphan_reason
    from launcher.services.compute.vm_cost import disks_of, vm_usd_per_month

    for machine in machines:
        end = ends.get(machine.id)
        if why := orphan_reason(machine, now, end.ended if end else None):
            yield Orphan(
                what="vm",
                name=machine.name,
                zone=machine.zone,
                about=f"{machine.machine_type} {machine.provisioning}, {vm_state(machine)}",
                why=why,
                because=end.cleanup if end else "",
                usd_per_month=vm_usd_per_month(machine, disks_of(machine, disks)),
                remove=removal(machine, has_ended=end is not None),
            )


def removal(machine: VmInstance, *, has_ended: bool) -> str:
    """Return the command that removes a VM."""
    if machine.trains and not has_ended:
        return f"launch cancel {machine.run}"
    return f"launch vm delete {machine.name} --zone {machine.zone}"


def of_disks(disks: Sequence[Disk], machines: Sequence[VmInstance], project: str) -> Iterator[Orphan]:
    """Yield the orphaned disks."""
    from launcher.jobs.orphans import without_vm
    from launcher.services.compute.vm_cost import disks_usd_per_month

    for disk in without_vm(disks, machines):
        yield Orphan(
            what="disk",
            name=disk.name,
            zone=disk.zone,
            about=f"disk, {disk.size_gb} GB {disk.kind}",
            why="not attached to any VM",
            usd_per_month=disks_usd_per_month([disk]),
            remove=f"gcloud compute disks delete {disk.name} --zone={disk.zone} --project={project}",
        )


def orphan_lines(orphans: Sequence[Orphan]) -> Iterator[str]:
    """Yield the page: three lines per orphan; commands are not wrapped, to be copied."""
    from launcher.cli.ui.plan_page import wrapped
    from launcher.text import usd_text

    if not orphans:
        yield "No orphaned resources found."
        return
    for orphan in orphans:
        costs = (
            "price unknown"
            if orphan.usd_per_month is None
            else f"{usd_text(orphan.usd_per_month, approx=True)} a month"
        )
        yield f"{orphan.name}  {orphan.about} in {orphan.zone}"
        yield f"    {orphan.why}; {costs}"
        yield from (f"    {wrapped(line, 9 * len(line))[0]}" for line in orphan.because.splitlines() if line)
        yield f"    {orphan.remove}"
    known = [orphan.usd_per_month for orphan in orphans if orphan.usd_per_month is not None]
    if len(known) > 1:
        yield f"total {usd_text(sum(known), approx=True)} a month"
