"""What planning needs of the world, gathered before it starts: the spec, files and their hashes, gcloud's settings."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from launcher import __version__
from launcher.cli.code_growth import grown_since
from launcher.cli.options import Flags, overrides
from launcher.errors import UsageError
from launcher.images.source_files import Source
from launcher.plan.model import EMPTY, Context, Target
from launcher.spec.checks import custom_functions, data_paths
from launcher.spec.models import BUILTIN, OLD_BUILTIN, JobSpec
from launcher.spec.reader import Located, Override, read_located
from launcher.text import did_you_mean
from launcher.workspace import code_files, content, gcloud_config
from launcher.workspace.code_warnings import code_warnings
from launcher.workspace.data_files import check_data
from launcher.workspace.python_files import check_module, check_syntax, module_beside, near_scripts
from launcher.workspace.user_functions import check_functions, packaged_functions

STARTUP = Path(__file__).resolve().parent.parent / "compute" / "startup.sh"
"""The startup script of every VM."""


PROJECT_ID = re.compile(r"(([-a-z0-9]{1,63}\.)*([a-z]([-a-z0-9]{0,61}[a-z0-9])?):)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""What gcloud takes as core/project (Google Cloud SDK 528.0.0, core/properties.py: _VALID_PROJECT_REGEX)."""


class Inputs(NamedTuple):
    """A spec and what is around it: the folder with the user's code, if there is one, and the image's files."""

    spec: JobSpec
    context: Context
    code: Path | None
    source: Source
    located: Located


def gather(
    target: Target,
    path: Path | None,
    flags: Flags,
    *,
    training: bool = True,
    image_only: bool = False,
    more: Sequence[Override] = (),
    allow_default_account: bool = False,
    in_place: bool = False,
    project_id: str | None = None,
) -> Inputs:
    """Read the spec (the built-in default when `path` is None), apply the flags, look around.

    `more` are changes of the spec beside the flags. With `image_only` nothing will run, so a project is needed only
    where the spec names neither repository nor image. `in_place`: the processes start in the code's own folder.
    `project_id` stands in where gcloud has no project.

    Raises:
        SpecError: the spec or a flag can't be taken.
        UsageError: no project is set, or what the spec names isn't there.
    """
    refuse_python(path)
    located = read_located(path or built_in(target, training=training), [*overrides(flags), *more])
    with located.naming_places():
        return looked_around(
            located,
            target,
            path,
            flags,
            training=training,
            image_only=image_only,
            allow_default_account=allow_default_account,
            in_place=in_place,
            project_id=project_id,
        )


def looked_around(
    located: Located,
    target: Target,
    path: Path | None,
    flags: Flags,
    *,
    training: bool,
    image_only: bool,
    allow_default_account: bool,
    in_place: bool,
    project_id: str | None,
) -> Inputs:
    """Gather what a spec needs besides itself. Raises UsageError."""
    spec = located.spec
    if target == "local":
        spec = with_local_output(spec)
    beside = folder_of(path) if path else None
    spec = with_builtin(spec, beside)
    folder = code_folder(spec, beside) if training else None
    left_out = no_code(spec, path, target)
    found = own_code(spec, folder, left_out)
    if training and not image_only:
        check_data(spec, folder, [file.name for file in found.files], target, in_place=in_place)
    digests = content.content(found.files) if folder else EMPTY
    own = Source(code=tuple(found.files), digest=digests.digest if folder else "")
    source = with_image(own, spec, beside) if training else own
    names = [file.name for file in found.files]
    context = Context(
        target=target,
        project=project(
            "local" if image_only and (spec.image.repository or spec.image.uri) else target, os.environ, project_id
        ),
        owner=owner(os.environ),
        version=__version__,
        default_regions=gcloud_config.default_regions(os.environ) if spec.regions is None else (),
        recipe=content.content(source.recipe) if training else EMPTY,
        trainer=content.content(source.trainer) if training else EMPTY,
        base=content.base_image() if training else "",
        code=digests,
        requirements=content.of_text(source.requirements) if source.requirements else EMPTY,
        torch=content.single("image.torch", source.torch) if source.torch else EMPTY,
        secret_files=tuple(sorted(found.secrets)),
        packaged_functions=packaged_functions(spec, names) if folder else (),
        syntax_warnings=check_syntax(spec, folder, names, content.base_image()) if folder else (),
        ignored_files=ignored(spec, folder, found, left_out) if folder else (),
        outside_paths=outside(spec, folder, found) if folder else (),
        code_growth=grown_since(spec.name, local_runs(spec), found.files, digests) if folder else "",
        code_warnings=(
            *check_module(spec, folder, names),
            *code_warnings(spec, located, target, folder, names, source.requirements),
        )
        if training
        else (),
        run_id=flags.run_id,
        training=training,
        allow_default_account=allow_default_account,
        is_local_cloud=gcloud_config.is_here("COMPUTE" if target == "vm" else "AIPLATFORM", os.environ),
        startup=STARTUP.read_text(encoding="utf-8") if target == "vm" else "",
    )
    return Inputs(spec, context, folder, source, located)


