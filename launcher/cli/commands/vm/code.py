"""`launch vm code`: add a VM to the ssh configuration."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.flows.find_vm import one_machine, open_compute
from launcher.cli.flows.ssh_access import Port, Tunnel, User, remote
from launcher.cli.help_page import COMMON, option
from launcher.cli.options import InZone, VmName
from launcher.cli.ui.streams import say
from launcher.ssh import config_file, keys


def vm_code(
    name: VmName,
    *,
    yes: Annotated[bool, option(COMMON, "--yes", "-y", help="Change ~/.ssh/config without asking.")] = False,
    user: User = None,
    zone: InZone = None,
    port: Port = 22,
    iap: Tunnel = False,
) -> None:
    """Add a VM to your ssh configuration by its name.

    For VS Code Remote, scp and rsync. Writes a separate file, which one line in ~/.ssh/config includes.
    """
    compute = open_compute()
    machine = one_machine(compute, name, zone)
    there = remote(compute, machine, user=user, port=port, tunnel=iap)
    fleet = compute.instances()
    file = keys.settings_folder(os.environ) / "ssh_config"
    config_file.put(file, machine, there.target, config_file.gone(fleet.machines, fleet.unread, compute.project))
    print(f"added {machine.name} to {file}")
    config = keys.home(os.environ) / ".ssh" / "config"
    if is_used(config, file, yes=yes):
        show_lines(machine.name, config)
    if not there.target.proxy:
        print(f"A stop and start changes its address: then run launch vm code {machine.name} again")


def is_used(config: Path, file: Path, *, yes: bool) -> bool:
    """Return whether ~/.ssh/config includes launch's file; add the line if the user agrees."""
    if config_file.is_included(config, file, os.environ):
        return True
    line = config_file.include_line(file)
    if not yes:
        question = f"Add this line at the top of {config}?\n    {line}\n"
        yes = sys.stdin.isatty() and typer.confirm(question, default=True, prompt_suffix="")
    if yes:
        config_file.include(config, file)
        print(f"added the line to {config}")
        return True
    print(f"{config} is unchanged; to use the name with ssh, add this line at its top:\n    {line}")
    return False


def show_lines(name: str, config: Path) -> None:
    """Print commands that use the name."""
    if config_file.own_block(config, name):
        say(f"{config} also has its own Host {name}; launch's entry takes precedence")
    print(f"    ssh {name}")
    print(f"    code --remote ssh-remote+{name}")
    print(f"    scp {name}:FILE .")
    print(f"    rsync -az FOLDER/ {name}:FOLDER/")
