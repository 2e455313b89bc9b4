"""ssh, run: with this terminal, or for what it answers. What ssh and its tunnel say goes into a log of their own, so
that the remote command's output stays exactly what it is, and a failure of ssh's can be told from one of the command's.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Final, NamedTuple

from launcher.errors import LaunchError
from launcher.jobs.vm import Machine
from launcher.ssh import command
from launcher.ssh.errors import FAILED, Explained, explained
from launcher.ssh.keys import no_ssh

ANSWER_SECONDS: Final = 120.0
"""For a command that answers at once: the connection takes most of it."""


class Answer(NamedTuple):
    """How a remote command ended. `fault`: it was ssh that failed, not the command."""

    code: int
    out: str = ""
    err: str = ""
    fault: Explained | None = None


class Remote(NamedTuple):
    """One VM and the way to it. `account` is whose rights are missing, where some are."""

    machine: Machine
    target: command.SshTarget
    account: str

    def attached(
        self,
        remote: Sequence[str] = (),
        *,
        forwards: Iterable[command.Forward] = (),
        shell: bool = True,
        tty: bool = False,
    ) -> int:
        """Run a command, or a shell, with this process's terminal, and answer its exit code.

        Raises:
            LaunchError: ssh itself failed; why, and what to do.
        """
        with scratch() as folder:
            log = folder / "log"
            argv = command.command(self.target, remote, forwards=forwards, log=log, shell=shell, tty=tty)
            code = waited(argv)
            if fault := self.fault(code, log):
                raise fault.error
        return 128 - code if code < 0 else code

    def asked(self, remote: Sequence[str], *, sent: bytes = b"", seconds: float = ANSWER_SECONDS) -> Answer:
        """Run a command, and answer what it said. Raises LaunchError: there is no ssh here."""
        with scratch() as folder:
            log = folder / "log"
            try:
                argv = command.command(self.target, remote, log=log)
                ran = subprocess.run(argv, input=sent, capture_output=True, check=False, timeout=seconds)
            except FileNotFoundError:
                raise no_ssh("ssh") from None
            except subprocess.TimeoutExpired:
                late = LaunchError(f"{self.machine.name} has given no answer for {seconds:.0f} s")
                return Answer(FAILED, fault=Explained(late, passing=True))
            out, err = (text.decode(errors="replace") for text in (ran.stdout, ran.stderr))
            return Answer(ran.returncode, out, err, self.fault(ran.returncode, log))

    def fault(self, code: int, log: Path) -> Explained | None:
        """Why ssh has failed; None where it hasn't."""
        if code != FAILED:
            return None
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return explained(text, self.machine, self.facts)

    @property
    def facts(self) -> Mapping[str, str]:
        """What an explanation names."""
        target = self.target
        account = self.account or "YOU@EXAMPLE.COM"
        kind = "serviceAccount" if account.endswith(".gserviceaccount.com") else "user"
        whose = {"account": account, "member": f"{kind}:{account}"}
        return {"user": target.user, "port": str(target.port), "known_hosts": str(target.known_hosts), **whose}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the log, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="launch-ssh-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def waited(argv: Sequence[str], stdin: int | IO[bytes] | None = None) -> int:
    """The exit code of a program that has this process's terminal; negative: the signal that ended it.

    Ctrl-C is the program's: ssh hands it on, or ends by it. Raises LaunchError: there is no such program.
    """
    try:
        with terminal_is_its_own():  # before the program is there: it may be interrupted at once
            return subprocess.Popen(argv, stdin=stdin).wait()
    except FileNotFoundError:
        raise no_ssh(argv[0]) from None


@contextmanager
def terminal_is_its_own() -> Iterator[None]:
    """SIGINT does nothing here. A handler is set and not SIG_IGN, which a program that is started would inherit: with a
    handler it has its default."""

    def leave_it(_signal: int, _frame: FrameType | None) -> None:
        """The program in front has it too."""

    before = signal.signal(signal.SIGINT, leave_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
