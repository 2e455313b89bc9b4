"""Change a VM and wait for it; wait until a new workstation VM is ready, or until the cause of its failure is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, NotAuthorised, StillRunning, UnreachableError
from launcher.gcp.api import answer_behind, refusal_of
from launcher.jobs.vm import VmInstance
from launcher.services.base import CreateRefused, GoneError
from launcher.services.compute.client import SERVICE, Compute, Operation
from launcher.services.compute.job_state import WAITING
from launcher.ssh.session import Answer

Say = Callable[[str], None]
MAX_SECONDS: Final = 900.0
"""Time limit for a VM to start, to stop, or to be ready once it is RUNNING. A machine with many GPUs takes minutes to
start, and installing a driver three to five."""
REPORT_SECONDS: Final = 20.0
"""Interval of progress lines."""
POLL_SECONDS: Final = 2.0
READY_POLL_SECONDS: Final = 5.0
DENIED_SECONDS: Final = 120.0
"""Time for which keys may be refused: OS Login is set up while the VM boots, and a grant takes a minute to apply."""
CONSOLE_LINES: Final = 12
"""Lines of the serial console in an error."""
STEPS: Final[Mapping[str, str]] = {
    "booting": "booting",
    "driver": "installing the NVIDIA driver",
    "ready": "startup script finished",
}
"""Texts for the startup script's states (guest attribute launch/state)."""
CHECK: Final = ("nvidia-smi", "-L")
"""Fails until the driver works."""

RunCheck = Callable[[VmInstance], Answer]
"""Run `CHECK` on the VM over SSH (or `true`, on a VM without GPUs)."""


def change_and_wait(
    compute: Compute, machine: VmInstance, change: Callable[[], Operation], statuses: frozenset[str], say: Say
) -> VmInstance:
    """Change a VM, wait until it has one of the `statuses`, and return it. `say` reports progress.

    Raises:
        CreateRefused: Google refused the change, at once or later.
        GoneError: the VM no longer exists.
        StillRunning: not done after a quarter of an hour.
    """
    wait_for_operation(compute, begin_change(change), say)
    return wait_for_status(compute, machine, statuses, say)


def begin_change(change: Callable[[], Operation]) -> Operation:
    """Begin a change and return its operation.

    Raises CreateRefused; GoneError; UnreachableError: it is unknown whether it began.
    """
    from google.api_core.exceptions import GoogleAPICallError

    try:
        return change()
    except (GoneError, UnreachableError):
        raise
    except LaunchError as error:
        answer = answer_behind(error)
        if not isinstance(answer, GoogleAPICallError) or answer.code == 401:
            raise
        raise CreateRefused(error.problem, refusal_of(answer, SERVICE)) from error


def wait_for_operation(compute: Compute, operation: Operation, say: Say) -> Operation:
    """Wait until an operation has succeeded, and return it. Outages are tolerated.

    Raises CreateRefused, StillRunning.
    """
    began = compute.clock.now()
    while not operation.done:
        waited = compute.clock.now() - began
        if waited >= MAX_SECONDS:
            raise StillRunning(f"Compute Engine has not finished after {waited / 60:.0f} minutes; it continues")
        try:
            operation = compute.wait(operation, REPORT_SECONDS)
        except StillRunning:
            say(f"still waiting for Compute Engine ({compute.clock.now() - began:.0f} s)")
        except UnreachableError as error:
            say(f"temporarily unavailable, retrying: {error.problem}")
    return operation.require_success()


def wait_for_status(compute: Compute, machine: VmInstance, statuses: frozenset[str], say: Say) -> VmInstance:
    """Wait until a VM has one of the `statuses`, and return it. Raises GoneError, StillRunning."""
    began = reported = compute.clock.now()
    while True:
        try:
            machine = compute.instance(machine.zone, machine.id)
        except UnreachableError as error:
            say(f"temporarily unavailable, retrying: {error.problem}")
        else:
            if machine.status in statuses:
                return machine
        now = compute.clock.now()
        if now - began >= MAX_SECONDS:
            raise StillRunning(f"{machine.name} is still {machine.status} after {(now - began) / 60:.0f} minutes")
        if now - reported >= REPORT_SECONDS:
            say(f"{machine.name} is {machine.status}")
            reported = now
        compute.clock.sleep(POLL_SECONDS)


