"""`launch ssh`: open a shell on a VM, run a command there, or forward its ports."""

from __future__ import annotations

import shlex
import socket
import sys
from typing import Annotated

import typer

from launcher.cli.flows.find_vm import one_machine, open_compute
from launcher.cli.flows.ssh_access import Port, Tunnel, User, remote
from launcher.cli.help_page import CONNECTION, OUTPUT, option
from launcher.cli.options import InZone, VmName
from launcher.cli.ui.streams import say
from launcher.errors import UsageError
from launcher.ssh.command import Forward, forward
from launcher.ssh.command import command as ssh_command


def ssh(
    name: VmName,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="Command to run; launch returns its exit code.")
    ] = None,
    *,
    port_forward: Annotated[
        list[str] | None,
        option(
            CONNECTION, "--port-forward", help="Forward this port (8888, LOCAL:REMOTE); repeatable.", metavar="PORT"
        ),
    ] = None,
    tty: Annotated[bool, option(CONNECTION, "-t", help="Give the command a terminal (htop, an editor).")] = False,
    user: User = None,
    zone: InZone = None,
    port: Port = 22,
    iap: Tunnel = False,
    dry_run: Annotated[bool, option(OUTPUT, "--dry-run", help="Print the ssh command; connect to nothing.")] = False,
) -> None:
    """Open a shell on a VM, or run a command there.

    One word after -- is shell text (launch ssh dev -- 'nvidia-smi | head'). Several words are passed unchanged.
    """
    forwards = [forward(text) for text in port_forward or ()]
    compute = open_compute()
    machine = one_machine(compute, name, zone)
    there = remote(compute, machine, user=user, port=port, tunnel=iap, register=not dry_run)
    shell = bool(command) or not forwards or sys.stdin.isatty()
    if dry_run:
        print(shlex.join(ssh_command(there.target, command or (), forwards=forwards, shell=shell, tty=tty)))
        return
    for each in forwards:
        check_port(each)
    for each in forwards:
        say(f"http://127.0.0.1:{each.local} is port {each.remote} of {machine.name}")
    if not shell:
        say("press Ctrl-C to stop")
    if code := there.run_attached(command or (), forwards=forwards, shell=shell, tty=tty):
        raise typer.Exit(code)


def check_port(wanted: Forward) -> None:
    """Check that a local port is free. Raises UsageError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", wanted.local))
        except OSError as error:
            problem = f"local port {wanted.local} is not available: {error.strerror}"
            other = wanted.local + 1 if wanted.local < 65535 else 8889
            raise UsageError(problem, f"Use another local port: --port-forward {other}:{wanted.remote}") from error
