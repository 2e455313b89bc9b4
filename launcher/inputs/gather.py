"""Gather what planning needs: the spec, the files and their hashes, gcloud's settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from launcher import __version__
from launcher.errors import UsageError
from launcher.images.source_files import File, Source, UserCode
from launcher.inputs import content, gcloud_config
from launcher.plan.model import EMPTY, Context, Packages, Target
from launcher.plan.names import OwnerStyle, owner_value
from launcher.spec import project_file as caps
from launcher.spec.checks import custom_functions, data_paths
from launcher.spec.models import NO_LOCAL, JobSpec
from launcher.spec.project_file import (
    Origin,
    Settings,
    read_project_file,
    read_settings,
    user_settings_path,
    with_settings,
)
from launcher.spec.reader import Located, Override, from_data, read_located

if TYPE_CHECKING:
    from launcher.inputs.code_files import CodeCache
    from launcher.inputs.interpreter import Interpreter
    from launcher.inputs.requirements import Requirements

STARTUP = Path(__file__).resolve().parent.parent / "services" / "compute" / "startup.sh"
"""The startup script of every VM."""
MOUNT_SCRIPT = STARTUP.with_name("mounts.sh")
"""The part of the startup script that only jobs with mounts need."""

PROJECT_ID = re.compile(r"(([-a-z0-9]{1,63}\.)*([a-z]([-a-z0-9]{0,61}[a-z0-9])?):)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""What gcloud accepts as core/project (Google Cloud SDK 528.0.0, core/properties.py: _VALID_PROJECT_REGEX)."""


class Inputs(Struct, frozen=True):
    """The inputs of a plan: the spec, its context, the folder with the user's code (or None), and the image's files."""

    spec: JobSpec
    context: Context
    code: Path | None
    source: Source
    located: Located
    settings: AppliedSettings
    python: Interpreter | None = None
    """The Python that runs the job on this machine; None: it runs elsewhere, or in a container."""


class AppliedSettings(Struct, frozen=True):
    """The settings files of a spec, and the fields that they set."""

    files: tuple[Settings, ...] = ()
    """The launch.yaml beside the spec, then the user's own file."""
    origins: tuple[Origin, ...] = ()
    """The fields of the spec that settings files have set, each with its `file:line`."""

    def with_project(self, target: Target, named: str | None) -> AppliedSettings:
        """Return the settings with the origin of the project, if one of the files names it."""
        project = find_project(os.environ, self.files)
        if (
            named
            or target == "local"
            or project is None
            or project.where not in [file.place("id") for file in self.files]
        ):
            return self
        return msgspec.structs.replace(self, origins=(Origin("project", project.where), *self.origins))

    @property
    def usd_cap(self) -> tuple[float, str] | None:
        """Return the lowest max_usd_per_run, and its `file:line`; None: no file sets one."""
        caps = [
            (file.project.max_usd_per_run, file.place("max_usd_per_run"))
            for file in self.files
            if file.project.max_usd_per_run is not None
        ]
        return min(caps, default=None)

    @property
    def owner_label(self) -> OwnerStyle:
        """Return the style of the owner label, of the first file that names one."""
        return next((file.project.owner_label for file in self.files if file.project.owner_label), "hashed")


class GatherOptions(Struct, frozen=True):
    """Options of `gather`."""

    run_id: str | None = None
    """Replaces the computed run ID."""
    training: bool = True
    """False: for a VM to work on."""
    image_only: bool = False
    """Nothing will run, so a project is needed only if the spec names neither a repository nor an image."""
    allow_default_account: bool = False
    """Google's default service account may be used."""
    in_place: bool = False
    """The processes start in the code's own folder."""
    docker: bool = False
    """A job on this machine runs in containers of its image."""
    dry_run: bool = False
    """The job is planned only."""
    setup: bool = False
    """The lines of image.setup are run on this machine."""
    command: str = ""
    """What runs a job.yaml that is not used, for the warning (default: the command of the target)."""
    python: str | None = None
    """The interpreter of a job on this machine; takes precedence over local.python."""
    earlier_python: str | None = None
    """Path of the Python that ran the run's earlier attempts; None or empty: unknown."""
    project_id: str | None = None
    """Takes precedence over gcloud's project."""
    stand_in: str | None = None
    """The project to use if none is set."""
    cache: CodeCache | None = None
    """Code that was already read for other specs."""


