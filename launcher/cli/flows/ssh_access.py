"""Connect to a VM over SSH: its key, user, address and host keys."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from typing import Annotated

from launcher.cli.help_page import CONNECTION, option
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError, UnreachableError
from launcher.inputs.gcloud_config import account
from launcher.jobs.vm import VmInstance
from launcher.services.compute.client import Compute
from launcher.ssh import keys
from launcher.ssh.command import SshTarget, alias, choose_route
from launcher.ssh.keys import HOST_KEYS
from launcher.ssh.keys import host_keys as of_attributes
from launcher.ssh.oslogin import OsLogin
from launcher.ssh.session import Remote

User = Annotated[
    str | None,
    option(CONNECTION, "--user", help="User on the VM; default: your OS Login user.", metavar="USER"),
]
Port = Annotated[int, option(CONNECTION, "--port", help="The VM's SSH port.", metavar="PORT", min=1, max=65535)]
Tunnel = Annotated[bool, option(CONNECTION, "--iap", help="Connect through Identity-Aware Proxy.")]


def remote(
    compute: Compute,
    machine: VmInstance,
    *,
    user: str | None = None,
    port: int = 22,
    tunnel: bool = False,
    register: bool = True,
) -> Remote:
    """Return the VM with its SSH connection.

    With `register`, a missing key is created and registered with OS Login; without, nothing is changed.

    Raises LaunchError: the VM is not running, is not reachable from here, or refuses the login.
    """
    route = choose_route(machine, shutil.which("gcloud"), os.environ, tunnel=tunnel)
    folder = keys.home(os.environ) / ".ssh"
    key = keys.ensure_key(folder, say) if register else folder / keys.KEY
    name = user or oslogin_user(compute, machine, keys.public_key(key) if register else None)
    settings = keys.settings_folder(os.environ)
    target = SshTarget(
        alias=alias(machine),
        host=route.host,
        proxy=route.proxy,
        port=port,
        user=name,
        key=key,
        known_hosts=keys.known_hosts(settings, alias(machine)),
        is_known=register and keys.store_host_keys(settings, alias(machine), host_keys_of(compute, machine)),
    )
    return Remote(machine, target, account(os.environ))


def oslogin_user(compute: Compute, machine: VmInstance, key: str | None) -> str:
    """Return our OS Login user; a given key is registered for that user."""
    profile = OsLogin(compute.project, os.environ, account(os.environ), compute.clock, say)
    return profile.user(key, machine.region, time.time()) if key else profile.known_user() or "USER"


def check_access(compute: Compute) -> None:
    """Check, before a VM is created, that SSH to it will work from here. Raises LaunchError."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise keys.missing_program(program)
    with suppress(UnreachableError):  # checked again when the VM exists
        OsLogin(compute.project, os.environ, account(os.environ), compute.clock, say).known_user()


def host_keys_of(compute: Compute, machine: VmInstance) -> tuple[str, ...]:
    """Return the VM's host keys from its guest attributes; none if it publishes none."""
    try:
        return of_attributes(compute.guest_attributes(machine, HOST_KEYS))
    except LaunchError:  # e.g. forbidden by a policy: then the first connection's key is trusted
        return ()
