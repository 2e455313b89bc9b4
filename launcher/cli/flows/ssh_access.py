"""A VM as somewhere to go: found by name, with the key, the user and the way that lead into it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from launcher.cli.help_page import CONNECTION, option
from launcher.errors import LaunchError
from launcher.workspace.gcloud_config import account

if TYPE_CHECKING:
    from launcher.compute.client import Compute
    from launcher.jobs.vm import Machine
    from launcher.ssh.session import Answer, Remote

User = Annotated[
    str | None,
    option(CONNECTION, "--user", help="User on the VM; default: your OS Login user.", metavar="USER"),
]
Port = Annotated[int, option(CONNECTION, "--port", help="The VM's SSH port.", metavar="PORT", min=1, max=65535)]
Tunnel = Annotated[bool, option(CONNECTION, "--iap", help="Connect through Identity-Aware Proxy.")]


def remote(
    compute: Compute,
    machine: Machine,
    *,
    user: str | None = None,
    port: int = 22,
    tunnel: bool = False,
    register: bool = True,
) -> Remote:
    """The VM and the way to it. With `register` a key is made where there is none, and OS Login is told of it; without
    nothing is changed anywhere.

    Raises:
        LaunchError: it doesn't run, can't be reached from here, or lets nobody in.
    """
    from launcher.cli.flows.find_vm import say
    from launcher.ssh import keys
    from launcher.ssh.command import SshTarget
    from launcher.ssh.route import alias, choose_route
    from launcher.ssh.session import Remote

    way_to = choose_route(machine, shutil.which("gcloud"), os.environ, tunnel=tunnel)
    folder = keys.home(os.environ) / ".ssh"
    key = keys.ensure_key(folder, say) if register else folder / keys.KEY
    name = user or user_of(compute, machine, keys.public_key(key) if register else None)
    settings = keys.settings_folder(os.environ)
    target = SshTarget(
        alias=alias(machine),
        host=way_to.host,
        proxy=way_to.proxy,
        port=port,
        user=name,
        key=key,
        known_hosts=keys.known_hosts(settings, alias(machine)),
        is_known=register and keys.store_host_keys(settings, alias(machine), host_keys(compute, machine)),
    )
    return Remote(machine, target, account(os.environ))


def user_of(compute: Compute, machine: Machine, key: str | None) -> str:
    """Who we are there, by OS Login; the key, if one is given, is registered for that user."""
    from launcher.cli.flows.find_vm import say
    from launcher.ssh.oslogin import OsLogin

    profile = OsLogin(compute.project, os.environ, account(os.environ), compute.clock, say)
    return profile.user(key, machine.region, time.time()) if key else profile.known_user() or "USER"


def look_ahead(compute: Compute) -> None:
    """Look whether anything here would keep us out of a VM that is still to be made. Raises LaunchError."""
    from launcher.cli.flows.find_vm import say
    from launcher.gcp.api import UnreachableError
    from launcher.ssh import keys
    from launcher.ssh.oslogin import OsLogin

    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise keys.missing_program(program)
    with suppress(UnreachableError):  # asked again, when the VM is there
        OsLogin(compute.project, os.environ, account(os.environ), compute.clock, say).known_user()


def host_keys(compute: Compute, machine: Machine) -> tuple[str, ...]:
    """The VM's host keys by Google's word; none where it publishes none."""
    from launcher.ssh.keys import HOST_KEYS
    from launcher.ssh.keys import host_keys as of_attributes

    try:
        return of_attributes(compute.guest_attributes(machine, HOST_KEYS))
    except LaunchError:  # forbidden by a policy, say: the first contact decides then
        return ()


def check(compute: Compute, machine: Machine) -> Answer:
    """Whether the VM's GPUs answer over SSH: what `wait_ready` asks again and again."""
    from launcher.compute.wait_ready import CHECK

    return remote(compute, machine).run(CHECK)
