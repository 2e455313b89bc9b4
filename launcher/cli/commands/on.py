"""`launch on HOST`: run a training job on a machine that is reached by SSH."""

# No `from __future__ import annotations`: Typer would compile the annotations at every start, twice.

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from launcher.cli.help_page import MACHINE, OUTPUT, RUN, WHERE, option
from launcher.cli.options import (
    AcceptHostKey,
    DryRun,
    Explain,
    Output,
    OutputFormat,
    WatchFor,
    flag_words,
    flags_of,
    gather,
)
from launcher.errors import UsageError, refuse_with

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
    from launcher.plan.model import Plan
    from launcher.remote.connection import Connection


def on(
    ctx: typer.Context,
    host: Annotated[
        str,
        typer.Argument(metavar="HOST", help="A host of ~/.ssh/config or hosts.yaml, USER@HOST[:PORT], or colab:NAME."),
    ],
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="The job's YAML file; default: the built-in job.")
    ] = None,
    *,
    cpu: Annotated[bool, option(MACHINE, "--cpu", help="Run on the host's CPUs, without GPUs.")] = False,
    python: Annotated[
        str | None, option(RUN, "--python", help="The Python on the host that runs the job.", metavar="PATH")
    ] = None,
    dry_run: DryRun = False,
    explain: Explain = False,
    detach: Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the job runs.")] = False,
    resume: Annotated[str | None, option(RUN, "--resume", help="Resume a run that has ended.", metavar="RUN")] = None,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, even if this job has run before.")] = False,
    clean: Annotated[bool, option(WHERE, "--clean", help="Remove what launch put there and nothing needs.")] = False,
    accept_host_key: AcceptHostKey = False,
    watch_for: WatchFor = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a training job on a machine that you reach by SSH.

    Plans the run (--dry-run shows the plan, without a connection), checks GPUs, disk and Python of the host, sends the
    code and starts the job, which outlives the connection. The same command on an active run follows that run.

    --clean removes code, environments, versions of launch and records of jobs that no running job and no run folder
    there needs (--dry-run lists them). Runs stay: launch rm deletes them.
    """
    from launcher.cli.ui.plan_page import show_plan
    from launcher.inputs.planning import planned
    from launcher.plan.on_host import on_host
    from launcher.remote.connection import Host, connect_to
    from launcher.services.hosts.environment import packages_of
    from launcher.spec.hosts_file import read_hosts

    flags = flags_of(ctx)
    if host.endswith((".yaml", ".yml")):
        raise UsageError(f"{host} is a spec, not a host", f"Name the host first: launch on HOST {host}")
    hosts = read_hosts(os.environ)
    if clean:
        of_job: dict[str, object] = {word: True for word in flag_words(flags) if word.startswith("--")}
        of_job |= {"a spec": spec, "--cpu": cpu, "--python": python, "--explain": explain, "--detach": detach}
        refuse_with("--clean", {**of_job, "--resume": resume, "--new": new, "--watch-for": watch_for})
        clean_host(connect_to(host, accept_host_key=accept_host_key), output_format, dry_run=dry_run)
        return
    python = python or hosts.entry(host).python
    _ = Host(host).words  # raises UsageError for a name that is no host, also in a dry run
    of_cloud = {"--spot": flags.spot, "--region": flags.region, "--zone": flags.zone, "--flex-start": flags.flex_start}
    refuse_with(
        "launch on",
        {**of_cloud, "--provisioning": flags.provisioning},
        "Remove it: a host has neither regions nor provisioning.",
    )
    if dry_run or explain:
        refuse_with("--dry-run", {"--detach": detach, "--resume": resume, "--new": new, "--watch-for": watch_for})
    if new:
        refuse_with("--new", {"--resume": resume, "--run-id": flags.run_id})
    if resume:
        refuse_with("--resume", {"--run-id": flags.run_id})
        if spec is None:
            raise UsageError("--resume needs the spec", f"launch on {host} SPEC --resume {resume}")
        flags = flags._replace(run_id=resume)
    inputs = gather("local", spec, flags, more=hosts.defaults(host), docker=True)
    if inputs.spec.machine.nodes > 1:
        raise UsageError("launch on runs a job on one host", "Set --nodes 1; several hosts are not supported yet.")

    def plan_of(inputs: "Inputs") -> "Plan":
        local = planned(inputs)
        with inputs.located.naming_places():
            return on_host(
                local,
                host,
                inputs.located.spec.output or "runs",
                code=inputs.context.code.digest,
                python=python or "",
                packages={} if python else packages_of(inputs),
                gpus=0 if cpu else local.machine.gpus,
                price=inputs.spec.limits.price,
                price_source=inputs.located.place("limits.price"),
                is_colab=bool(Host(host).session),
                usd_limit=inputs.spec.limits.usd,
            )

    plan = plan_of(inputs)
    if dry_run or explain:
        show_plan(plan, inputs.spec, output_format, explain=explain)
        return
    from launcher.cli.flows.launch import LaunchOptions, follow_driver
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.runs.on_host import HostContext, remember
    from launcher.runs.submit import submission
    from launcher.services.hosts.arrival import prepare_host

    context, printer = HostContext(connection=connect_to(host, accept_host_key=accept_host_key)), EventPrinter(plan)
    context.connection.run("true")
    driver, watcher = submission(
        plan,
        inputs,
        context,
        printer,
        lambda plan: prepare_host(plan, inputs, context.connection, printer.say),
        plan_again=plan_of,
        new=new,
        resume=bool(resume),
    )
    for warning in driver.plan.warnings if not resume else ():
        printer.say(warning)
    remember(driver.plan.run, host)
    options = LaunchOptions(detach=detach, watch_seconds=watch_for, target="on")
    follow_driver(driver, watcher, printer, output_format, options, fresh=True, resume=bool(resume))


CLEAN_SECONDS: Final = 600.0
CLEANED: Final = {
    "trainer": "launch version",
    "code": "code version",
    "venvs": "environment",
    "jobs": "job record",
    "work": "working folder",
    "runs-locked": "run lock",
}
"""Folder below ~/launch -> what it holds."""


def clean_host(connection: "Connection", output_format: Output, *, dry_run: bool) -> None:
    """Remove what nothing needs on a host, and print it. Raises LaunchError."""
    from launcher.cli.ui.documents import printed
    from launcher.remote.agent import Agent, trainer_digest
    from launcher.text import plural, size_text

    request = {"trainer": trainer_digest(), "dry_run": dry_run}
    removed = Agent(connection).call("clean", request, seconds=CLEAN_SECONDS)
    if output_format is not Output.text:
        printed({"removed": removed, "dry_run": dry_run}, output_format)
        return
    for folder, name in CLEANED.items():
        if sizes := [item["bytes"] for item in removed if item["path"].startswith(f"{folder}/")]:
            print(f"{plural(len(sizes), name)}: {size_text(sum(sizes))}")
    total = size_text(sum(item["bytes"] for item in removed))
    print(f"{'would remove' if dry_run else 'removed'} {total} below {connection.host.name}:~/launch")
