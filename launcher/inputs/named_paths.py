"""Check, before a job is submitted, that the paths which a spec and its code name will exist where the job runs.

Data files in `run.config` must: they are checked. Of the arguments and of the code, only a person knows what is read,
so these give warnings. Their search is by text; nothing is imported or run. It covers the arguments, and string
constants in the script, in the code's modules that it imports, and in Python files that the arguments name (nanoGPT's
config/…).
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from launcher.errors import UsageError
from launcher.images.source_files import UserCode
from launcher.inputs.code_files import NEVER, is_run_folder
from launcher.inputs.python_files import MOST_FILES, started, walk_code
from launcher.plan.model import Target
from launcher.spec.checks import data_paths
from launcher.spec.models import JobSpec

if TYPE_CHECKING:
    import ast

ELSEWHERE: Final = ("/gcs", "/mnt", "/workspace", "/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/opt")  # noqa: S108 - compared with texts only; nothing is written there
"""Folders that also exist on the job's machine or in its image."""
FOREIGN: Final = ("/home", "/Users", "/mnt", "/media", "/data", "/datasets", "/scratch")
"""Folders in which people keep data. The job's machine has them only as mounts."""
MOUNTS: Final = ("/gcs", "/mnt/nfs", "/mnt/lustre")
"""Where Vertex AI mounts buckets and shares."""
COPY: Final = "Copy it into a bucket (gcloud storage cp -r), and name it there: gs://BUCKET/…"
MOST_ENTRIES: Final = 20_000
"""Maximum number of files and folders that are visited, those nearest to the top first."""
OUTPUTS: Final = frozenset(
    {"out", "output", "outputs", "log", "logs", "run", "runs", "wandb", "mlruns", "result", "results", "save", "saved"}
    | {"checkpoint", "checkpoints", "ckpt", "ckpts"}
)
"""Folders that scripts usually write. A single word that matches one of them is no evidence that it is read."""
ARGUMENTS: Final = "run.args"
"""Where an argument stands, as the place of a mention."""


# --- Data files -------------------------------------------------------------------------------------------------------


def check_data(spec: JobSpec, code: UserCode, target: Target, *, in_place: bool = False) -> None:
    """Check that relative paths are among the code's files (with `in_place`: in the code's folder).

    In a rehearsal, absolute paths must exist on this machine. A custom image may contain any file, so nothing is
    checked. Raises UsageError.
    """
    if spec.image.is_custom:
        return
    folder, names = code.folder, code.names
    for field, path in data_paths(spec.run).items():
        is_absolute = path.startswith(("/", "~"))
        if in_place or (is_absolute and target == "local"):
            where = (folder or Path.cwd()) / os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
            if os.path.exists(where) or glob_matches(path, folder):  # noqa: PTH110 -- names may be too long
                continue
            if is_absolute:
                raise UsageError(f"{field}: {path} does not exist on this machine", field=field)
            relative = "The path is relative to the code folder: image.code, or else the spec's own folder."
            raise UsageError(f"{field}: {path} does not exist in {folder or Path.cwd()}", relative, field=field)
        if is_absolute:
            if not is_below(path, mounted_folders(spec, target)):
                problem = f"{field}: {path} does not exist on the job's machine, which has only the code"
                raise UsageError(problem, COPY, field=field)
            continue
        name = posixpath.normpath(path)
        taken = (name, *glob_matches(name, folder))
        if name == "." or any(each in names or any(file.startswith(f"{each}/") for file in names) for each in taken):
            continue
        ignored = folder is not None and not re.match(r"\.\.(/|$)", name) and os.path.exists(folder / name)  # noqa: PTH110 -- names may be too long
        hint = "It exists, but .gitignore, .dockerignore or its folder's name excludes it." if ignored else COPY
        here = "\n`launch local --in-place` runs in that folder itself." if ignored else ""
        raise UsageError(f"{field}: {path} is not in the code in {folder}", hint + here, field=field)


def glob_matches(path: str, folder: Path | None) -> list[str]:
    """Return the files and folders of this machine that match a pattern, relative to the code's folder."""
    if not glob.has_magic(path) or "\0" in path:
        return []
    return glob.glob(os.path.expanduser(path), root_dir=folder, recursive=True)  # noqa: PTH111, PTH207 -- a relative result


