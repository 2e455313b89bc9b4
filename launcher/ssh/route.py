"""The way to a VM's SSH port: straight to its external address, or through Google's tunnel (IAP). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from launcher.errors import LaunchError
from launcher.jobs.vm import DOWN, Machine

TUNNEL_URL: Final = "LAUNCH_IAP_TUNNEL_URL"
"""Where the tunnel begins, instead of Google's own address (ws://HOST:PORT): a relay of one's own, as in tests."""
INSTALL: Final = "Install gcloud (https://cloud.google.com/sdk/docs/install), or make the VM with --external-ip."
PASSING: Final = frozenset({"PROVISIONING", "STAGING", "PENDING"})


class Reach(NamedTuple):
    """Where ssh connects, and through which program; an empty one: directly."""

    host: str
    proxy: tuple[str, ...] = ()


def alias(machine: Machine) -> str:
    """The name under which the VM's host keys are known, the same as gcloud's."""
    return f"compute.{machine.id}"


def reach(machine: Machine, gcloud: str | None, environ: Mapping[str, str], *, tunnel: bool = False) -> Reach:
    """How to get to a running VM; `gcloud` is where that program is. With `tunnel` never by its external address.

    Raises:
        LaunchError: it doesn't run, or there is no way to it from here.
    """
    refuse_stopped(machine)
    if machine.external_ip and not tunnel:
        return Reach(machine.external_ip)
    if gcloud is None:
        raise no_way(machine.name, external_ip=bool(machine.external_ip))
    return Reach(alias(machine), iap(machine, gcloud, environ))


def no_way(name: str, *, external_ip: bool) -> LaunchError:
    """The error about a tunnel that nobody here can open; of a VM that is to be made, too."""
    without = "is to be reached through IAP, but" if external_ip else "has no external IP, and"
    return LaunchError(f"{name} {without} gcloud, which opens the tunnel to it, isn't here", INSTALL)


def refuse_stopped(machine: Machine) -> None:
    """Raises LaunchError: nobody answers there, and what to do about it."""
    if machine.status in PASSING:
        raise LaunchError(f"{machine.name} is {machine.status}: it has no SSH yet", f"launch vm status {machine.name}")
    if machine.status in DOWN:
        raise LaunchError(f"{machine.name} is stopped", f"launch vm start {machine.name}")
    if machine.status not in ("RUNNING", "REPAIRING", ""):
        hint = f"When it is stopped: launch vm start {machine.name}"
        raise LaunchError(f"{machine.name} is on its way down ({machine.status})", hint)


def iap(machine: Machine, gcloud: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """gcloud as ssh's proxy: its own way to open a tunnel (gcloud compute ssh does the same)."""
    where = (f"--project={machine.project}", f"--zone={machine.zone}")
    own = environ.get(TUNNEL_URL, "")
    other = (f"--iap-tunnel-url-override={own}",) if own else ()
    # Errors alone: at "warning" each connection begins with a page about NumPy.
    quiet = ("--verbosity=error", "--quiet")
    return (gcloud, "compute", "start-iap-tunnel", machine.name, "%p", "--listen-on-stdin", *where, *other, *quiet)
