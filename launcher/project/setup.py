"""Make a project ready, step by step. A setup that was killed continues when it is typed again: every step first reads
whether it is done."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from msgspec import Struct

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import ApiDisabledError, UnreachableError, status_of
from launcher.gcp.parallel import together
from launcher.gcp.rest import Rest
from launcher.inputs.gcloud_config import account
from launcher.project.reads import RESOURCES, tested
from launcher.project.report import shell_lines
from launcher.project.steps import QuotaRequest, SetupTarget, Step, steps

T = TypeVar("T")

PATIENCE_SECONDS: Final = 180.0
"""Time limit for a step to take effect: an API that was just enabled refuses requests for about a minute."""
POLL_SECONDS: Final = 2.0


class Setup(Struct, frozen=True, kw_only=True):
    """The steps that set up a project: those that are done, and the pending ones."""

    target: SetupTarget
    done: tuple[Step, ...]
    pending: tuple[Step, ...]
    missing: tuple[str, ...]
    """The permissions for the pending steps that the caller lacks."""


def read_setup(
    project: str,
    environ: Mapping[str, str],
    *,
    region: str,
    vertex: bool = True,
    vms: bool = False,
    network: str = "default",
    quotas: Sequence[QuotaRequest] = (),
) -> Setup:
    """Return the state of the project's setup; changes nothing. Raises LaunchError: it can't be read; UsageError: the
    bucket belongs to another project."""
    rest, email = Rest(project, environ), account(environ)
    number = ""  # unknown while Resource Manager's API is disabled
    with suppress(LaunchError):
        number = str(rest(RESOURCES, f"/v1/projects/{project}").get("projectNumber", ""))
    kind = "serviceAccount" if email.endswith(".gserviceaccount.com") else "user"
    target = SetupTarget(
        project=project,
        number=number,
        region=region,
        caller=f"{kind}:{email}" if email else "",
        vertex=vertex,
        vms=vms,
        network=network,
        quotas=tuple(quotas),
    )
    every = list(steps(target, rest))
    pending_steps = pending(every)
    missing = missing_permissions(pending_steps, rest) if pending_steps else []
    done = tuple(step for step in every if step not in pending_steps)
    return Setup(target=target, done=done, pending=tuple(pending_steps), missing=tuple(missing))


def pending(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that are not done. Raises LaunchError: one can't be read for another reason than a disabled
    API."""
    answers = together({str(number): step.is_done for number, step in enumerate(steps)})
    for result in answers.values():
        if isinstance(result, LaunchError) and not isinstance(result, ApiDisabledError):
            raise result
    return [step for step, done in zip(steps, answers.values(), strict=True) if done is not True]


def missing_permissions(steps: Sequence[Step], rest: Rest) -> list[str]:
    """Return the permissions for the steps that the caller lacks; none if they can't be tested yet."""
    wanted = tuple(dict.fromkeys(step.permission for step in steps))
    try:
        have = tested(rest, RESOURCES, f"/v1/projects/{rest.project}:testIamPermissions", wanted)
    except NotAuthorised:
        raise
    except LaunchError:
        return []
    return [permission for permission in wanted if permission not in have]


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
            may_pass = isinstance(error, UnreachableError | ApiDisabledError) or is_new
            if clock.now() + POLL_SECONDS > until or not may_pass:
                raise
        clock.sleep(POLL_SECONDS)


def ticket(steps: Sequence[Step], project: str, caller: str) -> Iterator[str]:
    """Yield the text for an administrator: the commands for all steps."""
    yield f"# Please run these commands in project {project}, for {caller or 'me'}:"
    for step in steps:
        yield from (f"# {line}" for line in textwrap.wrap(step.text, 78, break_on_hyphens=False))
        for command in step.command.splitlines():
            yield from shell_lines(command, 80)