def gather(
    target: Target,
    path: Path | None,
    changes: Sequence[Override] = (),
    options: GatherOptions = GatherOptions(),  # noqa: B008 - immutable
) -> Inputs:
    """Read the spec (default: the built-in job), apply the changes, and collect its context.

    Raises:
        SpecError: the spec or a change is invalid.
        UsageError: no project is set, or a file that the spec names does not exist.
    """
    refuse_python(path)
    beside = folder_of(path) if path else None
    read = read_located(path or built_in(target, training=options.training), changes)
    located, settings = with_defaults(read, target, path, beside, training=options.training)
    with located.naming_places():
        inputs = collect_context(located, target, path, beside, settings, options)
    if path or not options.training or not Path("job.yaml").is_file():  # where `launch init` writes a spec
        return inputs
    command = {"vertex": "vertex job.yaml", "vm": "vm job.yaml --run", "local": "local job.yaml"}[target]
    unused = f"job.yaml in this folder is not used. To run it: {options.command or f'launch {command}'}"
    context = msgspec.structs.replace(inputs.context, code_warnings=(unused, *inputs.context.code_warnings))
    return msgspec.structs.replace(inputs, context=context)


def gather_data(
    target: Target,
    data: Mapping[str, Any],
    source: str,
    changes: Sequence[Override] = (),
    *,
    folder: Path | None = None,
    options: GatherOptions = GatherOptions(),  # noqa: B008 - immutable
) -> Inputs:
    """Return the inputs of a plan from a spec's fields; `folder` is what its paths are relative to, `source` names it
    in errors. Raises as `gather` does."""
    beside = folder.resolve() if folder else None
    located, settings = with_defaults(from_data(data, source, changes), target, None, beside)
    with located.naming_places():
        return collect_context(located, target, None, beside, settings, options)


def with_defaults(
    located: Located, target: Target, path: Path | None, beside: Path | None, *, training: bool = True
) -> tuple[Located, AppliedSettings]:
    """Return the spec with the fields that it leaves open from the settings files; a run on this machine takes none.

    Raises SpecError: a settings file is invalid.
    """
    files = (read_project_file(beside, path), read_user_settings(os.environ))
    if target == "local":
        return located, AppliedSettings(files)
    completed, origins = with_settings(located, files, output=training)
    return completed, AppliedSettings(files, origins)


