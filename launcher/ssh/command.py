"""SSH command lines and settings: what is run to reach a VM, as argument lists. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from launcher.errors import UsageError

PORT: Final = 22
CONNECT_SECONDS: Final = 30
ALIVE_SECONDS: Final = 60
"""How often a silent connection is tried: what lies between drops those that say nothing for some minutes."""


class SshTarget(Struct, frozen=True, kw_only=True):
    """How one VM is reached over SSH, and as whom."""

    alias: str
    """compute.NUMBER: the name under which its host keys are known. A VM that is made again under an old name has
    another number, so nobody takes it for the one before."""
    host: str
    """Its address; the alias where a proxy leads to it."""
    user: str
    key: Path
    """The private key."""
    known_hosts: Path
    port: int = PORT
    is_known: bool = False
    """Whether `known_hosts` has its keys from Google: then no other is taken, not even at the first contact."""
    proxy: tuple[str, ...] = ()
    """The program that connects its stdin and stdout with the VM's port; %p stands for the port."""


class Forward(NamedTuple):
    """A port of this machine that leads to one of the VM."""

    local: int
    remote: int


def settings(target: SshTarget, log: Path | None = None) -> dict[str, str]:
    """ssh's settings for a VM (ssh_config(5)), values as they stand in a file. `log` takes the proxy's stderr, and has
    of ssh whether the remote command has ended by itself: 255 alone doesn't tell."""
    found = {
        "HostName": target.host.replace("%", "%%"),
        "Port": str(target.port),
        "User": checked(target.user),
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
    more = {"LogLevel": "DEBUG1"} if log else {}
    return found | more | ({"ProxyCommand": proxy_command(target.proxy, log)} if target.proxy else {})


def checked(user: str) -> str:
    """A user's name, as ssh and every Linux take it. Raises UsageError."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", user):
        raise UsageError(f"{user!r} is no user of a VM", "A name has letters, digits and . _ -")
    return user


def proxy_command(proxy: Sequence[str], log: Path | None) -> str:
    """A proxy as a shell takes it; % is ssh's own sign, but for the %p that is meant."""
    words = [word if word == "%p" else shlex.quote(word).replace("%", "%%") for word in proxy]
    more = f" 2>>{shlex.quote(str(log)).replace('%', '%%')}" if log else ""
    return " ".join(words) + more


def quoted(text: str) -> str:
    """A value in a line of ssh's settings. Raises UsageError: no line can hold it."""
    if not text.isprintable():
        raise UsageError(f"ssh takes no {text!r}", "It has characters that can't be printed.")
    if re.fullmatch(r"[\w./@:+%~-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def path_value(path: Path) -> str:
    """A file in ssh's settings, where % is a sign of its own."""
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
    """`ssh` as an argument list. `log` takes all that ssh and its proxy have to say, so that what the remote command
    writes stays its own. Without a remote command there is a terminal, or with `shell` off nothing but the ports; a
    remote command has one with `tty`."""
    ports = [word for each in forwards for word in ("-L", f"127.0.0.1:{each.local}:localhost:{each.remote}")]
    options = settings(target, log) | ({"ExitOnForwardFailure": "yes"} if ports else {})
    flags = [*(["-t"] if tty else []), *([] if shell else ["-N"]), *(["-E", str(log)] if log else [])]
    argv = ["ssh", *flags, *ports, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    return [*argv, "--", target.alias, *((line(remote),) if remote else ())]


def line(remote: Sequence[str]) -> str:
    """A remote command as the shell there takes it: one word is shell text already, of several each arrives as it
    is."""
    return remote[0] if len(remote) == 1 else shlex.join(remote)


def block(names: Iterable[str], target: SshTarget, note: str = "", log: Path | None = None) -> str:
    """A Host block of ssh's settings."""
    lines = [f"Host {' '.join(names)}", *([f"    # {note}"] if note else [])]
    return "\n".join([*lines, *(f"    {name} {value}" for name, value in settings(target, log).items())]) + "\n"


def rsync(settings_file: Path, log: Path, names: Path, folder: Path, target: SshTarget, destination: str) -> list[str]:
    """`rsync` of the files named in `names` (a NUL after each), by the Host block in `settings_file`. Links that lead
    out of the folder's copy arrive as what they lead to."""
    # rsync takes this apart by itself: quotes hold words together, and nothing stands for a quote in them.
    over = " ".join(["ssh", "-E", f'"{log}"', "-F", f'"{settings_file}"'])
    what = ["-az", "--copy-unsafe-links", "--from0", f"--files-from={names}"]
    return ["rsync", *what, "-e", over, f"{folder}/", f"{target.alias}:{destination}/"]


def forward(text: str) -> Forward:
    """8888, or LOCAL:REMOTE. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    ports = Forward(int(found[1]), int(found[2] or found[1])) if found else Forward(0, 0)
    if not all(0 < port < 65536 for port in ports):
        raise UsageError(f"--port-forward {text} is no port", "It takes a port (8888), or LOCAL:REMOTE (9000:8888).")
    return ports
