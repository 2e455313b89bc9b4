"""What planning needs of the world, gathered before it starts: the spec, files and their hashes, gcloud's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from launcher import __version__
from launcher.cli import files, gcloud
from launcher.cli.options import Flags, overrides
from launcher.errors import UsageError
from launcher.plan.model import EMPTY, Context, Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import read


class Inputs(NamedTuple):
    """A spec and what is around it. `code` is the folder with the user's code, if there is one."""

    spec: JobSpec
    context: Context
    code: Path | None


def gather(target: Target, path: Path | None, flags: Flags, *, training: bool = True) -> Inputs:
    """Read the spec (the built-in default when `path` is None), apply the flags, look around.

    Raises:
        SpecError: the spec or a flag can't be taken.
        UsageError: no project is set, or a folder that the spec names isn't there.
    """
    path = path or files.data_folder("job_specs") / "default.yaml"
    spec = read(path, overrides(flags))
    if target == "local":
        spec = with_local_output(spec)
    code = code_folder(spec, path.parent)
    requirements = path.parent / spec.image.requirements if spec.image.requirements else None
    context = Context(
        target=target,
        project=project(target, os.environ),
        owner=owner(os.environ),
        version=__version__,
        default_regions=gcloud.default_regions(os.environ) if spec.regions is None else (),
        recipe=files.recipe() if training else EMPTY,
        code=files.folder(code, without=no_code(spec, path)) if code and training else EMPTY,
        requirements=files.file(requirements) if requirements and training else EMPTY,
        run_id=flags.run_id,
        training=training,
    )
    return Inputs(spec, context, code)


def with_local_output(spec: JobSpec) -> JobSpec:
    """A local output as a full path (default: ./runs), because the processes run in another folder."""
    output = spec.output or "runs"
    if output.startswith("gs://"):
        return spec
    return msgspec.structs.replace(spec, output=str(Path(output).expanduser().resolve()))


def code_folder(spec: JobSpec, beside: Path) -> Path | None:
    """`image.code`, or the spec's own folder when it names a script of the user's."""
    if spec.image.code:
        return (beside / spec.image.code).resolve()
    return beside.resolve() if spec.run.script and not spec.image.uri else None


def no_code(spec: JobSpec, path: Path) -> frozenset[Path]:
    """The spec's own file (another limit is not another run), and the local folder that runs are written to."""
    output = spec.output or "runs"
    return frozenset({path.resolve(), *([] if output.startswith("gs://") else [(Path.cwd() / output).resolve()])})


def project(target: Target, environ: Mapping[str, str]) -> str:
    """gcloud's project; a rehearsal on this machine needs none.

    Raises:
        UsageError: none is set.
    """
    found = gcloud.setting("core/project", environ)
    if not found and target != "local":
        raise UsageError(
            "no Google Cloud project is set",
            "gcloud config set project PROJECT, or export CLOUDSDK_CORE_PROJECT=PROJECT",
        )
    return found or "local"


def owner(environ: Mapping[str, str]) -> str:
    """For whom a run computes: gcloud's account, else the user of this machine."""
    import getpass

    account = gcloud.setting("core/account", environ)
    if account:
        return account
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no name for this uid, as in some containers
        return str(os.getuid())