# --- Arguments --------------------------------------------------------------------------------------------------------


def absent_paths(spec: JobSpec, target: Target, code: UserCode) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for each argument that names a path which the job's machine will lack; none for a
    rehearsal."""
    mounted = (*mounted_folders(spec, target), *(["/mnt/localssd"] if target == "vm" else []))
    for field, path in paths(spec) if target != "local" else ():
        if not path.startswith(("/", "~/")) or is_below(path, mounted):
            continue
        full = os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
        is_here = bool(full.strip("/")) and ("\0" not in full) and os.path.exists(full)  # noqa: PTH110 -- names may be too long
        if is_here and ((code.folder and path.startswith(f"{code.folder}/")) or not is_below(path, ELSEWHERE)):
            yield field, f"{path} is a path of this machine; the job's machine does not have it"
        elif is_below(path, MOUNTS):
            _, top, kind, *inside = (*path.split("/"), "NAME")
            if top == "gcs":
                mount = f"{{bucket: {kind}}}"
            else:
                source = "nfs: SERVER:/SHARE" if kind == "nfs" else "lustre: IP@tcp:/NAME"
                mount = f"{{{source}, path: /mnt/{kind}/{inside[0]}}}"
            yield field, f"{path} is not mounted on the job's machine; add it to the spec: mounts: [{mount}]"
        elif not spec.image.is_custom and (path.startswith("~/") or is_below(path, FOREIGN)):
            yield field, f"{path} does not exist on the job's machine; put it in a bucket, or mount it (docs/data.md)"


def paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, path) for each argument that may be a path, or has one after its equals sign."""
    for field, words in (("run.args", spec.run.args), ("run.command", spec.run.command or ())):
        for index, word in enumerate(words):
            is_path = word.startswith(("/", "~/")) or ("=" not in word and not word.startswith("-"))
            path = word if is_path else word.partition("=")[2]
            if path:
                yield f"{field}.{index}", path


def mounted_folders(spec: JobSpec, target: Target) -> tuple[str, ...]:
    """Return the mounts of the job's machine: those that the spec names, and on Vertex AI all buckets."""
    named = tuple(mount.folder for mount in spec.mounts)
    shares = (f"/mnt/{kind}/{mount.mount_point}" for kind in ("nfs", "lustre") for mount in getattr(spec.vertex, kind))
    return ("/gcs", *shares, *named) if target == "vertex" else named


def is_below(path: str, folders: Sequence[str]) -> bool:
    return any(f"{posixpath.normpath(path)}/".startswith(f"{folder}/") for folder in folders)


# --- Mentions in the arguments and in the code ------------------------------------------------------------------------


class Mention(NamedTuple):
    """A text that may be a path, and its location: `run.args` or FILE:LINE."""

    text: str
    where: str
    is_beside: bool = False
    """True if the statement uses __file__: the path may then be relative to the script."""


def mentioned(spec: JobSpec, code: UserCode) -> list[Mention]:
    """Return the texts in the arguments and in the script that may be paths."""
    import ast  # imported here: a dry run without a script doesn't need it

    words = (*(spec.run.command or ()), *spec.run.args)
    texts = (text for word in words for text in (word, word.partition("=")[2]))
    mentions = [Mention(text, ARGUMENTS) for text in texts if _is_path(text)]
    starts = [*map(posixpath.normpath, words), *(file for _, file in started(spec, code))]
    for name, tree in walk_code(starts, code, ast.walk):
        mentions += [Mention(text, f"{name}:{line}", is_beside) for text, line, is_beside in _constants(tree)]
    return mentions


def named_but_ignored(mentions: Sequence[Mention], spec: JobSpec, code: UserCode) -> tuple[str, ...]:
    """Return `data/train.bin (train.py:12)` for each such file, and `data/ (…)` for a folder without any code files.

    Files that were left out for another reason are not reported.
    """
    own, without = set(code.names), {*code.left_out, *code.secret_files}
    if not mentions:
        return ()
    folders = {parent for name in own for parent in _parents(name)}
    hidden = [path for path in _not_code(code.path(""), own, folders) if path.rstrip("/") not in without]
    bases = dict.fromkeys(("", posixpath.dirname(spec.run.script or "")))
    places: dict[str, str] = {}
    for mention in mentions:
        for path in hidden:
            if path not in places and _names(mention, path, bases):
                places[path] = mention.where
    return tuple(f"{path} ({where})" for path, where in places.items() if not _said_otherwise(path, places))


