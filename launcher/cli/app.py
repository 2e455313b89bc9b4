"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher import __version__
from launcher.cli import (
    bench,
    build,
    cancel,
    follow,
    init,
    local,
    logs,
    metrics,
    push,
    push_code,
    schema,
    ssh,
    status,
    vertex,
    vm,
    vm_code,
    vm_delete,
    vm_extend,
    vm_list,
    vm_start,
    vm_status,
    vm_stop,
)
from launcher.cli.vmgroup import MAKE, Commands, Make, VmGroup

app = typer.Typer(
    name="launch",
    cls=Commands,
    help="One YAML spec and one command for a multi-GPU training run on Google Cloud.",
    no_args_is_help=True,
    # Plain help and errors: rich costs 70 ms of CPU, as much as everything else of a start (benchmarks/startup.py).
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
app.command("vertex")(vertex.vertex)
vms = typer.Typer(cls=VmGroup, rich_markup_mode=None, help="A VM with GPUs: to work on, or one that trains.")
vms.command(MAKE, cls=Make)(vm.vm)
vms.command("list")(vm_list.list_)
vms.command("status")(vm_status.status)
vms.command("stop")(vm_stop.stop)
vms.command("start")(vm_start.start)
vms.command("extend")(vm_extend.extend)
vms.command("delete")(vm_delete.delete)
vms.command("code")(vm_code.code)
app.add_typer(vms, name="vm")
app.command("ssh")(ssh.ssh)
app.command("push-code")(push_code.push_code)
app.command("local")(local.local)
app.command("status")(status.status)
app.command("follow")(follow.follow)
app.command("logs")(logs.logs)
app.command("metrics")(metrics.metrics)
app.command("cancel")(cancel.cancel)
app.command("bench")(bench.bench)
app.command("build")(build.build)
app.command("push")(push.push)
app.command("init")(init.init)
app.command("schema")(schema.schema)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """One YAML spec and one command for a multi-GPU training run on Google Cloud."""
