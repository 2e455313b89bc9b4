"""Run ssh attached to this terminal, or capture a command's output.

Messages of ssh and its tunnel go to a separate log. So the remote command's output is unchanged, and a failure of ssh
can be distinguished from one of the command.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError
from launcher.jobs.vm import VmInstance
from launcher.ssh import command
from launcher.ssh.errors import FAILED, Explained, explain
from launcher.ssh.keys import missing_program

ANSWER_SECONDS: Final = 120.0
"""Timeout of a quick command. Connecting takes most of it."""


class Answer(NamedTuple):
    """The result of a remote command. `fault` is set if ssh itself failed."""

    code: int
    out: str = ""
    err: str = ""
    fault: Explained | None = None


class Remote(NamedTuple):
    """A VM and its SSH target. `account` is named in errors about missing permissions."""

    machine: VmInstance
    target: command.SshTarget
    account: str

    def run_attached(
        self,
        remote: Sequence[str] = (),
        *,
        forwards: Iterable[command.Forward] = (),
        shell: bool = True,
        tty: bool = False,
    ) -> int:
        """Run a command, or a shell, with this process's terminal; return its exit code.

        Raises LaunchError: ssh itself failed.
        """
        with temporary_folder("ssh") as folder:
            log = Path(folder, "log")
            argv = command.command(self.target, remote, forwards=forwards, log=log, shell=shell, tty=tty)
            code = run_in_foreground(argv)
            if fault := self.fault(code, log):
                raise fault.error
        return 128 - code if code < 0 else code

    def run(self, remote: Sequence[str], *, stdin: bytes = b"", seconds: float = ANSWER_SECONDS) -> Answer:
        """Run a command and return its output. Raises LaunchError: ssh is not installed."""
        with temporary_folder("ssh") as folder:
            log = Path(folder, "log")
            try:
                argv = command.command(self.target, remote, log=log)
                ran = subprocess.run(argv, input=stdin, capture_output=True, check=False, timeout=seconds)
            except FileNotFoundError:
                raise missing_program("ssh") from None
            except subprocess.TimeoutExpired:
                late = LaunchError(f"no answer from {self.machine.name} for {seconds:.0f} s")
                return Answer(FAILED, fault=Explained(late, passing=True))
            out, err = (text.decode(errors="replace") for text in (ran.stdout, ran.stderr))
            return Answer(ran.returncode, out, err, self.fault(ran.returncode, log))

    def fault(self, code: int, log: Path) -> Explained | None:
        """Return the reason why ssh failed, or None if it did not."""
        if code != FAILED:
            return None
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return explain(text, self.machine, self.facts)

    @property
    def facts(self) -> Mapping[str, str]:
        """Return the values that an error message needs."""
        target = self.target
        account = self.account or "YOU@EXAMPLE.COM"
        kind = "serviceAccount" if account.endswith(".gserviceaccount.com") else "user"
        whose = {"account": account, "member": f"{kind}:{account}"}
        return {"user": target.user, "port": str(target.port), "known_hosts": str(target.known_hosts), **whose}


def run_in_foreground(argv: Sequence[str]) -> int:
    """Run a program with this process's terminal; return its exit code (negative: the signal that ended it).

    Ctrl-C only affects the program: ssh passes it on, or ends. Raises LaunchError: the program is not installed.
    """
    try:
        with sigint_ignored():  # before the start, because Ctrl-C may come immediately
            return subprocess.Popen(argv).wait()
    except FileNotFoundError:
        raise missing_program(argv[0]) from None


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Ignore SIGINT in this process only. Uses a handler instead of SIG_IGN, which a started program would inherit."""

    def ignore(_signal: int, _frame: FrameType | None) -> None:
        """Do nothing: the program in the foreground gets the signal as well."""

    before = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
