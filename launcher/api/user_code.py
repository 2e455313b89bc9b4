"""Gather what planning needs of the user's code. Imported only for a spec that has code or a program of its own."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path

from launcher.api.code_growth import grown_since
from launcher.errors import UsageError
from launcher.images.source_files import UserCode
from launcher.plan.model import Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import Located
from launcher.text import did_you_mean
from launcher.workspace import code_files, content
from launcher.workspace.code_warnings import code_warnings
from launcher.workspace.mentioned_files import mentioned, named_but_ignored, named_outside
from launcher.workspace.python_files import check_module, check_syntax, near_scripts
from launcher.workspace.user_functions import check_functions, packaged_functions


def read_code(
    spec: JobSpec, folder: Path, left_out: frozenset[Path], cache: code_files.CodeCache | None = None
) -> UserCode:
    """List and hash the code, and check what the spec names of it. `left_out` are paths that are not code; `cache` has
    the code of other specs.

    Raises UsageError: a file that `run` names is missing, or the files exceed the size limit.
    """
    found = (cache or code_files).collect_code(folder, left_out)
    names = [file.name for file in found.files]
    if spec.run.script:
        check_script(spec.run.script, folder, names)
    check_functions(spec, folder, names)
    code_files.check_size(found.files, spec.image.code_limit_mb)
    hashes = (cache or content).content(found.files)
    known = [path.relative_to(folder).as_posix() for path in left_out if folder in path.parents]
    mentions = mentioned(spec, folder, names)
    return UserCode(
        files=tuple(found.files),
        content=hashes,
        secret_files=tuple(sorted(found.secrets)),
        packaged_functions=packaged_functions(spec, names),
        syntax_warnings=check_syntax(spec, folder, names, content.base_image()),
        ignored_files=named_but_ignored(mentions, spec, folder, names, [*known, *found.secrets]),
        outside_paths=named_outside(mentions),
        growth=grown_since(spec.name, local_runs(spec), found.files, hashes),
    )


def warnings(
    spec: JobSpec,
    located: Located,
    target: Target,
    folder: Path | None,
    beside: Path | None,
    code: UserCode,
    needs: str,
) -> tuple[str, ...]:
    """Return what will probably fail on the job's machine. `needs` is the text of the requirements.

    Raises UsageError: neither the code nor the image has `run.module`.
    """
    return (
        *check_module(spec, folder, code.names),
        *code_warnings(spec, located, target, folder, beside, code.names, needs),
    )


def local_runs(spec: JobSpec) -> str:
    """Return the folder of the spec's runs on this machine (default: ./runs)."""
    return spec.output if spec.output and not spec.output.startswith("gs://") else "runs"


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
