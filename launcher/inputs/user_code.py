"""Read the user's code, check what the spec names of it, and warn of what will probably fail where the job runs.

Imported only for a spec that has code or a program of its own.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from launch_train import runfolder
from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File, UserCode
from launcher.inputs import code_files, content
from launcher.inputs.interpreter import Interpreter, Wanted
from launcher.inputs.named_paths import absent_paths, mentioned, named_but_ignored, named_outside
from launcher.inputs.python_files import (
    PYTHON_PROGRAMS,
    SYSTEM_PROGRAMS,
    check_functions,
    check_module,
    check_syntax,
    image_modules,
    near_scripts,
    outside_imports,
    packaged_functions,
    started,
    unprovided,
)
from launcher.inputs.python_project import compiled_warnings, installed_files, module_roots, read_projects
from launcher.inputs.requirements import holds_here, names_and_markers
from launcher.plan.model import Packages, Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import Located, read_located
from launcher.text import did_you_mean, listed

MOST_READ: Final = 1_000_000
"""Bytes of a file in which the name of another file is looked for."""
MOST_NAMED: Final = 5
"""Files or paths that a warning names."""
EXPORT: Final = b'{\n  "run_folder": '
"""First bytes of the config.json in an export (launch_train.export)."""


def read_code(
    spec: JobSpec,
    folder: Path,
    left_out: frozenset[Path],
    cache: code_files.CodeCache | None = None,
    packages: Packages = Packages(),  # noqa: B008 - immutable
) -> UserCode:
    """List and hash the code, and check what the spec names of it. `left_out` are paths that are not code; `cache` has
    the code of other specs; `packages` name the projects of the code that image.requirements installs.

    Raises UsageError: a file that `run` names is missing, the files exceed the size limit, or contain secrets.
    """
    files = without_outputs((cache or code_files).collect_code(folder, left_out), spec)
    code_files.check_size(files, spec.image.code_limit_mb)
    code = code_files.without_secrets(
        files, spec.image.allow_secrets, cache.read if cache else code_files.hashed_and_searched
    )
    names = [file.name for file in code.files]
    if spec.run.script:
        check_script(spec.run.script, folder, names)
    projects = read_projects(folder, project_folders(folder, packages)) if spec.run.node != "none" else []
    user_code = UserCode(
        folder=folder,
        files=tuple(code.files),
        content=code.content,
        secret_files=tuple(sorted(code.secrets)),
        left_out=tuple(path.relative_to(folder).as_posix() for path in left_out if folder in path.parents),
        roots=module_roots(spec, projects),
        installed=installed_files(projects),
        project_warnings=tuple(compiled_warnings(projects)),
    )
    check_functions(spec, user_code)
    return user_code


def without_outputs(files: Sequence[File], spec: JobSpec) -> list[File]:
    """Return the files without other specs and logs, and without pages and exports that launch wrote: they never change
    a run. A file stays if an argument or the code contains its name."""
    outputs: dict[str, str] = {}  # file -> its name, or that of the export's folder
    for file in files:
        folder, _, name = file.name.rpartition("/")
        if name.endswith((".yaml", ".yml")):
            status = file.path.lstat()
            written = is_other_spec(file.path, status.st_mtime_ns, status.st_size)
        else:
            is_page = name.endswith(".html") and runfolder.PAGE_MARK.encode() in first_bytes(file.path, 1000)
            written = is_page or name.endswith((".log", ".out"))  # launch … > run.log; nohup.out
        if written:
            outputs[file.name] = name
        elif name == "config.json" and folder and first_bytes(file.path, 1000).startswith(EXPORT):
            inside = (other.name for other in files if other.name.startswith(f"{folder}/"))
            outputs.update(dict.fromkeys(inside, folder.rpartition("/")[2]))
    if not outputs:
        return list(files)
    texts = [msgspec.json.encode((spec.run, spec.env))]
    texts += [first_bytes(file.path, MOST_READ) for file in files if file.name not in outputs and file.link is None]
    unused = {name for name in set(outputs.values()) if not any(name.encode() in text for text in texts)}
    return [file for file in files if outputs.get(file.name) not in unused]


@lru_cache(1000)
def is_other_spec(path: Path, _mtime: int, _size: int) -> bool:
    """Return whether a file is a valid spec. `launch check` asks once for each pair of specs in a folder."""
    if b"machine" not in first_bytes(path, MOST_READ):
        return False
    try:
        read_located(path)
    except LaunchError:
        return False
    return True


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a file; none if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def project_folders(folder: Path, packages: Packages) -> list[str]:
    """Return the folders, relative to the code's, of the projects that image.requirements installs. Raises UsageError:
    one is elsewhere."""
    folders = []
    for project in packages.projects:
        try:
            folders.append(Path(project.folder).relative_to(folder).as_posix())
        except ValueError as error:
            raise UsageError(
                f"{project.where}: {project.folder} is not in the code, so the image doesn't have it",
                f"The code is {folder}. Choose a folder that has both: image.code",
                field="image.requirements",
            ) from error
    return ["" if name == "." else name for name in folders]


def warnings(
    spec: JobSpec,
    located: Located,
    target: Target,
    beside: Path | None,
    code: UserCode,
    needs: str,
    python: Interpreter | None,
) -> Iterator[str]:
    """Yield what will probably fail on the job's machine, the most important first.

    `beside` is the spec's folder, `needs` the text of the requirements, `python` runs the job on this machine. Raises
    UsageError: no Python that the job may have can parse the code, or nothing provides `run.module`.
    """
    image = spec.image
    starts = [file for _, file in started(spec, code)]
    packaged = packaged_functions(spec, code) if code.folder else ()
    if code.folder:
        yield from about_files(spec, code)
        if not python:
            yield from (
                f"{function} is not in the code, so a package in the image must provide it" for function in packaged
            )
        yield from check_syntax(spec, code, content.base_image(), python)
    yield from check_module(spec, code, python)
    if not python:  # a Python of this machine may have what was compiled
        yield from code.project_warnings
    for field, problem in absent_paths(spec, target, code):
        yield f"{located.place(field)}: {field.rpartition('.')[0]}: {problem}"
    if code.folder and python:
        yield from unprovided(starts, code, python)
        for function in packaged:
            if function.partition(":")[0].partition(".")[0] in python.lacks:
                yield f"{function} is not in the code, and not installed in {python.path}"
        lacking = [
            name
            for name, marker in names_and_markers(needs)
            if python.version and name not in python.installed and holds_here(marker, python.version)
        ]
        if lacking:
            is_file = str(image.requirements).endswith(".txt")
            file = str((beside or Path()) / str(image.requirements))
            fix = python.install(*(["-r", file] if is_file else lacking))
            yield f"image.requirements: not installed in {python.path}: {listed(lacking, 5)}. To install: {fix}"
        return
    program = (spec.run.command or ("",))[0]
    if not image.is_custom and f"bin/{program}" not in code.installed:
        package = PYTHON_PROGRAMS.get(program, "") if not image.requirements else ""
        if package or program in SYSTEM_PROGRAMS:
            fix = f"{package} to image.requirements" if package else f"image.setup: [apt-get install -y {program}]"
            yield f"run.command: the image has no {program}; add {fix}"
    # Of a custom base or setup, and of what the requirements require in turn, nothing is known here.
    if code.folder and not (image.is_custom or image.requirements):
        yield from unprovided(starts, code)


def about_files(spec: JobSpec, code: UserCode) -> Iterator[str]:
    """Yield which files that the job may need are no part of the code."""
    if code.secret_files:
        yield (
            f"excluded from the image, as they look like secrets: {', '.join(code.secret_files)}. Pass secrets to a "
            "job with `secrets`; a file that is none can be sent: image.allow_secrets."
        )
    for module in sorted(image_modules() - {"launch_train"}):  # which Python finds before the code
        if f"{module}.py" in code.names:
            yield f"{module}.py hides the installed package {module} from everything that imports it; rename the file."
    mentions = mentioned(spec, code)
    if ignored := named_but_ignored(mentions, spec, code):
        more = f" and {len(ignored) - MOST_NAMED} more" if len(ignored) > MOST_NAMED else ""
        yield (
            f"the code refers to excluded files: {', '.join(ignored[:MOST_NAMED])}{more}. Put data in a bucket, or "
            "include the files by changing .gitignore or .dockerignore."
        )
    if outside := named_outside(mentions, code.names):
        shown = ", ".join(outside[:MOST_NAMED]) + (" …" if len(outside) > MOST_NAMED else "")
        yield (
            f"paths outside the code: {shown}. Relative paths start in /workspace, and the job cannot write above "
            "it. Use a path inside, or start in a subfolder: run.command: [sh, -c, cd FOLDER && exec python SCRIPT]"
        )


def wanted_packages(wanted: Wanted, spec: JobSpec, code: UserCode, needs: str) -> Wanted:
    """Return the packages and modules that a Python of this machine must have to run the code."""
    starts = [file for _, file in started(spec, code)]
    functions = packaged_functions(spec, code)
    modules = [
        *outside_imports(starts, code),
        *(name.partition(":")[0].partition(".")[0] for name in functions),
    ]
    if spec.run.module and not spec.run.is_builtin:
        modules.append(spec.run.module.partition(".")[0])
    packages = tuple(name for name, _ in names_and_markers(needs))
    return wanted._replace(packages=packages, modules=tuple(dict.fromkeys(modules)))


def check_script(script: str, folder: Path, names: Sequence[str]) -> None:
    """Check that `run.script` is one of the code files. Raises UsageError, with similar names."""
    name = posixpath.normpath(script)
    if name in names:
        return
    if (forward := name.replace("\\", "/")) in names:  # as Windows writes it; the job runs on Linux
        hint = f"Write it with forward slashes: --set run.script={forward}"
    elif not name.startswith(("/", "../")) and os.path.isfile(folder / name):  # noqa: PTH113 -- Path.is_file raises on a name that is too long
        hint = "The file exists, but .gitignore, .dockerignore or its folder's name excludes it."
    else:
        hint = did_you_mean(near_scripts(name, names), "The path is relative to image.code.")
    raise UsageError(f"run.script: {script} not found in the code in {folder}", hint, field="run.script")
