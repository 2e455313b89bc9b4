"""Launch a spec as a run on a machine that is reached by SSH, or in its Slurm, and follow it to its end."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from launcher import catalog
from launcher.cli.flows.launch import LaunchOptions, follow_driver
from launcher.cli.options import Flags, Output, gather
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.plan_page import show_plan
from launcher.errors import UsageError, refuse_with
from launcher.inputs.gather import Inputs
from launcher.inputs.planning import planned
from launcher.plan.model import Plan
from launcher.plan.on_host import on_host
from launcher.plan.on_slurm import on_slurm
from launcher.plan.placement import choose
from launcher.remote.agent import Agent
from launcher.remote.connection import THIS_MACHINE, Host, connect_to
from launcher.runs.on_host import HostContext, remember
from launcher.runs.submit import submission
from launcher.services.hosts.arrival import prepare_hosts
from launcher.services.hosts.environment import packages_of
from launcher.spec.hosts_file import read_hosts
from launcher.spec.kinds import IMAGE, MOUNT
from launcher.spec.models import Slurm
from launcher.spec.reader import Override


class HostOptions(Struct, frozen=True, kw_only=True):
    """The options of `launch on` and `launch slurm`, by the names of their parameters. `slurm`: queue the job in Slurm;
    `test_only`: only ask it."""

    cpu: bool
    python: str | None
    container: str | None
    mount: list[str] | None
    dry_run: bool
    explain: bool
    detach: bool
    resume: str | None
    new: bool
    accept_host_key: bool
    watch_for: float | None
    slurm: bool = False
    script: bool = False
    test_only: bool = False


def launch_on_host(
    host: str,
    spec: Path | None,
    flags: Flags,
    options: HostOptions,
    output_format: Output,
    command: str,
    more: Sequence[Override] = (),
) -> None:
    """Plan a run on a host, print the plan or start the run there, and follow it.

    `host`: HOST, or HOST,HOST for a node on each; empty: slurm.login of the spec. `command`: the beginning of the
    command, for errors. `more`: changes of the spec. Raises UsageError, LaunchError.
    """
    check_options(host, spec, flags, options, command)
    if options.resume:
        flags = flags._replace(run_id=options.resume)
    hosts = read_hosts(os.environ)
    host, *peers = host.split(",")
    changes = [*more, *hosts.defaults(host)]
    if peers:
        changes.append(Override("machine.nodes", 1 + len(peers), "HOST,HOST", is_default=True))
    inputs = gather("local", spec, flags, more=changes, docker=True, command=f"{command} job.yaml")
    host = host or inputs.spec.slurm.login or THIS_MACHINE
    check_hosts([host, *peers], inputs.spec.machine.nodes, is_slurm=options.slurm)
    if options.slurm and Host(host).session:
        raise UsageError(
            f"{host} is a Colab runtime, which has no Slurm", f"Run it there without: launch on {host} SPEC"
        )
    entry, cluster = hosts.entry(host), inputs.spec.slurm if options.slurm else Slurm()
    python = options.python or (entry.python if not options.container else None) or ""
    container: dict[str, object] = {}
    if image := options.container or cluster.container or entry.container:
        container = {"image": image, "mounts": [*(options.mount or cluster.mounts or entry.mounts)]}
    elif options.mount:
        raise UsageError("--mount is for a container", "Name its image too: --container IMAGE")

    def plan_of(inputs: Inputs) -> Plan:
        local = planned(inputs)
        with inputs.located.naming_places():
            plan = on_host(
                local,
                host,
                inputs.located.spec.output or "runs",
                code=inputs.context.code.digest,
                python=python,
                container=container,
                packages={} if python else packages_of(inputs),
                gpus=0 if options.cpu else local.machine.gpus,
                price=inputs.spec.limits.price,
                price_source=inputs.located.place("limits.price"),
                peers=peers,
                is_colab=bool(Host(host).session),
                usd_limit=inputs.spec.limits.usd,
            )
            if not options.slurm:
                return plan
            return on_slurm(plan, inputs.spec.slurm, choose(inputs.spec, catalog.load(), "local")[0].gpu.name)

    plan = plan_of(inputs)
    if options.dry_run and options.script:
        print(plan.attempts[0].request["script"], end="")
        return
    if options.dry_run or options.explain:
        show_plan(plan, inputs.spec, output_format, explain=options.explain)
        return
    connections = [connect_to(name, accept_host_key=options.accept_host_key) for name in (host, *peers)]
    context, printer = HostContext(connection=connections[0]), EventPrinter(plan)
    for connection in connections:
        connection.run("true")
    if options.test_only:
        print(Agent(connections[0]).call("test", {"script": plan.attempts[0].request["script"]})["text"])
        return
    driver, watcher = submission(
        plan,
        inputs,
        context,
        printer,
        lambda plan: prepare_hosts(plan, inputs, connections, printer.say),
        plan_again=plan_of,
        new=options.new,
        resume=bool(options.resume),
    )
    for warning in driver.plan.warnings if not options.resume else ():
        printer.say(warning)
    remember(driver.plan.run, host)
    launching = LaunchOptions(detach=options.detach, watch_seconds=options.watch_for, target="on")
    follow_driver(driver, watcher, printer, output_format, launching, fresh=True, resume=bool(options.resume))


def check_hosts(hosts: Sequence[str], nodes: int, *, is_slurm: bool) -> None:
    """Check that the hosts are as many as the job has nodes, and can be its hosts. Raises UsageError."""
    if "" in hosts:
        raise UsageError(f"a host is missing in {','.join(hosts)!r}", "Name them without spaces: HOST,HOST")
    for host in hosts:
        _ = Host(host).words  # raises UsageError: it is no name of a host
    if is_slurm and len(hosts) > 1:
        raise UsageError("--on names one login node", f"Slurm chooses the nodes: --on {hosts[0]} --nodes {len(hosts)}")
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"{','.join(hosts)} names a host twice", "Name each host once.")
    if not is_slurm and nodes != len(hosts):
        named = f"{len(hosts)} hosts are named" if len(hosts) > 1 else "one host is named"
        raise UsageError(
            f"the job has {nodes} nodes, but {named}", f"Name a host for each node: HOST,HOST. Or: --nodes {len(hosts)}"
        )
    if len(hosts) > 1 and (colab := next((host for host in hosts if Host(host).session), "")):
        raise UsageError(f"{colab} is a Colab runtime, which other hosts can't reach", "Run the job on it alone.")


def check_options(host: str, spec: Path | None, flags: Flags, options: HostOptions, command: str) -> None:
    """Refuse options that do not go together. Raises UsageError."""
    name = command.split()[1]
    if host.endswith((".yaml", ".yml")):
        named = f"launch slurm {host} --on LOGIN" if options.slurm else f"launch on HOST {host}"
        raise UsageError(f"{host} is a spec, not a host", f"Name both: {named}")
    of_cloud = {"--spot": flags.spot, "--region": flags.region, "--zone": flags.zone, "--flex-start": flags.flex_start}
    refuse_with(
        f"launch {name}",
        {**of_cloud, "--provisioning": flags.provisioning},
        f"Remove it: a {'cluster' if options.slurm else 'host'} has neither regions nor provisioning.",
    )
    if options.container and not re.match(IMAGE, options.container):
        problem = f"--container: {options.container!r} is no image"
        raise UsageError(problem, "Name HOST/NAME:TAG, or a path there: /shared/pytorch.sif")
    if wrong := [mount for mount in options.mount or () if not re.match(MOUNT, mount)]:
        raise UsageError(f"--mount: {wrong[0]!r} is no folder", "Name its whole path there: /data, or /data:/mnt/data")
    if options.dry_run or options.explain:
        others = {"--detach": options.detach, "--resume": options.resume, "--new": options.new}
        refuse_with("--dry-run", {**others, "--watch-for": options.watch_for, "--test-only": options.test_only})
    if options.new:
        refuse_with("--new", {"--resume": options.resume, "--run-id": flags.run_id})
    if options.resume:
        refuse_with("--resume", {"--run-id": flags.run_id})
        if spec is None:
            raise UsageError("--resume needs the spec", f"{command} SPEC --resume {options.resume}")
