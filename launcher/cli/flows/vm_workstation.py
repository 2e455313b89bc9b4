"""Create a VM to work on, where capacity is available, and wait until it is ready for SSH."""

from __future__ import annotations

import shutil
from functools import partial

from launcher.catalog import Price
from launcher.cli.flows import launch
from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm import confirm_cost
from launcher.cli.flows.find_vm import display_time
from launcher.cli.flows.print_logs import PlainView
from launcher.cli.flows.ssh_access import check_access, remote
from launcher.cli.options import Output
from launcher.cli.ui.data import machine_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.text import WIDTH, wrapped
from launcher.cli.ui.vm_text import price_and_end
from launcher.errors import LaunchError, UsageError
from launcher.inputs.gather import Inputs
from launcher.inputs.planning import planned
from launcher.jobs.job import Job
from launcher.jobs.vm import VmInstance
from launcher.plan.model import Plan
from launcher.project.vm_checks import has_external_ip
from launcher.runs.cloud import CloudContext
from launcher.runs.driver import RunDriver
from launcher.runs.ledger import Ledger
from launcher.runs.submit import RunWatcher
from launcher.runs.submit import preflight as check_placements
from launcher.services.base import GoneError
from launcher.services.compute.vm_cost import disks_of, price_of
from launcher.services.compute.workstation import CHECK, wait_ready
from launcher.signals import signals_stop
from launcher.ssh.command import missing_gcloud


class VmWatcher(RunWatcher):
    """The driver's watcher of a VM to work on, which prints no lines here."""

    def view(self, job: Job, number: int) -> PlainView:
        return PlainView(self._context.of_run(None), job)


def create_workstation(
    inputs: Inputs, output: Output, *, detach: bool, preflight: bool, offline: bool, limited: bool, yes: bool
) -> None:
    """Create a VM to work on; unless `detach`, return when it is ready for SSH. `limited`: the user limited its cost;
    `yes`: no question about it. Raises LaunchError."""
    plan = planned(inputs, offline=offline)
    cloud = of_project(inputs.context.project)
    printer = EventPrinter(plan)
    for warning in plan.warnings:
        printer.say("\n".join(wrapped(warning, WIDTH - len("launch: "))))
    service = cloud.service
    watcher = VmWatcher(cloud, printer, None)

    def checked(plan: Plan) -> Plan:
        """Return the plan after the preflight checks. Raises PlanRefused; LaunchError: SSH would not work from here."""
        if not preflight:
            return plan
        if not has_external_ip(plan.attempts[0].request) and shutil.which("gcloud") is None:
            raise missing_gcloud(plan.run, external_ip=False)
        if not detach:
            check_access(cloud.compute)
        return check_placements(plan, cloud, printer)

    driver = RunDriver(
        plan=plan,
        service=service,
        ledger=Ledger(None, cloud.clock),
        watcher=watcher,
        say=printer.say,
        ready=checked,
        confirm=partial(confirm_cost, limited=limited, yes=yes, say=printer.say),
        clock=cloud.clock,
    )
    try:
        with signals_stop():
            job, is_new = driver.drive_until_running(fresh=True)
            machine = created_or_found(cloud, job, plan, printer, is_new=is_new)
            machine = machine if detach else wait_for_driver(cloud, machine, printer)
    except KeyboardInterrupt as stop:
        stop.add_note(vm_interrupted_text(watcher.job, plan.run))
        launch.close_printer(printer, vm_interrupted_text(watcher.job, plan.run))
        raise
    finally:
        launch.close_printer(printer)
    show_workstation(
        machine, price_of(machine, inputs.spec.limits.price), output, display_time(cloud.compute), is_ready=not detach
    )


def created_or_found(cloud: CloudContext, job: Job, plan: Plan, printer: EventPrinter, *, is_new: bool) -> VmInstance:
    """Return the new VM, or the existing one. Raises UsageError: the existing VM has another type, or is stopped."""
    machine = cloud.compute.instance(job.place, job.id)
    if is_new:
        return machine
    planned = plan.attempts[0].machine_type
    if machine.machine_type != planned:
        raise UsageError(
            f"VM {machine.name} already exists, with machine type {machine.machine_type}, not {planned}",
            f"Choose another --name, or delete it first: launch vm delete {machine.name}",
        )
    if job.state != "RUNNING":
        raise UsageError(
            f"VM {machine.name} already exists and is stopped (in {machine.zone})", f"launch vm start {machine.name}"
        )
    printer.say(f"{machine.name} already exists; its zone, image, disks and lease are unchanged")
    return machine


def wait_for_driver(cloud: CloudContext, machine: VmInstance, printer: EventPrinter) -> VmInstance:
    """Return the VM once its GPU driver answers over SSH. Raises LaunchError; the VM keeps running."""
    try:
        ready, gpus = wait_ready(
            machine, cloud.compute, lambda vm: remote(cloud.compute, vm).run(CHECK), printer.say, cloud.clock
        )
    except LaunchError as error:
        if not isinstance(error.__cause__, GoneError):
            name = machine.name
            billed = f"The VM exists and is billed: launch vm status {name}, launch vm delete {name}"
            error.hint = "\n".join(filter(None, (error.hint, billed)))
        raise
    for line in gpus.strip().splitlines():
        printer.say(line)
    return ready


def vm_interrupted_text(job: Job | None, name: str) -> str:
    """Return what continues after Ctrl-C, and the commands for it."""
    if job is None:
        return "interrupted before a VM was found\nlaunch vm list shows whether one was created"
    return (
        f"stopped waiting; the VM keeps running\nlaunch vm status {name} shows it; launch vm delete {name} deletes it"
    )


def show_workstation(machine: VmInstance, price: Price, output: Output, now: float, *, is_ready: bool) -> None:
    """Print the VM, its price and end, and how to connect to it."""
    if output is not Output.text:
        printed({**machine_data(machine, disks_of(machine, ()), now), "ready": is_ready}, output)
        return
    name = machine.name
    print(f"{name} is {'ready' if is_ready else machine.status}: {machine.machine_type} in {machine.zone}")
    print(price_and_end(machine, price, now))
    print(f"launch ssh {name}\n    opens a shell; -- CMD runs a command, --port-forward 8888 forwards a port")
    print(f"launch vm stop {name}\n    stops it and keeps its disk; launch vm delete {name} deletes both")
