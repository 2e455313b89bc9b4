"""Run commands on a host over one connection of OpenSSH, which all processes of launch share.

`Host` is what ssh knows it by: its settings (~/.ssh/config), keys and agent apply. launch adds what a program needs
that may not ask: BatchMode, no forwarding of agent, ports or X11, and a host key that is known.

A login shell may be fish or print a banner, so a command is sent as base64 and its output begins after a mark.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from launch_train.host.folder_server import MARK
from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.remote import colab

CONNECT_SECONDS: Final = 20
ALIVE_SECONDS: Final = 15
"""Interval of keep-alive messages; after four without an answer the connection is closed."""
PERSIST_SECONDS: Final = 600
"""For so long the shared connection stays open without a command."""
ANSWER_SECONDS: Final = 60.0
NO_SSH: Final = ("ssh is not installed", "Install OpenSSH's client: apt-get install openssh-client")
FAILED: Final = 255
"""ssh's exit code for its own failures."""
BUSY: Final = "kex_exchange_identification"
"""In ssh's message if the server closed a new connection at once, as a busy login node does (MaxStartups)."""
BUSY_PAUSES: Final = (0.5, 1.5, 4.0)
"""Seconds before a connection is tried again: nothing was sent."""
LONGEST_PATH: Final = 45
"""Of the folder for connections: the path of a socket has at most 107 characters, 58 of them ssh's own name for it
while it is made."""


ADDRESS: Final = re.compile(
    r"((?:[^\s@/:,-][^\s@/:,]*@)?)(\[[0-9A-Fa-f:]+\]|[^\s@/:,\[\]-][^\s@/:,\[\]]*)(?::(\d{1,5}))?"
)
"""[USER@]HOST[:PORT]; a name that begins with - would be an option of ssh."""


THIS_MACHINE: Final = "this-machine"
"""Stands for the machine on which launch itself runs: its commands need no connection."""


class CommandFailed(LaunchError):
    """A command on a host failed."""

    code: int = 1
    """Its exit code."""


