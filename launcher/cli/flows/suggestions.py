"""Suggest commands after a local run. Each was planned, so it works as printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.cli.options import Flags, flag_words, gather
from launcher.errors import LaunchError
from launcher.inputs.gcloud_config import setting
from launcher.inputs.planning import planned
from launcher.plan.model import Target
from launcher.text import relative

REGIONS = ("us-central1", "any")
"""Regions to try if neither the spec nor gcloud sets one."""
PROJECT = "my-project"
"""Project of a suggested dry run if gcloud has none; any name works."""
BUCKET = "gs://my-bucket/runs"


class Typed(NamedTuple):
    """The spec and the flags of the command line."""

    spec: Path | None = None
    flags: Flags = Flags()


def next_commands(typed: Typed | None, folder: str | None, *, has_metrics: bool) -> Iterator[tuple[str, str]]:
    """Yield commands to try after a run that succeeded, with what each shows. `typed` is None for a request from a
    file."""
    if has_metrics and folder and not folder.startswith("gs://") and (tensorboard := found("tensorboard")):
        yield shlex.join([tensorboard, "--logdir", f"{relative(folder)}/logs"]), "shows the curves"
    if typed is None or (typed.spec and not typed.spec.is_file()):  # a pipe can be read only once
        return
    if command := cloud_command(typed):
        yield command, "plans this job on Google Cloud, with its cost"
    on_two = typed.flags._replace(nodes=2, run_id=None)  # a job of one node; the run gets its own id
    if is_planned("local", typed.spec, typed.flags, nodes=1) and is_planned("local", typed.spec, on_two):
        yield shlex.join([typed_program(), "local", *typed_words(typed.spec, on_two)]), "runs this job on two nodes"
    if typed.spec is None and not Path("job.yaml").exists():
        yield shlex.join([typed_program(), "init"]), "writes a commented starter spec"


def cloud_command(typed: Typed) -> str:
    """Return `launch vertex … --dry-run` for the job, or "" if no region can be planned."""
    output = typed.flags.output if (typed.flags.output or "").startswith("gs://") else BUCKET
    flags = typed.flags._replace(output=output)
    others = () if flags.region or flags.zone else REGIONS
    for each in (flags, *(flags._replace(region=[region]) for region in others)):
        if is_planned("vertex", typed.spec, each):
            return in_project(shlex.join([typed_program(), "vertex", *typed_words(typed.spec, each), "--dry-run"]))
    return ""


def is_planned(target: Target, spec: Path | None, flags: Flags, *, nodes: int | None = None) -> bool:
    """Return whether the job can be planned, and for that many nodes."""
    try:
        inputs = gather(target, spec, flags, stand_in=PROJECT)
        plan = planned(inputs)
    except LaunchError:
        return False
    return nodes in (None, plan.machine.nodes)


def typed_words(spec: Path | None, flags: Flags) -> list[str]:
    """Return the spec and the flags as they are typed."""
    return [*([str(spec)] if spec else []), *flag_words(flags), *(["--output", flags.output] if flags.output else [])]


def in_project(command: str) -> str:
    """Return a command with a project before it, if gcloud has none."""
    if setting("core/project", os.environ):
        return command
    if sys.platform == "win32":  # cmd.exe and PowerShell both take this
        return f'cmd /c "set CLOUDSDK_CORE_PROJECT={PROJECT}&& {command}"'
    return f"CLOUDSDK_CORE_PROJECT={PROJECT} {command}"


def typed_program(name: str = "launch") -> str:
    """Return how to type a program: its name if it is on the PATH, else its path beside this Python."""
    return name if shutil.which(name) else relative(str(Path(sys.executable).parent / name))


def found(name: str) -> str:
    """Return how to type a program, or "" if it is not installed."""
    typed = typed_program(name)
    return typed if shutil.which(typed) else ""
