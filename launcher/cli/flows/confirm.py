"""Ask for confirmation in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from launcher.errors import LaunchError, UsageError
from launcher.inputs.gcloud_config import person
from launcher.jobs.job import OWNER_LABEL, Job
from launcher.plan.names import is_of_another


def confirmed(question: str, needs: str, repeat: str) -> bool:
    """Ask a question and return whether the answer is yes.

    Raises UsageError: there is no terminal. The error names what `needs` a confirmation, and `repeat`, the command that
    does not ask.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{needs}, but there is no terminal", repeat)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def confirm_for_another(name: str, labels: Mapping[str, str], verb: str, done: str, command: str) -> None:
    """Ask before changing what belongs to another account; `verb` is Cancel, `done` is cancelled.

    Raises UsageError: there is no terminal, with the `command` that asks nothing; LaunchError: the answer is no.
    """
    if not (owner := other_owner(labels)):
        return
    of = f"{name} {owner}"
    if not confirmed(f"{of}.\n{verb} it?", of, f"To {verb.lower()} it anyway: {command} --yes"):
        raise LaunchError(f"{name} was not {done}")


def other_owner_of(job: Job) -> str:
    """Return whose job it is, as `other_owner` does; empty on this machine, where its files have an owner."""
    return "" if job.is_here else other_owner(job.labels)


def other_owner(labels: Mapping[str, str]) -> str:
    """Return `belongs to another account (HASH)`; empty: it does not, as far as is known."""
    if not is_of_another(labels, person(os.environ)):
        return ""
    return f"belongs to another account ({labels[OWNER_LABEL]})"