def collect_context(
    located: Located,
    target: Target,
    path: Path | None,
    beside: Path | None,
    settings: AppliedSettings,
    options: GatherOptions,
) -> Inputs:
    """Collect the context of a spec: project, code, hashes, warnings. `beside` is the folder that its paths are
    relative to. Raises UsageError."""
    training = options.training
    spec = located.spec
    if target == "local" and not (spec.output or "").startswith("gs://"):  # the processes run in another folder
        spec = msgspec.structs.replace(spec, output=full_path(spec.output or "runs"))
    folder = code_folder(spec, beside) if training else None
    # Not code: the spec and its launch.yaml (a new limit is the same run), the local output.
    left_out = [path.resolve(), path.parent.resolve() / path.name] if path else []  # the spec may be a link
    left_out += [beside / caps.NAME] if beside else []
    if target == "local" and spec.output and not spec.output.startswith("gs://"):
        left_out.append(Path(spec.output))
    cache = options.cache if target != "local" else None  # the output, which is no code, may be a folder
    needs = needs_of_image(spec, beside) if training else None
    packages = needs.packages if needs else Packages()
    if folder is None and packages.projects and not spec.image.uri:
        raise UsageError(
            f"{packages.projects[0].where} installs a project of yours, but the job has no code",
            "Name the folder that contains it: --set image.code=.",
            field="image.requirements",
        )
    code = UserCode()
    if folder:
        from launcher.inputs.user_code import read_code

        code = read_code(spec, folder, frozenset(left_out), cache, packages)
    if training and not options.image_only and data_paths(spec.run):
        from launcher.inputs.named_paths import check_data

        check_data(spec, code, target, in_place=options.in_place)
    setting = None
    if target == "local" and spec.local.python and not options.python:
        setting = below(beside, "local.python", os.path.expanduser(spec.local.python))  # noqa: PTH111 -- it is text
    spec = msgspec.structs.replace(spec, local=NO_LOCAL)  # it is no part of a request, a plan or a run ID
    own = Source(code=code.files, digest=code.content.digest, installed=code.installed)
    source = with_image(own, spec, beside, needs) if training else own
    python = None
    if target == "local" and not options.docker:
        python = find_python(spec, located, code, source.requirements, setting, options)
    not_run = []
    if python and spec.image.setup and not options.setup:
        lines = "; ".join(spec.image.setup)
        not_run.append(f"image.setup is not run on this machine: {lines}. To run it here: launch local --setup")
    project_id = project(
        "local" if options.image_only and (spec.image.repository or spec.image.uri) else target,
        os.environ,
        options.project_id,
        settings.files if target != "local" else (),
        options.stand_in,
    )
    code_warnings: tuple[str, ...] = ()
    if training and (folder or spec.run.args or not spec.run.is_builtin):  # the built-in trainer alone has none
        from launcher.inputs.user_code import warnings

        code_warnings = tuple(warnings(spec, located, target, beside, code, source.requirements, python))
    if source.requirements:
        requirements = content.of_text(source.requirements)
    else:
        requirements = content.content(source.project) if source.project else EMPTY
    own_base = source.base_dockerfile
    if re.search(FROM_CONTEXT, own_base):
        own_base += code.content.digest
    context = Context(
        target=target,
        project=project_id,
        owner=owner(os.environ),
        owner_label=owner_value(gcloud_config.person(os.environ), settings.owner_label),
        version=__version__,
        default_regions=gcloud_config.default_regions(os.environ) if spec.regions is None else (),
        recipe=content.content_of_own_files(source.recipe) if training else EMPTY,
        locks=content.content_of_own_files(source.locks) if training else EMPTY,
        trainer=content.content_of_own_files(source.trainer) if training else EMPTY,
        base=content.base_image() if training else "",
        code=code.content,
        requirements=requirements,
        packages=packages,
        installed=content.of_text(json.dumps([*code.installed.items()])) if code.installed else EMPTY,
        own_base=content.of_text(own_base) if own_base else EMPTY,
        torch=content.single("image.torch", source.torch) if source.torch else EMPTY,
        code_warnings=(*not_run, *code_warnings),
        run_id=options.run_id,
        training=training,
        allow_default_account=options.allow_default_account,
        is_local_cloud=gcloud_config.is_here("COMPUTE" if target == "vm" else "AIPLATFORM", os.environ),
        startup=STARTUP.read_text(encoding="utf-8") if target == "vm" else "",
        mount_script=MOUNT_SCRIPT.read_text(encoding="utf-8") if target == "vm" and spec.mounts else "",
    )
    return Inputs(spec, context, folder, source, located, settings.with_project(target, options.project_id), python)


def find_python(
    spec: JobSpec,
    located: Located,
    code: UserCode,
    needs: str,
    setting: Path | None,
    options: GatherOptions,
) -> Interpreter:
    """Return the Python of this machine that runs the job. `needs` is the text of the requirements, `setting` is
    local.python."""
    from launcher.inputs.interpreter import Wanted, find_interpreter, needs_of

    wanted = Wanted(tuple(needs_of(spec)), is_dry=options.dry_run)
    if options.training and not (spec.run.is_builtin and code.folder is None):
        from launcher.inputs.user_code import wanted_packages

        wanted = wanted_packages(wanted, spec, code, needs)
    python = find_interpreter(
        wanted, os.environ, option=options.python, setting=setting, earlier=options.earlier_python
    )
    if python.error and python.error.field:
        python.error.locate(located.place(python.error.field))
    return python


def refuse_python(path: Path | None) -> None:
    """Refuse a script in place of the spec. Raises UsageError."""
    if path and path.suffix == ".py":
        raise UsageError(
            f"{path} is a Python file; launch takes a spec (YAML) that names it",
            f"launch init writes a spec; set in it: run: {{script: {path.name}}}",
        )


