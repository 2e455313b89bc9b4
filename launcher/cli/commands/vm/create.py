"""`launch vm`: create a Deep Learning VM to work on over SSH, or with --run a VM that runs a job and deletes itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.commands import vertex
from launcher.cli.commands.vertex import NoPreflight, Preflight
from launcher.cli.help_page import COST, MACHINE, OUTPUT, RUN, option
from launcher.cli.options import (
    BuilderFlag,
    CreateRepository,
    DryRun,
    Explain,
    Flags,
    Offline,
    Output,
    OutputFormat,
    ResumeLast,
    WatchFor,
    Yes,
    flags_of,
    gather,
)
from launcher.errors import UsageError, refuse_with

if TYPE_CHECKING:
    from launcher.spec.reader import Override


SpecFile = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC]", help="YAML file; default: a VM to work on, or with --run the built-in job."),
]
ToRun = Annotated[bool, option(RUN, "--run", help="Run the spec's job, then delete the VM.")]
Detach = Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the VM is created.")]
Lease = Annotated[str | None, option(COST, "--lease", help="Stop the VM after this time (4h).", metavar="TIME")]
IdleStop = Annotated[
    str | None,
    option(COST, "--idle-stop", help="Stop the VM when idle for this long (30m).", metavar="TIME"),
]
ExternalIp = Annotated[bool, option(MACHINE, "--external-ip", help="Give the VM an external IP address.")]
ImageFamily = Annotated[
    str | None,
    option(MACHINE, "--image-family", help="Use another Deep Learning VM image.", metavar="FAMILY"),
]
DefaultAccount = Annotated[
    bool,
    option(
        MACHINE,
        "--allow-default-service-account",
        help="Allow the default service account, despite its project-wide Editor role.",
    ),
]
Resume = Annotated[
    str | None,
    option(RUN, "--resume", help="Resume a run that has ended (implies --run).", metavar="RUN"),
]
New = Annotated[bool, option(RUN, "--new", help="With --run: start a fresh run, even if it ran before.")]


def vm(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    run: ToRun = False,
    dry_run: DryRun = False,
    explain: Explain = False,
    detach: Detach = False,
    preflight: Preflight = False,
    no_preflight: NoPreflight = False,
    lease: Lease = None,
    idle_stop: IdleStop = None,
    external_ip: ExternalIp = False,
    image_family: ImageFamily = None,
    allow_default_service_account: DefaultAccount = False,
    resume: Resume = None,
    last: ResumeLast = False,
    new: New = False,
    watch_for: WatchFor = None,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    yes: Yes = False,
    offline: Offline = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Create a VM with GPUs to work on over SSH, or with --run one that runs a job.

    Without --run: creates a Deep Learning VM and returns when it is ready. The VM stops itself when its lease ends.
    With --run: runs the spec's job in its container and follows it to its end; then the VM deletes itself. If there
    is no capacity, launch tries the next zone.
    """
    from launcher.cli.ui.plan_page import show_plan
    from launcher.inputs.planning import planned

    flags = flags_of(ctx)
    run = run or resume is not None  # only runs can be resumed
    dry_run = dry_run or explain
    vertex.check_run_flags(dry_run, detach, resume, new, watch_for, flags, last)
    for_runs = {"--resume": resume, "--new": new, "--watch-for": watch_for, "--run-id": flags.run_id}
    if preflight:
        refuse_with("--preflight", {"--no-preflight": no_preflight, "--dry-run": dry_run, "--resume": resume})
    if not run and (flag := first_given(for_runs)):
        raise UsageError(f"{flag} requires --run", "Add --run: launch vm SPEC --run …")
    if run and (flag := first_given({"--lease": lease, "--idle-stop": idle_stop})):
        raise UsageError(f"{flag} cannot be combined with --run", "To limit the time of a run, use --hours.")
    flags, own = for_vm(flags, run=run, lease=lease, idle_stop=idle_stop, external_ip=external_ip, family=image_family)
    inputs = partial(gather, "vm", training=run, more=own, allow_default_account=allow_default_service_account)
    if preflight:
        vertex.preflight_only(inputs(spec, flags), output_format)
    elif dry_run:
        found = inputs(spec, flags)
        show_plan(planned(found, offline=offline), found.spec, output_format, settings=found.settings, explain=explain)
    elif run:
        from launcher.cli.flows.launch import LaunchOptions, launch_or_resume
        from launcher.runs.submit import SubmitOptions

        options = LaunchOptions(
            detach=detach,
            target="vm",
            inputs=inputs,
            watch_seconds=watch_for,
            yes=yes,
            offline=offline,
            last=last,
            submit=SubmitOptions(builder=builder, create_repository=create_repository, preflight=not no_preflight),
        )
        launch_or_resume(spec, flags, options, output_format, resume=resume, new=new)
    else:
        from launcher.cli.flows.vm_workstation import create_workstation
        from launcher.runs.cost_limit import is_limited

        gathered = inputs(spec, flags)
        create_workstation(
            gathered,
            output_format,
            detach=detach,
            preflight=not no_preflight,
            offline=offline,
            limited=is_limited(gathered),
            yes=yes,
        )


def first_given(flags: Mapping[str, object]) -> str:
    """Return the first flag that was given, or an empty text."""
    return next((name for name, value in flags.items() if value not in (None, False)), "")


def for_vm(
    flags: Flags, *, run: bool, lease: str | None, idle_stop: str | None, external_ip: bool, family: str | None
) -> tuple[Flags, tuple[Override, ...]]:
    """Return the overrides of the VM flags. For a VM to work on, --image is the image of the boot disk."""
    from launcher.spec.reader import Override

    own: dict[str, tuple[object, str]] = {"vm.lease": (lease, "--lease"), "vm.idle_stop": (idle_stop, "--idle-stop")}
    own |= {"vm.external_ip": (external_ip or None, "--external-ip"), "vm.image_family": (family, "--image-family")}
    if not run:
        own["vm.image"] = (flags.image, "--image")
        flags = flags._replace(image=None)
    return flags, tuple(Override(path, value, flag) for path, (value, flag) in own.items() if value is not None)
