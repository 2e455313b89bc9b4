"""The errors of launch and the exit code of each.

An error says what is wrong (`problem`), what to do next (`hint`), and which exit code a script sees. `launcher.cli`
prints them; SDK errors are turned into these in `launcher.gcp` and the packages that call Google.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

MOST_PROBLEMS: Final = 19
"""Most problems in a SpecError's message: at two lines each, with the count of the others, 40 lines at most."""


class LaunchError(Exception):
    """Base class of launch's errors."""

    exit_code: ClassVar[int] = 1
    problems: tuple[Problem, ...] = ()
    """All problems of a spec or a plan, if the error is made of several."""
    data: dict[str, Any] | None = None
    """The document of the failed command for `-o json`; the error is added to it."""

    def __init__(self, problem: str, hint: str = "", *, field: str = "") -> None:
        """`field` is the dotted spec field that caused the error (`machine.gpus`, `regions.0`); empty if none did."""
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.field = field

    def locate(self, where: str) -> None:
        """Prefix the problem with its location (``file:line`` or a flag)."""
        self.problem, self.field = f"{where}: {self.problem}", ""
        self.args = (self.problem,)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.hint}" if self.hint else self.problem


class UnreachableError(LaunchError):
    """An API or a host gave no answer, or only transient errors, until the timeout.

    It is unknown whether the request had an effect.
    """


class UsageError(LaunchError):
    """An invalid flag or argument."""

    exit_code = 2


def refuse_with(other: str, flags: Mapping[str, object], hint: str = "Remove one of them.") -> None:
    """Raise UsageError if one of these flags was given: it cannot be combined with `other`."""
    if flag := next((name for name, value in flags.items() if value), None):
        raise UsageError(f"{flag} cannot be combined with {other}", hint)


class Problem(NamedTuple):
    """One problem in a spec.

    `where` is ``file:line`` or the flag that set the value; `what` names the field and the value; `fix` says what to
    write instead (may be empty).
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.fix}" if self.fix else "")


class SpecError(UsageError):
    """An invalid spec, with all of its problems at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        more = len(problems) - MOST_PROBLEMS
        shown = [*map(str, problems[:MOST_PROBLEMS]), *([f"… and {more} more problems"] if more > 0 else [])]
        super().__init__("\n".join(shown))
        self.problems = problems


class PlanRefused(UsageError):
    """A well-formed spec that cannot run on its target, or that could cost more than its cap."""


class JobFailed(LaunchError):
    """The job ran and failed."""

    exit_code = 3


class NotAuthorised(LaunchError):
    """No credentials, or a permission is missing."""

    exit_code = 4


class NoCapacity(LaunchError):
    """No capacity or no quota in any placement of the plan."""

    exit_code = 5


class StillRunning(LaunchError):
    """A time limit ended the watch; the job continues."""

    exit_code = 6


INTERRUPTED = 130
"""The exit code after Ctrl-C (128 + SIGINT)."""