def needs_of_image(spec: JobSpec, beside: Path | None) -> Requirements | None:
    """Return the content of `image.requirements`, or None. Raises UsageError."""
    image = spec.image
    if image.requirements is None:
        return None
    from launcher.inputs.requirements import read_requirements, split_names
    from launcher.plan.recipe import python_of_tag

    name, extras = split_names(image.requirements)
    path = below(beside, "image.requirements", name) or Path()
    is_own = not (image.base or image.dockerfile)
    return read_requirements(path, extras, image.python or (None if is_own else python_of_tag(image.base or "")))


def with_image(own: Source, spec: JobSpec, beside: Path | None, needs: Requirements | None) -> Source:
    """Return the user's code with launch's own files of the image. Raises UsageError: a file does not exist, or
    contains a secret."""
    project = needs.files if needs else ()
    dockerfile = below(beside, "image.dockerfile", spec.image.dockerfile)
    try:
        base_dockerfile = dockerfile.read_text(encoding="utf-8") if dockerfile else ""
    except (OSError, ValueError) as error:
        problem = f"image.dockerfile: {dockerfile} can't be read: {error}"
        raise UsageError(problem, "It is relative to the spec's file.", field="image.dockerfile") from error
    if project or dockerfile:  # requirements.txt is checked line by line
        from launcher.inputs.code_files import without_secrets

        own_dockerfile = [File(dockerfile.name, dockerfile)] if dockerfile else []
        without_secrets([*project, *own_dockerfile], spec.image.allow_secrets)
    return msgspec.structs.replace(
        own,
        recipe=content.recipe(),
        base_dockerfile=base_dockerfile,
        locks=content.locks(),
        project=project,
        trainer=content.trainer(),
        requirements=needs.text if needs else "",
        torch=None if spec.image.torch == "base" else below(beside, "image.torch", spec.image.torch),
    )


def built_in(target: Target, *, training: bool) -> Path:
    """Return the path of the default spec."""
    name = "default.yaml" if training or target != "vm" else "vm-default.yaml"
    return content.data_folder("job_specs") / name


def full_path(output: str) -> str:
    """Return a local output as an absolute path, with `~` expanded.

    Raises UsageError: the home folder does not exist, or the path is not valid UTF-8.
    """
    try:
        path = Path(output).expanduser().resolve().as_posix()
        path.encode()
    except RuntimeError as error:  # no such user; links that lead to each other
        raise UsageError(f"output {output}: {error}", "Use a full path: --output /FULL/PATH", field="output") from None
    except UnicodeEncodeError:
        hint = "Use another folder: --output DIR"
        raise UsageError("the full path of the output is not valid UTF-8", hint, field="output") from None
    return path


def folder_of(path: Path) -> Path | None:
    """Return the spec's folder, which its paths are relative to; None if the spec comes from a pipe or a device."""
    folder = path.parent.resolve()
    device = folder == Path("/dev") or folder.is_relative_to("/proc")  # /dev/stdin, <(…)
    return None if device or not path.is_file() else folder


def code_folder(spec: JobSpec, beside: Path | None) -> Path | None:
    """Return `image.code`, or the spec's folder if it names a script, module, functions or data files there, or None.

    Raises UsageError: a folder is needed, but the spec was not read from a file.
    """
    if folder := below(beside, "image.code", spec.image.code):
        return Path(os.path.realpath(folder))
    beside_it = {field: path for field, path in data_paths(spec.run).items() if not path.startswith(("/", "~"))}
    own = {**({"run.script": spec.run.script} if spec.run.script else {}), **custom_functions(spec.run), **beside_it}
    if spec.run.module and not spec.run.is_builtin and beside:
        from launcher.inputs.python_project import module_roots, read_projects

        if module_beside(spec, beside, module_roots(spec, read_projects(beside))):
            own["run.module"] = spec.run.module
    if not own or (spec.image.uri and spec.run.node != "append"):
        return None
    if beside is None:
        field, name = next(iter(own.items()))
        raise UsageError(
            f"{field}: {name} is relative to the spec's folder, but this spec was not read from a file",
            "Set the code folder: --set image.code=/FULL/PATH",
            field=field,
        )
    return beside


