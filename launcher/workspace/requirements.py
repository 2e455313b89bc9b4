"""Read the packages that a job needs, from a requirements file or a pyproject.toml, as one text.

The image is built from that text alone. References to files on this machine are therefore rejected before the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UsageError

FIELD = "image.requirements"
COMMENT = re.compile(r"(^|\s+)#.*$")
"""pip's own syntax of a requirements file (pip, req_file.py), as is OPTION."""
OPTION = re.compile(r"(^|\s)-")
ADDRESS = re.compile(r"[\w.+-]+://")
VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
INCLUDE = re.compile(r"(?:-r|--requirement)[\s=]*(\S+)")
NOT_SENT = re.compile(
    r"(-e|--editable|-c|--constraint|-f|--find-links)(?![\w-])[\s=]*+(?!([\w.]+\+)?(https?|ssh|git)://)"
    r"|\.{0,2}/|([\w.]+\+)?file:|.+@\s*([\w.]+\+)?file:|[^:\s]+\.(whl|zip|tar\.gz|tar\.bz2|tgz)(\s|;|\[|$)"
)
"""A file or folder on this machine, with or without an option before it. URLs don't match."""


class Line(NamedTuple):
    """A line, and the file and number where it stands."""

    path: Path
    number: int
    text: str


def requirements(path: Path) -> str:
    """Return the text of a requirements file with its includes, or of a pyproject.toml's dependencies.

    Raises:
        UsageError: it can't be read, contains a password, or refers to a file on this machine.
    """
    return "".join(f"{line.text}\n" for line in located(path))


def located(path: Path) -> list[Line]:
    """Return the same text as lines. Raises UsageError."""
    return list(of_pyproject(path) if path.name == "pyproject.toml" else with_included(path, ()))


def read(path: Path) -> str:
    """Return a file's text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{FIELD}: {path} can't be read: {what}", "The path is relative to the spec file.", field=FIELD
        ) from error


def of_pyproject(path: Path) -> Iterator[Line]:
    """Yield `[project] dependencies`, one per line. Raises UsageError."""
    import tomllib

    text = read(path)
    try:
        project = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{FIELD}: {path} isn't TOML: {error}", field=FIELD) from error
    found = project.get("dependencies") if isinstance(project, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        problem = f"{FIELD}: {path} has no [project] dependencies"
        raise UsageError(problem, "Name a requirements file instead.", field=FIELD)
    lines = text.splitlines()
    for one in found:
        number = next((number for number, line in enumerate(lines, 1) if one in line), 1)
        check(path, number, one)
        check_syntax(path, number, one)
        yield Line(path, number, one)


def with_included(path: Path, above: tuple[Path, ...]) -> Iterator[Line]:
    """Yield the file's lines. `-r OTHER` is replaced with that file's lines. Raises UsageError."""
    if path.resolve() in above:
        raise UsageError(f"{FIELD}: {path} includes itself", "Remove one of the -r lines.", field=FIELD)
    text = read(path)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if included := INCLUDE.match(bare):
            yield from with_included(path.parent / included[1], (*above, path.resolve()))
        else:
            check(path, number, bare)
            yield Line(path, number, line)
    for number, named in packages(text):
        check_syntax(path, number, named)


def packages(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, requirement) as pip parses a file's text, without comments and options."""
    joined, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        first = first or number
        bare = COMMENT.sub("", line)
        joined += bare.removesuffix("\\")
        if bare.endswith("\\"):
            continue
        if named := OPTION.split(joined, maxsplit=1)[0].strip():
            yield first, named
        joined, first = "", 0


def names_of(text: str) -> list[str] | None:
    """Return the names of the packages in a requirements file's text, or None if one is a URL without a name."""
    found = [named for _, named in packages(text)]
    if any(ADDRESS.match(one) or VARIABLE.search(one) for one in found):
        return None
    return [name[0] for one in found if (name := re.match(r"[\w.-]+", one))]


def check_syntax(path: Path, number: int, named: str) -> None:
    """Check that pip can read a requirement. Raises UsageError."""
    from packaging.requirements import InvalidRequirement, Requirement

    if ADDRESS.match(named) or VARIABLE.search(named):  # pip fetches the URL and expands the build's variables
        return
    try:
        Requirement(named)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{FIELD}: {path}:{number}: {named!r} can't be read by pip: {reason}",
            "Write NAME, NAME==1.2 or NAME @ https://…",
            field=FIELD,
        ) from error


def check(path: Path, number: int, line: str) -> None:
    """Reject references to this machine, and secrets: everyone who can pull the image can read the file.

    Raises UsageError.
    """
    from launcher.spec.secret_detection import known_secret

    if known_secret(line):
        raise UsageError(
            f"{FIELD}: {path}: line {number} contains a password or a token, which would stay in the image",
            "Take it out. A private package can travel as a wheel within image.code.",
            field=FIELD,
        )
    if NOT_SENT.match(line):
        raise UsageError(
            f"{FIELD}: {path}:{number}: {line!r} names something on this machine, which the image doesn't have",
            "Put your own code in image.code. Packages must come from an index, or from git+https://…",
            field=FIELD,
        )
