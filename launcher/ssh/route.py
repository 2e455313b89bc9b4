"""Choose the route to a VM's SSH port: its external address, or Google's tunnel (IAP). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from launcher.errors import LaunchError
from launcher.jobs.vm import DOWN, VmInstance

TUNNEL_URL: Final = "LAUNCH_IAP_TUNNEL_URL"
"""Replaces Google's relay with another one (ws://HOST:PORT), for tests."""
INSTALL: Final = "Install gcloud (https://cloud.google.com/sdk/docs/install), or create the VM with --external-ip."
CREATING: Final = frozenset({"PROVISIONING", "STAGING", "PENDING"})


class Route(NamedTuple):
    """The host that ssh connects to, and the proxy command. Empty: a direct connection."""

    host: str
    proxy: tuple[str, ...] = ()


def alias(machine: VmInstance) -> str:
    """Return the name under which the VM's host keys are stored, the same as gcloud's."""
    return f"compute.{machine.id}"


def choose_route(machine: VmInstance, gcloud: str | None, environ: Mapping[str, str], *, tunnel: bool = False) -> Route:
    """Return the route to a running VM.

    `gcloud` is the path of that program. With `tunnel`, IAP is used even if the VM has an external address.

    Raises:
        LaunchError: the VM is not running, or the tunnel needs gcloud.
    """
    refuse_stopped(machine)
    if machine.external_ip and not tunnel:
        return Route(machine.external_ip)
    if gcloud is None:
        raise missing_gcloud(machine.name, external_ip=bool(machine.external_ip))
    return Route(alias(machine), iap_command(machine, gcloud, environ))


def missing_gcloud(name: str, *, external_ip: bool) -> LaunchError:
    """Return the error for a tunnel without gcloud, to an existing VM or one about to be created."""
    reason = "the tunnel (IAP)" if external_ip else "the tunnel (IAP; it has no external IP)"
    return LaunchError(f"gcloud is not installed; {reason} to {name} needs it", INSTALL)


def refuse_stopped(machine: VmInstance) -> None:
    """Raise LaunchError if the VM is not running."""
    if machine.status in CREATING:
        raise LaunchError(f"{machine.name} is {machine.status}: no SSH yet", f"launch vm status {machine.name}")
    if machine.status in DOWN:
        raise LaunchError(f"{machine.name} is stopped", f"launch vm start {machine.name}")
    if machine.status not in ("RUNNING", "REPAIRING", ""):
        hint = f"Once it is stopped: launch vm start {machine.name}"
        raise LaunchError(f"{machine.name} is shutting down ({machine.status})", hint)


def iap_command(machine: VmInstance, gcloud: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the gcloud command that ssh uses as its proxy, as `gcloud compute ssh` does."""
    where = (f"--project={machine.project}", f"--zone={machine.zone}")
    url = environ.get(TUNNEL_URL, "")
    override = (f"--iap-tunnel-url-override={url}",) if url else ()
    # Errors only: with "warning", gcloud prints a page about NumPy for each connection.
    quiet = ("--verbosity=error", "--quiet")
    return (gcloud, "compute", "start-iap-tunnel", machine.name, "%p", "--listen-on-stdin", *where, *override, *quiet)