def refuse_python(path: Path | None) -> None:
    """Raises UsageError: it is the script, where the spec that names it is meant."""
    if path and path.suffix == ".py":
        raise UsageError(
            f"{path} is a Python file, and launch takes a spec (YAML) that names it",
            f"`launch init` writes one; in it: run: {{script: {path.name}}}",
        )


def with_image(own: Source, spec: JobSpec, beside: Path | None) -> Source:
    """The user's code, and what the training image has besides. Raises UsageError: a file isn't there."""
    return own._replace(
        recipe=tuple(content.recipe()),
        trainer=tuple(content.trainer()),
        requirements=own_requirements(spec, beside),
        torch=below(beside, "image.torch", spec.image.torch),
    )


def built_in(target: Target, *, training: bool) -> Path:
    """The spec that is meant where none is named."""
    name = "default.yaml" if training or target != "vm" else "vm-default.yaml"
    return content.data_folder("job_specs") / name


def own_code(spec: JobSpec, folder: Path | None, without: frozenset[Path]) -> code_files.Code:
    """The user's files, which are not too many, and what `run` names is among them. Raises UsageError."""
    if folder is None:
        return code_files.Code([], [])
    found = code_files.code(folder, without)
    names = [file.name for file in found.files]
    if spec.run.script:
        check_script(spec.run.script, folder, names)
    check_functions(spec, folder, names)
    code_files.check_size(found.files, spec.image.code_limit_mb)
    return found


def ignored(spec: JobSpec, folder: Path, found: code_files.Code, left_out: frozenset[Path]) -> tuple[str, ...]:
    """Return the files that the script or its arguments name, and that the image won't have."""
    from launcher.workspace.ignored_files import named_but_ignored

    known = [path.relative_to(folder).as_posix() for path in left_out if folder in path.parents]
    return named_but_ignored(spec, folder, [file.name for file in found.files], [*known, *found.secrets])


def outside(spec: JobSpec, folder: Path, found: code_files.Code) -> tuple[str, ...]:
    """Return the paths of the script or its arguments that lead out of the code's folder."""
    from launcher.workspace.ignored_files import named_outside

    return named_outside(spec, folder, [file.name for file in found.files])


def local_runs(spec: JobSpec) -> str:
    """Return the folder of the spec's runs on this machine: its output, or where a rehearsal writes by default."""
    return spec.output if spec.output and not spec.output.startswith("gs://") else "runs"


def with_local_output(spec: JobSpec) -> JobSpec:
    """A local output as a full path (default: ./runs), because the processes run in another folder."""
    output = spec.output or "runs"
    if output.startswith("gs://"):
        return spec
    return msgspec.structs.replace(spec, output=full_path(output))


def full_path(output: str) -> str:
    """A local output, from the root and with `~` resolved.

    Raises:
        UsageError: there is no such home, or the path can't be written as text.
    """
    try:
        path = Path(output).expanduser().resolve().as_posix()
        path.encode()
    except RuntimeError as error:  # no such user; links that lead to each other
        raise UsageError(f"output {output}: {error}", "Give a full path.", field="output") from None
    except UnicodeEncodeError:
        hint = "Give another folder: --output DIR"
        raise UsageError("the output's full path isn't UTF-8", hint, field="output") from None
    return path


def folder_of(path: Path) -> Path | None:
    """The spec's folder, which its paths are relative to; None where the spec comes from a pipe or a device."""
    folder = path.parent.resolve()
    device = folder == Path("/dev") or folder.is_relative_to("/proc")  # /dev/stdin, <(…): whatever stands behind it
    return None if device or not path.is_file() else folder


def with_builtin(spec: JobSpec, beside: Path | None) -> JobSpec:
    """Return the spec with launch_train where `run.module` calls it by its old name, `train`: no program of the user's
    code has that name."""
    package, dot, rest = (spec.run.module or "").partition(".")
    if package != OLD_BUILTIN:
        return spec
    folder = below(beside, "image.code", spec.image.code) or beside
    if folder and module_beside(spec, folder):
        return spec
    return msgspec.structs.replace(spec, run=msgspec.structs.replace(spec.run, module=f"{BUILTIN}{dot}{rest}"))