def module_beside(spec: JobSpec, folder: Path, roots: Sequence[str] = ("",)) -> bool:
    """Return whether `run.module` is a file in a folder, or in one of `roots` below it."""
    paths = [folder / root / (spec.run.module or "").replace(".", "/") for root in roots]
    return not spec.run.is_builtin and any(
        Path(f"{path}{end}").is_file() for path in paths for end in (".py", "/__main__.py")
    )


FROM_CONTEXT = r"(?im)^\s*(?:(?:COPY|ADD)\s+(?!--from)|RUN\s+.*--mount=type=bind(?!\S*from=))"
"""An instruction that reads the build context."""


def below(beside: Path | None, field: str, name: str | None) -> Path | None:
    """Return the path of a field that is relative to the spec's folder; None if the field is not set.

    Raises UsageError: the path is relative, but the spec was not read from a file.
    """
    if name is None:
        return None
    if beside is None and not Path(name).is_absolute():
        raise UsageError(
            f"{field}: {name} is relative to the spec's folder, but this spec was not read from a file",
            f"Use the full path: --set {field}=/FULL/PATH",
            field=field,
        )
    return (beside or Path("/")) / name


# --- Project and owner ----------------------------------------------------------------------------------------------


def read_user_settings(environ: Mapping[str, str]) -> Settings:
    """Read the user's settings; without a file, all fields have their defaults. Raises SpecError with all problems."""
    path = user_settings_path(environ)
    # Path.is_file raises in a folder that can't be read, such as another user's HOME.
    return read_settings(path, str(path)) if path and os.path.isfile(path) else Settings()  # noqa: PTH113


class NoProject(UsageError):
    """No Google Cloud project is set."""


class FoundProject(Struct, frozen=True):
    """A project's ID, and where it is set."""

    value: str
    where: str


def find_project(environ: Mapping[str, str], files: Sequence[Settings]) -> FoundProject | None:
    """Return the project of CLOUDSDK_CORE_PROJECT (which is set for one command or shell, like a flag), else of the
    first settings file that names one, else gcloud's."""
    if value := gcloud_config.of_environment("core/project", environ):
        return FoundProject(value, "CLOUDSDK_CORE_PROJECT")
    for file in files:
        if file.project.id:
            return FoundProject(file.project.id, file.place("id"))
    value = gcloud_config.setting("core/project", environ)
    return FoundProject(value, "gcloud") if value else None


def project_of(path: Path | None, target: Target) -> str:
    """Return the project of a spec file; without a file, that of all other commands. Raises UsageError."""
    files = (read_project_file(folder_of(path), path), read_user_settings(os.environ)) if path else None
    return project(target, os.environ, files=files)


def project(
    target: Target,
    environ: Mapping[str, str],
    named: str | None = None,
    files: Sequence[Settings] | None = None,
    stand_in: str | None = None,
) -> str:
    """Return the project: `named`, else that of `find_project`, else `stand_in`, or `local` for a run on this machine.

    `files` are by default the user's own settings; a run on this machine has none.

    Raises NoProject: no project is set; UsageError: it is not a project ID.
    """
    if files is None:
        files = () if target == "local" else (read_user_settings(environ),)
    of_files = None if named else find_project(environ, files)
    project_id = named or (of_files.value if of_files else stand_in)
    if not project_id and target != "local":
        raise NoProject(
            "no Google Cloud project is set",
            "gcloud config set project PROJECT\n"
            "or: export CLOUDSDK_CORE_PROJECT=PROJECT (any name works for a dry run)",
        )
    if project_id and target != "local" and not PROJECT_ID.fullmatch(project_id):
        raise UsageError(
            f"invalid project ID {project_id!r} (use lower-case letters, digits and -)",
            "gcloud projects list\ngcloud config set project PROJECT_ID\nor: export CLOUDSDK_CORE_PROJECT=PROJECT_ID",
        )
    return project_id or "local"


def owner(environ: Mapping[str, str]) -> str:
    """Return the owner of a run: gcloud's account, else the user of this machine."""
    import getpass

    if account := gcloud_config.person(environ):
        return account
    try:
        return os.fsencode(getpass.getuser()).decode(errors="replace")
    except (KeyError, OSError, ImportError):  # no name for this uid, as in some containers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