class Host(NamedTuple):
    """A machine: an alias of ssh's settings, [USER@]HOST[:PORT], colab:NAME, or a name of hosts.yaml for one of these.

    All properties raise SpecError: hosts.yaml is invalid."""

    name: str

    @property
    def address(self) -> str:
        """Return what ssh knows it by, or colab:NAME."""
        from launcher.spec.hosts_file import read_hosts

        return read_hosts(os.environ).entry(self.name).host or self.name

    @property
    def session(self) -> str:
        """Return NAME of colab:NAME; empty: it is no Colab runtime."""
        match = colab.ADDRESS.fullmatch(self.address)
        return match[1] if match else ""

    @property
    def forget_key(self) -> str:
        """Return the command that removes its stored key."""
        *port, _, host = self.words
        address = host.rpartition("@")[2]
        return f"ssh-keygen -R '[{address}]:{port[1]}'" if port else f"ssh-keygen -R {address}"

    @property
    def ssh_text(self) -> str:
        """Return how a person names it after `ssh`, to be pasted."""
        *port, _, host = self.words
        proxy = [f'-o ProxyCommand="colab ssh --proxy-mode -s {self.session}"'] if self.session else []
        return " ".join([*proxy, *port, host])

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of a command line that name it. Raises UsageError: it cannot be a host."""
        if session := self.session:
            return ("--", f"root@colab-{session}")
        match = ADDRESS.fullmatch(address := self.address)
        if not match or not address.isprintable():
            raise UsageError(f"invalid host {address!r}", "Name a host of ~/.ssh/config, or USER@HOST[:PORT].")
        user, host, port = match.groups()
        return (*(("-p", port) if port else ()), "--", user + host.strip("[]"))


class Connection:
    """Commands on one host. All methods raise UnreachableError (no connection; waiting may help), NotAuthorised (the
    login or the host key is refused), UsageError (no such host) and LaunchError (the command failed)."""

    def __init__(self, host: Host, *, accept_host_key: bool = False) -> None:
        """`accept_host_key`: store the key of a host that is not known yet; a changed key is refused anyway."""
        self.host = host
        self._host_key = "accept-new" if accept_host_key else "yes"

    def argv(self, script: str) -> list[str]:
        """Return the command line that runs a script of `sh` on the host."""
        options = {
            "BatchMode": "yes",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",
            "PermitLocalCommand": "no",
            "RequestTTY": "no",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": str(ALIVE_SECONDS),
            "ServerAliveCountMax": "4",
            "StrictHostKeyChecking": self._host_key,
            "LogLevel": "INFO",
            "ControlMaster": "auto",
            "ControlPath": f"{sockets()}/%C",
            "ControlPersist": str(PERSIST_SECONDS),
        }
        if session := self.host.session:
            options |= colab.ssh_options(session, colab_log(session))
        encoded = base64.b64encode(f"umask 077; printf '\\002launch\\002\\n'\n{script}".encode()).decode()
        command = f"sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"
        if self.host.name == THIS_MACHINE:
            return ["sh", "-c", command]
        settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *settings, *self.host.words, command]

    def run(self, script: str, *, stdin: bytes | IO[bytes] = b"", seconds: float = ANSWER_SECONDS) -> bytes:
        """Run a script of `sh` and return its output. `stdin`: bytes, or a file of them."""
        for pause in (*BUSY_PAUSES, None):
            ran, text = self._run_once(script, stdin, seconds)
            if pause is None or ran.returncode != FAILED or BUSY not in text or self.host.session:
                break
            time.sleep(pause)
        _, mark, output = ran.stdout.partition(MARK)
        if ran.returncode == FAILED:
            raise UnreachableError(f"the connection to {self.host.name} was lost") if mark else self.explained(text)
        if ran.returncode:
            said = text or without_control(output)
            error = CommandFailed(f"{self.host.name}: {said or f'exit code {ran.returncode}'}")
            error.code = ran.returncode
            raise error
        return output

    def _run_once(
        self, script: str, stdin: bytes | IO[bytes], seconds: float
    ) -> tuple[subprocess.CompletedProcess[bytes], str]:
        # A file for stderr: the shared connection keeps it open. None for bytes, which may be secrets.
        options: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
        with tempfile.TemporaryFile() as errors:
            if not isinstance(stdin, bytes):
                stdin.seek(0)
            try:
                ran = subprocess.run(
                    self.argv(script), **options, stdout=subprocess.PIPE, stderr=errors, check=False, timeout=seconds
                )
            except FileNotFoundError:
                raise LaunchError(*NO_SSH) from None
            except subprocess.TimeoutExpired:
                late = f"{self.host.name} gave no answer for {seconds:.0f} s"
                raise UnreachableError(late, "Try again in a moment.") from None
            errors.seek(0)
            return ran, without_control(errors.read())

    def open(self, script: str) -> subprocess.Popen[bytes]:
        """Start a script of `sh`, with pipes. Raises LaunchError: ssh is not installed."""
        try:
            return subprocess.Popen(
                self.argv(script),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for launch, which still has to read or write
            )
        except FileNotFoundError:
            raise LaunchError(*NO_SSH) from None

    def send(
        self,
        files: Iterable[tuple[str, Path]],
        folder: str,
        *,
        texts: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Send files to a new folder on the host (a shell word), whole or not at all; nothing if it exists.

        `files`: pairs of the name there and the path here; links are sent as links. `texts`: files by their content,
        which are programs. `check` is called when all are packed, and raises if they are not what they should be.
        """
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
                for name, path in files:
                    tar.add(path, name, recursive=False)
                for name, text in (texts or {}).items():
                    with tempfile.NamedTemporaryFile() as program:
                        Path(program.name).write_text(text, encoding="utf-8")
                        Path(program.name).chmod(0o755 if name.partition("/")[2].startswith("bin/") else 0o644)
                        tar.add(program.name, name)
            check()
            archive.seek(0)
            script = f"""
set -e; to={folder}; [ -e "$to" ] && {{ touch "$to"; exit 0; }}
part="$to.part-$$"; mkdir -p "$part"; trap 'rm -rf "$part"' EXIT
tar --no-same-owner -xzf - -C "$part"; mv -T "$part" "$to" 2>/dev/null || [ -e "$to" ]
"""
            self.run(script, stdin=archive, seconds=3600.0)

    def close(self) -> None:
        """End the shared connection."""
        if self.host.name == THIS_MACHINE:
            return
        argv = [word for word in self.argv("") if not word.startswith("sh -c ")]
        subprocess.run([argv[0], "-O", "exit", *argv[1:]], capture_output=True, check=False, timeout=ANSWER_SECONDS)

    def explained(self, text: str) -> LaunchError:
        """Return the error of a connection that failed, from ssh's messages."""
        name = self.host.name
        if session := self.host.session:
            return colab.connection_error(session, text, colab_log(session))
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text or "Host key for" in text:
            return NotAuthorised(
                f"the host key of {name} has changed: another machine,\nor an intercepted connection",
                f"If it was reinstalled: {self.host.forget_key}\nThen: launch gpus --on {name} --accept-host-key",
            )
        if "Host key verification failed" in text or "host key is known" in text:
            return NotAuthorised(
                f"{name} is not a known host; its key is {self.fingerprint()}",
                f"If that is its key: launch gpus --on {name} --accept-host-key",
            )
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
        if "Permission denied" in text or "Too many authentication failures" in text:
            hint = f"Set up a key: ssh-copy-id {self.host.ssh_text}\nThen try: ssh {self.host.ssh_text} true"
            return NotAuthorised(f"{name} refuses the login: {last}", hint)
        if "Could not resolve hostname" in text or "Bad configuration option" in text or "Bad port" in text:
            return UsageError(f"no connection to {name}: {last}", "Name a host of ~/.ssh/config, or USER@HOST[:PORT].")
        return UnreachableError(f"no connection to {name}: {last}", f"Try: ssh {self.host.ssh_text} true")

    def fingerprint(self) -> str:
        """Return the kind and the fingerprint of the host's key, as ssh logs it."""
        argv = self.argv("true")
        argv[1:1] = ["-v", "-o", "ControlPath=none", "-o", "LogLevel=DEBUG1"]
        ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ANSWER_SECONDS)
        match = re.search(r"Server host key: (\S+ SHA256:\S+)", without_control(ran.stderr))
        return match[1] if match else "unknown"


@cache
def connect_to(name: str, *, accept_host_key: bool = False) -> Connection:
    """Return this process's connection to a host. Opens nothing yet. `accept_host_key`: as for Connection."""
    return Connection(Host(name), accept_host_key=accept_host_key)


@cache
def sockets() -> Path:
    """Return the folder of this user's shared connections, which nobody else may read."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "launch", "ssh")
    if len(str(folder)) > LONGEST_PATH:
        folder = Path(tempfile.gettempdir(), f"launch-ssh-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise LaunchError(f"{folder} must belong to you alone", f"rm -rf {folder}")
    return folder


def colab_log(session: str) -> Path:
    """Return the file for the errors of the program `colab`."""
    return sockets() / f"colab-{session}.log"


def without_control(text: bytes) -> str:
    """Return a host's text without control characters, which could rewrite the terminal."""
    lines = text.decode(errors="replace").splitlines()
    return "\n".join("".join(char for char in line if char.isprintable() or char == "\t") for line in lines).strip()