def code_folder(spec: JobSpec, beside: Path | None) -> Path | None:
    """`image.code`, or the spec's own folder when it names a script, a module, functions or files of data there.

    Raises:
        UsageError: the spec lies in no folder, and one is needed.
    """
    if folder := below(beside, "image.code", spec.image.code):
        return Path(os.path.realpath(folder))
    beside_it = {field: path for field, path in data_paths(spec.run).items() if not path.startswith(("/", "~"))}
    own = {**({"run.script": spec.run.script} if spec.run.script else {}), **custom_functions(spec.run), **beside_it}
    if spec.run.module and beside and module_beside(spec, beside):
        own["run.module"] = spec.run.module
    if not own or spec.image.uri:
        return None
    if beside is None:
        field, name = next(iter(own.items()))
        raise UsageError(
            f"{field}: {name} is looked for beside the spec, and this spec lies in no folder",
            "Say where your code is: --set image.code=/FULL/PATH",
            field=field,
        )
    return beside


def own_requirements(spec: JobSpec, beside: Path | None) -> str:
    """The text of `image.requirements`, empty where there is none. Raises UsageError."""
    path = below(beside, "image.requirements", spec.image.requirements)
    if path is None:
        return ""
    from launcher.workspace.requirements import requirements

    return requirements(path)


def below(beside: Path | None, field: str, name: str | None) -> Path | None:
    """A path that the spec gives relative to itself; None where it gives none.

    Raises:
        UsageError: the spec lies in no folder.
    """
    if name is None:
        return None
    if beside is None and not Path(name).is_absolute():
        raise UsageError(
            f"{field}: {name} is relative to the spec's file, and this spec lies in no folder",
            f"Give the full path: --set {field}=/FULL/PATH",
            field=field,
        )
    return (beside or Path("/")) / name


def no_code(spec: JobSpec, path: Path | None, target: Target) -> frozenset[Path]:
    """The spec's own file (another limit is not another run), and the folder that local runs are written to."""
    spec_files = [path.resolve(), path.parent.resolve() / path.name] if path else []  # it may be a link
    output = [Path(spec.output)] if target == "local" and spec.output and not spec.output.startswith("gs://") else []
    return frozenset([*spec_files, *output])


def check_script(script: str, folder: Path, names: Sequence[str]) -> None:
    """`run.script` is part of the code. Raises UsageError, which names what is like it."""
    name = posixpath.normpath(script)
    if name in names:
        return
    if (forward := name.replace("\\", "/")) in names:  # as Windows writes it; the job runs on Linux
        hint = f"Write it with forward slashes: --set run.script={forward}"
    elif not name.startswith(("/", "../")) and os.path.isfile(folder / name):  # noqa: PTH113 -- Path.is_file raises on a name that is too long
        hint = "It is there, but .gitignore, .dockerignore or its folder's name leaves it out."
    else:
        hint = did_you_mean(near_scripts(name, names), "It is relative to image.code.")
    raise UsageError(f"run.script: {script} isn't among the code in {folder}", hint, field="run.script")


def project(target: Target, environ: Mapping[str, str], stand_in: str | None = None) -> str:
    """gcloud's project, or `stand_in` where it has none; a rehearsal on this machine needs none.

    Raises:
        UsageError: none is set, or it can't be a project's id.
    """
    found = gcloud_config.setting("core/project", environ) or stand_in
    if not found and target != "local":
        raise UsageError(
            "no Google Cloud project is set",
            "gcloud config set project PROJECT\nor: export CLOUDSDK_CORE_PROJECT=PROJECT (any name does for a dry run)",
        )
    if found and target != "local" and not PROJECT_ID.fullmatch(found):
        raise UsageError(
            f"{found!r} is not a project id (lower-case letters, digits and -)",
            "gcloud projects list shows the ids; then: gcloud config set project PROJECT_ID\n"
            "or: export CLOUDSDK_CORE_PROJECT=PROJECT_ID",
        )
    return found or "local"


def owner(environ: Mapping[str, str]) -> str:
    """For whom a run computes: gcloud's account, else the user of this machine."""
    import getpass

    account = gcloud_config.setting("core/account", environ)
    if account:
        return account
    try:
        return os.fsencode(getpass.getuser()).decode(errors="replace")
    except (KeyError, OSError, ImportError):  # no name for this uid, as in some containers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
