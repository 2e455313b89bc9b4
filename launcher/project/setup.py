"""Make a project ready, step by step. A setup that was killed continues when it is typed again: every step first reads
whether it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import UnreachableError, status_of
from launcher.gcp.parallel import together
from launcher.gcp.rest import Rest
from launcher.project.reads import RESOURCES, tested
from launcher.project.steps import Step

T = TypeVar("T")

PATIENCE_SECONDS: Final = 180.0
"""Time limit for a step to take effect: an API that was just enabled refuses requests for about a minute."""
POLL_SECONDS: Final = 2.0


def pending(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that are not done. Raises LaunchError: one can't be read for another reason than a disabled
    API."""
    answers = together({str(number): step.is_done for number, step in enumerate(steps)})
    for one in answers.values():
        if isinstance(one, LaunchError) and not is_disabled(one):
            raise one
    return [step for step, done in zip(steps, answers.values(), strict=True) if done is not True]


def missing_permissions(steps: Sequence[Step], rest: Rest) -> list[str]:
    """Return the permissions for the steps that the caller lacks; none if they can't be tested yet."""
    wanted = tuple(dict.fromkeys(step.permission for step in steps))
    try:
        have = tested(rest, RESOURCES, f"/v1/projects/{rest.project}:testIamPermissions", wanted)
    except LaunchError as error:
        if isinstance(error, NotAuthorised) and not is_disabled(error):
            raise
        return []
    return [one for one in wanted if one not in have]


def apply(steps: Sequence[Step], clock: Clock, say: Callable[[str], None]) -> None:
    """Do the steps in order, and wait until each has an effect. Raises LaunchError: a step failed; those before it are
    done."""
    for step in steps:
        until = clock.now() + PATIENCE_SECONDS
        if not patiently(step.is_done, clock, until):
            patiently(step.do, clock, until)
            while not patiently(step.is_done, clock, until):
                if clock.now() > until:
                    problem = f"{step.name}: not in effect after {PATIENCE_SECONDS:.0f} s: {step.text}"
                    raise LaunchError(problem, "Run the command again; it continues from this step.")
                clock.sleep(POLL_SECONDS)
        say(step.text)


def patiently(call: Callable[[], T], clock: Clock, until: float) -> T:
    """Return a call's result; repeat the call while an earlier step takes effect. Raises LaunchError."""
    while True:
        try:
            return call()
        except LaunchError as error:
            is_new = status_of(error) in (400, 404) and "does not exist" in error.problem  # IAM does not know it yet
            may_pass = isinstance(error, UnreachableError) or is_disabled(error) or is_new
            if clock.now() + POLL_SECONDS > until or not may_pass:
                raise
        clock.sleep(POLL_SECONDS)


def is_disabled(error: LaunchError) -> bool:
    """Return whether a refusal is that of a disabled API."""
    return " API is disabled in project " in error.problem


def ticket(steps: Sequence[Step], project: str, caller: str) -> Iterator[str]:
    """Yield the text for an administrator: the commands for all steps."""
    import textwrap

    from launcher.project.report import shell_lines

    yield f"# Please run these commands in project {project}, for {caller or 'me'}:"
    for step in steps:
        yield from (f"# {line}" for line in textwrap.wrap(step.text, 78, break_on_hyphens=False))
        for command in step.command.splitlines():
            yield from shell_lines(command, 80)
