"""Everything that launch can fail with, on one screen.

An error says what is wrong (`problem`), what to do next (`hint`), and which exit code a script sees. `launcher.cli`
has the one handler; SDK errors are turned into these in `launcher.gcp` and the packages that call Google.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple

MOST_PROBLEMS: Final = 19
"""Problems that a SpecError's message shows, of two lines each; with the count of the others at most 40 lines."""


class LaunchError(Exception):
    """launch's own error; the root of the tree."""

    exit_code: ClassVar[int] = 1
    data: dict[str, Any] | None = None
    """With `-o json`, the document of the command that failed; the error is printed in it."""

    def __init__(self, problem: str, hint: str = "", *, field: str = "") -> None:
        """`field` is the dotted field of the spec that caused it (`machine.gpus`, `regions.0`), if one did."""
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.field = field

    def locate(self, where: str) -> None:
        """Put the place of the field (``file:line``, or a flag) before the problem."""
        self.problem, self.field = f"{where}: {self.problem}", ""
        self.args = (self.problem,)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.hint}" if self.hint else self.problem


class UsageError(LaunchError):
    """A flag or an argument that can't be taken."""

    exit_code = 2


class Problem(NamedTuple):
    """One thing wrong in a spec.

    `where` is ``file:line`` or the flag that said it; `what` names the field and the value; `fix` says what would be
    right, and may be empty.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.fix}" if self.fix else "")


class SpecError(UsageError):
    """A spec that can't be read or can't be meant: all of its problems at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        more = len(problems) - MOST_PROBLEMS
        shown = [*map(str, problems[:MOST_PROBLEMS]), *([f"… and {more} more problems"] if more > 0 else [])]
        super().__init__("\n".join(shown))
        self.problems = problems


class PlanRefused(UsageError):
    """A spec that is well-formed but can't work, or would cost more than it may."""


class JobFailed(LaunchError):
    """The job ran and failed."""

    exit_code = 3


class NotAuthorised(LaunchError):
    """No credentials, or a permission is missing."""

    exit_code = 4


class NoCapacity(LaunchError):
    """No capacity or no quota in any place that the plan may use."""

    exit_code = 5


class StillRunning(LaunchError):
    """A time limit ended the watch; the job goes on."""

    exit_code = 6


INTERRUPTED = 130
"""The exit code after Ctrl-C (128 + SIGINT)."""
