"""Find files that a script or its arguments name but that are not code: ignored files, and paths outside the folder.

The search is by text; nothing is imported or run. It covers the arguments, and string constants in the script, in the
code's modules that it imports, and in Python files that the arguments name (nanoGPT's config/…).
"""

from __future__ import annotations

import os
import posixpath
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from launcher.inputs.listing import NEVER, is_run_folder
from launcher.inputs.python_files import MOST_FILES, ROOT, started, walk_code
from launcher.spec.models import JobSpec

if TYPE_CHECKING:
    import ast

MOST_ENTRIES: Final = 20_000
"""Maximum number of files and folders that are visited, those nearest to the top first."""


OUTPUTS: Final = frozenset(
    {"out", "output", "outputs", "log", "logs", "run", "runs", "wandb", "mlruns", "result", "results", "save", "saved"}
    | {"checkpoint", "checkpoints", "ckpt", "ckpts"}
)
"""Folders that scripts usually write. A single word that matches one of them is no evidence that it is read."""


class Mention(NamedTuple):
    """A text that may be a path, and its location: `run.args` or FILE:LINE."""

    text: str
    where: str
    is_beside: bool = False
    """True if the statement uses __file__: the path may then be relative to the script."""


def mentioned(spec: JobSpec, folder: Path, names: Sequence[str], roots: Sequence[str] = ROOT) -> list[Mention]:
    """Return the texts in the arguments and in the script that may be paths; `names` are the code's files, `roots` the
    folders that modules are imported from."""
    import ast  # imported here: a dry run without a script doesn't need it

    words = (*(spec.run.command or ()), *spec.run.args)
    texts = (text for word in words for text in (word, word.partition("=")[2]))
    mentions = [Mention(text, ARGUMENTS) for text in texts if _is_path(text)]
    starts = [*map(posixpath.normpath, words), *(file for _, file in started(spec, names, roots))]
    for name, tree in walk_code(starts, folder, set(names), ast.walk, roots):
        mentions += [Mention(text, f"{name}:{line}", is_beside) for text, line, is_beside in _constants(tree)]
    return mentions


def named_but_ignored(
    mentions: Sequence[Mention], spec: JobSpec, folder: Path, names: Sequence[str], without: Sequence[str]
) -> tuple[str, ...]:
    """Return `data/train.bin (train.py:12)` for each such file, and `data/ (…)` for a folder without any code files.

    `names` are the code's files. `without` are files that were left out for another reason; they are not reported.
    """
    own = set(names)
    if not mentions:
        return ()
    folders = {parent for name in names for parent in _parents(name)}
    hidden = [path for path in _not_code(folder, own, folders) if path.rstrip("/") not in without]
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


# --- Mentioned paths ------------------------------------------------------------------------------------------------


ARGUMENTS: Final = "run.args"


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


# --- Files that are not code -----------------------------------------------------------------------------------------


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
