"""`launch slurm`: run a training job on a Slurm cluster."""

# No `from __future__ import annotations`: Typer would compile the annotations at every start, twice.

from enum import StrEnum
from typing import Annotated

import typer

from launcher.cli.help_page import COMMON, MACHINE, OUTPUT, RUN, WHERE, option
from launcher.cli.options import AcceptHostKey, Container, DryRun, Explain, Mounts, Output, SpecFile, WatchFor, flags_of
from launcher.errors import UsageError
from launcher.spec.reader import Override


class ScriptOutput(StrEnum):
    """What a dry run prints; `sh`: the batch script alone."""

    text = "text"
    json = "json"
    yaml = "yaml"
    sh = "sh"


def slurm(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    on: Annotated[
        str | None,
        option(WHERE, "--on", help="The login node, as ssh knows it; default: sbatch here.", metavar="LOGIN"),
    ] = None,
    partition: Annotated[str | None, option(WHERE, "--partition", help="Partition.", metavar="NAME")] = None,
    account: Annotated[str | None, option(WHERE, "--account", help="Account to charge.", metavar="NAME")] = None,
    cpu: Annotated[bool, option(MACHINE, "--cpu", help="Run on CPUs, without GPUs.")] = False,
    python: Annotated[
        str | None, option(RUN, "--python", help="The Python on the shared disk that runs the job.", metavar="PATH")
    ] = None,
    container: Container = None,
    mount: Mounts = None,
    dry_run: DryRun = False,
    explain: Explain = False,
    test_only: Annotated[
        bool, option(OUTPUT, "--test-only", help="Ask the cluster when the job would start; queue nothing.")
    ] = False,
    detach: Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the job is queued.")] = False,
    resume: Annotated[str | None, option(RUN, "--resume", help="Resume a run that has ended.", metavar="RUN")] = None,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, even if this job has run before.")] = False,
    accept_host_key: AcceptHostKey = False,
    watch_for: WatchFor = None,
    output_format: Annotated[
        ScriptOutput, option(COMMON, "-o", help="Output format; with --dry-run, sh is the batch script.")
    ] = ScriptOutput.text,
) -> None:
    """Run a training job on a Slurm cluster.

    Plans the run (--dry-run shows the plan, -o sh the batch script), sends the code to the shared disk and queues the
    job, under one name, exactly once. After a preemption or at its time limit the job saves, and is queued again. The
    same command on an active run follows that run.
    """
    from msgspec import convert

    from launcher.cli.flows.on_host import HostOptions, launch_on_host

    if output_format is ScriptOutput.sh and not dry_run:
        raise UsageError("-o sh prints the batch script of a dry run", "Add --dry-run.")
    is_script = output_format is ScriptOutput.sh
    options = convert({**ctx.params, "slurm": True, "script": is_script}, HostOptions)
    changes = {"slurm.login": on, "slurm.partition": partition, "slurm.account": account}
    output = Output.text if is_script else Output(output_format.value)
    more = tuple(Override(path, value, f"--{path[6:]}") for path, value in changes.items() if value is not None)
    launch_on_host(on or "", spec, flags_of(ctx), options, output, "launch slurm", more)