def named_outside(mentions: Sequence[Mention], names: Sequence[str]) -> tuple[str, ...]:
    """Return `../data (main.py:7)` for each path that leads out of the code's folder.

    What exists relative to the file that names it is none: Hydra's config_path and mmengine's _base_ are relative to
    their file. `names` are the code's files."""
    places: dict[str, str] = {}
    known = {*names, *(parent for name in names for parent in _parents(name))}
    for mention in mentions:
        path = posixpath.normpath(mention.text)
        from_its_file = posixpath.normpath(posixpath.join(posixpath.dirname(mention.where), path))
        is_of_file = mention.where != ARGUMENTS and from_its_file in known
        if path.startswith("../") and not mention.is_beside and not is_of_file:
            places.setdefault(path, mention.where)
    return tuple(f"{path} ({where})" for path, where in places.items())


def _names(mention: Mention, path: str, bases: Sequence[str] | dict[str, None]) -> bool:
    """Return whether a text names a path, relative to the code's top or the script's folder.

    It may also match the end of a file's path, as in os.path.join(data_dir, "train.bin"). An argument that names a
    folder also names everything in it.
    """
    whole = {posixpath.normpath(posixpath.join(base, mention.text)) for base in bases}
    if path.rstrip("/") in whole:
        return mention.where == ARGUMENTS or mention.text not in OUTPUTS
    if mention.where == ARGUMENTS:
        return any(path.startswith(f"{named}/") for named in whole)
    tail = posixpath.normpath(mention.text)
    return "." in posixpath.basename(tail) and not path.endswith("/") and path.endswith(f"/{tail}")


def _said_otherwise(path: str, places: dict[str, str]) -> bool:
    """Return whether a mention of a parent folder, or of a file inside this folder, already covers the path."""
    if any(places.get(f"{parent}/") == ARGUMENTS for parent in _parents(path.rstrip("/"))):
        return True
    return (
        path.endswith("/")
        and places[path] != ARGUMENTS
        and any(inner != path and inner.startswith(path) for inner in places)
    )


def _parents(name: str) -> Iterator[str]:
    while name := posixpath.dirname(name):
        yield name


def _is_path(text: str) -> bool:
    """Return whether a text may name a file below the code's folder."""
    return 0 < len(text) < 256 and text.isprintable() and not text.startswith(("/", "-")) and bool(text.strip("./"))


@lru_cache(maxsize=MOST_FILES)
def _constants(tree: ast.Module) -> tuple[tuple[str, int, bool], ...]:
    """Return the strings of a file that may be paths, with their lines, and whether the statement uses __file__."""
    import ast

    simple = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body"))
    statements = [[*ast.walk(statement)] for statement in simple]
    uses_file = [nodes for nodes in statements if any(getattr(node, "id", "") == "__file__" for node in nodes)]
    beside = {node for nodes in uses_file for node in nodes}
    return tuple(
        (node.value, node.lineno, node in beside)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_path(node.value)
    )


def _not_code(folder: Path, own: set[str], folders: set[str]) -> Iterator[str]:
    """Yield the files below the code's folder that are not code, and folders ("…/") without any code.

    Caches, virtual environments, run folders and unreadable folders are skipped.
    """
    waiting, left = deque([""]), MOST_ENTRIES
    while waiting and left > 0:
        below = waiting.popleft()
        with suppress(OSError), os.scandir(folder / below) as entries:
            for entry in entries:
                left -= 1
                name = below + entry.name
                if entry.name in NEVER or name in own:
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    yield name
                elif not (is_run_folder(entry.path) or os.path.lexists(f"{entry.path}/pyvenv.cfg")):
                    waiting.append(f"{name}/")
                    if name not in folders:
                        yield f"{name}/"
