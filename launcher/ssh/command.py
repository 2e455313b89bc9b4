"""Choose the route to a VM's SSH port, and build SSH command lines and settings, as argument lists. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from launcher.errors import LaunchError, UsageError
from launcher.jobs.vm import DOWN, VmInstance

PORT: Final = 22
CONNECT_SECONDS: Final = 30
ALIVE_SECONDS: Final = 60
"""Interval of keep-alive messages: firewalls drop connections that are idle for some minutes."""


class SshTarget(Struct, frozen=True, kw_only=True):
    """The address of a VM's SSH server, the user and the keys."""

    alias: str
    """compute.NUMBER: the name under which its host keys are stored.

    A recreated VM with the same name has another number, so its keys are not compared with the old ones.
    """
    host: str
    """The address, or the alias if a proxy is used."""
    user: str
    key: Path
    """The private key."""
    known_hosts: Path
    port: int = PORT
    is_known: bool = False
    """True if `known_hosts` has the VM's keys from Google. Then no other key is accepted, not even on first contact."""
    proxy: tuple[str, ...] = ()
    """A command that connects its stdin and stdout to the VM's port. %p stands for the port."""


class Forward(NamedTuple):
    """A local port that is forwarded to a port of the VM."""

    local: int
    remote: int


def settings(target: SshTarget, log: Path | None = None) -> dict[str, str]:
    """Return ssh's settings for a VM (ssh_config(5)), with values as in a file.

    `log` receives the proxy's stderr. With it, ssh also logs whether the remote command exited by itself, which exit
    code 255 doesn't show.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", target.user):
        raise UsageError(f"invalid user name {target.user!r}", "Use letters, digits and . _ -")
    lines = {
        "HostName": target.host.replace("%", "%%"),
        "Port": str(target.port),
        "User": target.user,
        "IdentityFile": path_value(target.key),
        "IdentitiesOnly": "yes",
        "HostKeyAlias": target.alias,
        "UserKnownHostsFile": path_value(target.known_hosts),
        "StrictHostKeyChecking": "yes" if target.is_known else "accept-new",
        "HashKnownHosts": "no",
        "CheckHostIP": "no",
        "ConnectTimeout": str(CONNECT_SECONDS),
        "ServerAliveInterval": str(ALIVE_SECONDS),
    }
    if log:
        lines["LogLevel"] = "DEBUG1"
    if target.proxy:  # a shell command; ssh expands %, so all but %p are doubled
        words = [word if word == "%p" else shlex.quote(word).replace("%", "%%") for word in target.proxy]
        to_log = f" 2>>{shlex.quote(str(log)).replace('%', '%%')}" if log else ""
        lines["ProxyCommand"] = " ".join(words) + to_log
    return lines


def quoted(text: str) -> str:
    """Quote a value for a line of ssh's settings. Raises UsageError: it has unprintable characters."""
    if not text.isprintable():
        raise UsageError(f"invalid value for ssh's settings: {text!r}", "Remove unprintable characters.")
    if re.fullmatch(r"[\w./@:+%~-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def path_value(path: Path) -> str:
    """Quote a path for ssh's settings, where % must be doubled."""
    return quoted(str(path).replace("%", "%%"))


def command(
    target: SshTarget,
    remote: Sequence[str] = (),
    *,
    forwards: Iterable[Forward] = (),
    log: Path | None = None,
    shell: bool = True,
    tty: bool = False,
) -> list[str]:
    """Return an `ssh` command line.

    log: Receives all messages of ssh and its proxy, so that they don't mix with the remote command's output.
    shell: Without a remote command, open a shell; False: only forward ports.
    tty: Give the remote command a terminal.
    """
    ports = [word for each in forwards for word in ("-L", f"127.0.0.1:{each.local}:localhost:{each.remote}")]
    options = settings(target, log) | ({"ExitOnForwardFailure": "yes"} if ports else {})
    flags = [*(["-t"] if tty else []), *([] if shell else ["-N"]), *(["-E", str(log)] if log else [])]
    argv = ["ssh", *flags, *ports, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    line = remote[0] if len(remote) == 1 else shlex.join(remote)  # a single word is already shell text
    return [*argv, "--", target.alias, *([line] if remote else [])]


def host_block(names: Iterable[str], target: SshTarget, note: str = "", log: Path | None = None) -> str:
    """Return a Host block of ssh's settings."""
    lines = [f"Host {' '.join(names)}", *([f"    # {note}"] if note else [])]
    return "\n".join([*lines, *(f"    {name} {value}" for name, value in settings(target, log).items())]) + "\n"


def rsync(settings_file: Path, log: Path, names: Path, folder: Path, target: SshTarget, destination: str) -> list[str]:
    """Return the `rsync` command for the files listed in `names` (NUL-terminated).

    It uses the Host block in `settings_file`. Links that point outside of the folder are copied as files.
    """
    # rsync splits this itself: quotes group words and can't be escaped.
    over = " ".join(["ssh", "-E", f'"{log}"', "-F", f'"{settings_file}"'])
    what = ["-az", "--copy-unsafe-links", "--from0", f"--files-from={names}"]
    return ["rsync", *what, "-e", over, f"{folder}/", f"{target.alias}:{destination}/"]


def forward(text: str) -> Forward:
    """Parse a port (8888) or LOCAL:REMOTE. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    ports = Forward(int(match[1]), int(match[2] or match[1])) if match else Forward(0, 0)
    if not all(0 < port < 65536 for port in ports):
        raise UsageError(f"invalid port in --port-forward {text}", "Use a port (8888) or LOCAL:REMOTE (9000:8888).")
    return ports


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

    Raises LaunchError: the VM is not running, or the tunnel needs gcloud.
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
