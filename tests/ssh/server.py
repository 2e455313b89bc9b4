"""OpenSSH's server, as an ordinary user's process: whoever runs the tests may log in, with the key of the test."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")
"""Debian's package openssh-server."""

LOGIN = """#!/bin/sh
# Each session's: its own home folder, and programs of the test's.
cd {home} && HOME={home} && PATH={programs}:{path} && export HOME PATH
[ -z "$SSH_ORIGINAL_COMMAND" ] && exec /bin/sh
exec {within} /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""

HANG_UP = """p=$$
until grep -q ^sshd /proc/$p/comm; do p=$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$p/status); done
kill -9 $p"""
"""A shell's way to end the connection that it was started by."""


class SshServer:
    """One server, from `with` to its end. `home` is where its users are at home, `programs` comes first on their PATH;
    `path` is the rest of that. `within`: what runs each command, such as `ip netns exec NAME`."""

    def __init__(self, folder: Path, *, path: str = "/usr/local/bin:/usr/bin:/bin", within: str = "") -> None:
        self.folder = folder
        self.home = folder / "home"
        self.programs = folder / "programs"
        self.user = getpass.getuser()
        self.port = free_port()
        self.log = folder / "sshd.log"
        self._path = path
        self._within = within

    @property
    def host_keys(self) -> dict[str, str]:
        """Its host keys, as a VM's guest attributes have them."""
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        return {kind: key}

    def let_in(self, public_key: Path) -> None:
        """Whoever has this key."""
        with (self.folder / "authorized_keys").open("a") as file:
            file.write(public_key.read_text())

    def program(self, name: str, text: str) -> None:
        """A program of that name there: a shell script."""
        file = self.programs / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def __enter__(self) -> Self:
        if SSHD is None:
            pytest.skip("OpenSSH's server is not installed (Debian: openssh-server)")
        for folder in (self.home, self.programs):
            folder.mkdir(parents=True)
        make_key(self.folder / "host_key")
        login = self.folder / "login"
        login.write_text(LOGIN.format(home=self.home, programs=self.programs, path=self._path, within=self._within))
        login.chmod(0o755)
        (self.folder / "authorized_keys").touch()
        (self.folder / "sshd_config").write_text(self._settings(login))
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # root's server wants a folder to lock itself into
        argv = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.log)]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while f"Server listening on 127.0.0.1 port {self.port}." not in (log := self._read_log()):
            # Its port was free when it was chosen; by now another process may have it, and even answer there.
            if self._process.poll() is not None and "Address already in use" in log:
                self.port = free_port()
                self.log.unlink()
                (self.folder / "sshd_config").write_text(self._settings(login))
                self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
            elif self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(log)
            time.sleep(0.02)
        return self

    def _read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(10)
        print(self._read_log())  # pytest shows it if the test fails

    def _settings(self, login: Path) -> str:
        lines = [
            "ListenAddress 127.0.0.1",
            f"Port {self.port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
            f"ForceCommand {login}",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PrintMotd no",
            "KexAlgorithms curve25519-sha256",  # half the time of the usual one
        ]
        return "\n".join(lines) + "\n"


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def make_key(file: Path) -> Path:
    """A key pair; the public half beside it, with .pub."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(file)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return file
