"""Waiting until a new VM is ready for work: until its GPUs answer over SSH, or something says why they won't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from launcher.backend.base import GoneError
from launcher.clock import REAL, Clock
from launcher.compute.client import Compute
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import UnreachableError
from launcher.jobs.vm import Machine
from launcher.ssh.session import Answer

LONGEST: Final = 900.0
"""Seconds from when it runs. Installing a driver takes three to five minutes."""
EVERY: Final = 5.0
DENIED: Final = 120.0
"""Seconds for which keys may be refused: OS Login is set up while the VM boots, and a grant takes a minute."""
SERIAL: Final = 12
"""Lines of the serial port that are shown."""
COMING: Final = frozenset({"PENDING", "PROVISIONING", "STAGING"})
SAID: Final[Mapping[str, str]] = {
    "booting": "it boots",
    "driver": "the NVIDIA driver is being installed",
    "ready": "its startup script is done",
}
"""What the startup script's states mean (guest attributes, launch/state)."""
CHECK: Final = ("nvidia-smi", "-L")
"""Fails until the driver works."""

Ask = Callable[[Machine], Answer]
"""Run `CHECK` there (or anything, on a VM without GPUs), by the way that leads to it now."""


def wait_ready(
    machine: Machine, compute: Compute, ask: Ask, tell: Callable[[str], None], clock: Clock = REAL
) -> tuple[Machine, str]:
    """The VM once its GPUs answer, and what `ask` printed then. `tell` hears of each step once.

    Raises:
        LaunchError: it didn't get ready: the reason, as far as anything tells it. The VM is left as it is.
    """
    wait = Wait(machine, compute, ask, tell, clock)
    while (out := wait.look()) is None:
        clock.sleep(EVERY)
    return wait.machine, out


class Wait:
    """The state of waiting for one VM."""

    def __init__(self, machine: Machine, compute: Compute, ask: Ask, tell: Callable[[str], None], clock: Clock) -> None:
        self.machine = machine
        self._compute, self._ask, self._tell, self._clock = compute, ask, tell, clock
        self._until: float | None = None
        self._denied: float | None = None
        self._told = ""

    def look(self) -> str | None:
        """One look: what the check printed, when it is ready. Raises LaunchError: it won't be, or the time is over."""
        try:
            self.machine = self._compute.instance(self.machine.zone, self.machine.id)
            said = self._compute.guest_attributes(self.machine)
        except UnreachableError as error:
            self._say(error.problem)
            self._refuse_late(error)
            return None
        except GoneError as error:
            raise LaunchError(f"{self.machine.name} is gone: it was deleted before it was ready") from error
        if self.machine.status in COMING:
            self._say(f"{self.machine.name} is {self.machine.status}")
            return None
        self._until = self._until or self._clock.now() + LONGEST
        self._refuse_failed(said)
        return self._try(said)

    def _try(self, said: Mapping[str, str]) -> str | None:
        try:
            answer = self._ask(self.machine)
        except UnreachableError as error:
            self._say(error.problem)
            self._refuse_late(error)
            return None
        if answer.code == 0:
            return answer.out
        step = SAID.get(said.get("state", ""), "it boots")
        if answer.fault is None:
            words = (answer.err or answer.out).strip().splitlines()
            trouble = LaunchError(f"nvidia-smi says: {words[0]}" if words else "nvidia-smi doesn't work")
            self._say(f"SSH answers; {step}" if said.get("state") != "ready" else "SSH answers; nvidia-smi doesn't yet")
            self._refuse_late(trouble)
            return None
        if not answer.fault.passing or self._denied_for_good(answer.fault.error, said):
            raise answer.fault.error
        self._say(f"{step}; SSH doesn't answer yet")
        self._refuse_late(answer.fault.error)
        return None

    def _denied_for_good(self, error: LaunchError, said: Mapping[str, str]) -> bool:
        """Whether the VM refuses our key although it must have been told of it by now."""
        if not isinstance(error, NotAuthorised):
            self._denied = None
            return False
        now = self._clock.now()
        self._denied = now if self._denied is None else self._denied
        return now - self._denied > DENIED and bool(said)

    def _refuse_failed(self, said: Mapping[str, str]) -> None:
        """Raises LaunchError: the startup script gave up, or the VM no longer runs."""
        name, status = self.machine.name, self.machine.status
        if said.get("state") == "failed":
            reason = said.get("reason") or "its startup script failed"
            raise LaunchError(f"{name} didn't get ready: {reason}", f"Look into it: launch ssh {name}")
        if status not in ("RUNNING", "REPAIRING"):
            problem = f"{name} is {status}: it was stopped before it was ready{self._serial()}"
            raise LaunchError(problem, f"launch vm status {name}")

    def _refuse_late(self, trouble: LaunchError) -> None:
        """Raises LaunchError: it has had its time."""
        if self._until is None or self._clock.now() < self._until:
            return
        name, minutes = self.machine.name, f"{LONGEST / 60:.0f} minutes"
        problem = f"{name} isn't ready after {minutes}: {trouble.problem}{self._serial()}"
        raise LaunchError(problem, trouble.hint or f"Look into it: launch ssh {name}") from trouble

    def _serial(self) -> str:
        """The last lines of its console, as more of a problem's text."""
        try:
            text, _ = self._compute.serial(self.machine)
        except LaunchError:
            return ""
        lines = ["".join(filter(str.isprintable, one))[:76] for one in text.splitlines() if one.strip()][-SERIAL:]
        return "\nIts console ends:\n" + "\n".join(f"  {one}" for one in lines) if lines else ""

    def _say(self, text: str) -> None:
        """Once each."""
        if text != self._told:
            self._told = text
            self._tell(text)