def wait_ready(
    machine: VmInstance, compute: Compute, run_check: RunCheck, report: Callable[[str], None], clock: Clock = REAL
) -> tuple[VmInstance, str]:
    """Wait until a VM is ready; return it and the check's output. `report` receives each step once.

    Raises LaunchError: it did not become ready; has the reason, if known. The VM is not changed.
    """
    waiter = ReadyWaiter(machine, compute, run_check, report, clock)
    while (out := waiter.poll()) is None:
        clock.sleep(READY_POLL_SECONDS)
    return waiter.machine, out


class ReadyWaiter:
    """The state of waiting for one VM."""

    def __init__(
        self, machine: VmInstance, compute: Compute, run_check: RunCheck, report: Callable[[str], None], clock: Clock
    ) -> None:
        self.machine = machine
        self._compute, self._run_check, self._report, self._clock = compute, run_check, report, clock
        self._deadline: float | None = None
        self._denied_since: float | None = None
        self._last_report = ""

    def poll(self) -> str | None:
        """Poll once; return the check's output if the VM is ready. Raises LaunchError: it failed or took too long."""
        try:
            self.machine = self._compute.instance(self.machine.zone, self.machine.id)
            attributes = self._compute.guest_attributes(self.machine)
        except UnreachableError as error:
            self._report_once(error.problem)
            self._check_deadline(error)
            return None
        except GoneError as error:
            raise LaunchError(f"{self.machine.name} was deleted before it was ready") from error
        if self.machine.status in WAITING:
            self._report_once(f"{self.machine.name} is {self.machine.status}")
            return None
        self._deadline = self._deadline or self._clock.now() + MAX_SECONDS
        self._check_status(attributes)
        return self._check_ready(attributes)

    def _check_ready(self, attributes: Mapping[str, str]) -> str | None:
        try:
            answer = self._run_check(self.machine)
        except UnreachableError as error:
            self._report_once(error.problem)
            self._check_deadline(error)
            return None
        if answer.code == 0:
            return answer.out
        state = attributes.get("state", "")
        step = STEPS.get(state, "booting")
        if answer.fault is None:
            lines = (answer.err or answer.out).strip().splitlines()
            problem = f"nvidia-smi failed: {lines[0]}" if lines else "nvidia-smi failed"
            self._report_once(f"connected by SSH; {'waiting for nvidia-smi' if state == 'ready' else step}")
            self._check_deadline(LaunchError(problem))
            return None
        if not answer.fault.passing or self._denied_too_long(answer.fault.error, attributes):
            raise answer.fault.error
        self._report_once(f"{step}; waiting for SSH")
        self._check_deadline(answer.fault.error)
        return None

    def _denied_too_long(self, error: LaunchError, attributes: Mapping[str, str]) -> bool:
        """Return whether the VM still refuses our key although OS Login must be set up by now."""
        if not isinstance(error, NotAuthorised):
            self._denied_since = None
            return False
        now = self._clock.now()
        self._denied_since = now if self._denied_since is None else self._denied_since
        return now - self._denied_since > DENIED_SECONDS and bool(attributes)

    def _check_status(self, attributes: Mapping[str, str]) -> None:
        """Raise LaunchError if the startup script failed or the VM is no longer running."""
        name, status = self.machine.name, self.machine.status
        if attributes.get("state") == "failed":
            reason = attributes.get("reason") or "its startup script failed"
            raise LaunchError(f"{name} did not become ready: {reason}", f"To investigate: launch ssh {name}")
        if status not in ("RUNNING", "REPAIRING"):
            problem = f"{name} is {status}: it was stopped before it was ready{self._console()}"
            raise LaunchError(problem, f"launch vm status {name}")

    def _check_deadline(self, reason: LaunchError) -> None:
        """Raise LaunchError if the time limit has passed."""
        if self._deadline is None or self._clock.now() < self._deadline:
            return
        name, minutes = self.machine.name, f"{MAX_SECONDS / 60:.0f} minutes"
        problem = f"{name} is not ready after {minutes}: {reason.problem}{self._console()}"
        raise LaunchError(problem, reason.hint or f"To investigate: launch ssh {name}") from reason

    def _console(self) -> str:
        """Return the last lines of the VM's serial console, to append to a problem's text."""
        try:
            text, _ = self._compute.serial(self.machine)
        except LaunchError:
            return ""
        printable = ("".join(filter(str.isprintable, line))[:76] for line in text.splitlines() if line.strip())
        lines = [f"  {line}" for line in printable][-CONSOLE_LINES:]
        return "\nLast lines of its serial console:\n" + "\n".join(lines) if lines else ""

    def _report_once(self, text: str) -> None:
        if text != self._last_report:
            self._last_report = text
            self._report(text)
