"""The packages that a job needs: a requirements file, or the dependencies of a pyproject.toml, as one text.

The image is built from that text alone, so what it would have to look for on this machine is refused here, before
anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import UsageError

FIELD = "image.requirements"
INCLUDE = re.compile(r"(?:-r|--requirement)[\s=]*(\S+)")
NOT_SENT = re.compile(
    r"(-e|--editable|-c|--constraint|-f|--find-links)(?![\w-])[\s=]*+(?!([\w.]+\+)?(https?|ssh|git)://)"
    r"|\.{0,2}/|([\w.]+\+)?file:|.+@\s*([\w.]+\+)?file:|[^:\s]+\.(whl|zip|tar\.gz|tar\.bz2|tgz)(\s|;|\[|$)"
)
"""A file or a folder, with or without an option before it; an address is no such thing."""


def requirements(path: Path) -> str:
    """The text of a requirements file with what it includes, or of a pyproject.toml's dependencies.

    Raises:
        UsageError: it can't be read, holds a password, or names what the image can't have.
    """
    return of_pyproject(path) if path.name == "pyproject.toml" else "".join(with_included(path, ()))


def read(path: Path) -> str:
    """A file's text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{FIELD}: {path} can't be read: {what}", "It is relative to the spec's file.", field=FIELD
        ) from error


def of_pyproject(path: Path) -> str:
    """`[project] dependencies`, a line each. Raises UsageError."""
    import tomllib

    try:
        project = tomllib.loads(read(path)).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{FIELD}: {path} isn't TOML: {error}", field=FIELD) from error
    found = project.get("dependencies") if isinstance(project, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        problem = f"{FIELD}: {path} has no [project] dependencies"
        raise UsageError(problem, "Name a requirements file instead.", field=FIELD)
    for number, one in enumerate(found, 1):
        check(path, number, one)
    return "".join(f"{one}\n" for one in found)


def with_included(path: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """The file's lines, those of `-r OTHER` in their place. Raises UsageError."""
    if path.resolve() in above:
        raise UsageError(f"{FIELD}: {path} includes itself", "Remove one of the -r lines.", field=FIELD)
    for number, line in enumerate(read(path).splitlines(), 1):
        bare = line.strip()
        if included := INCLUDE.match(bare):
            yield from with_included(path.parent / included[1], (*above, path.resolve()))
        else:
            check(path, number, bare)
            yield f"{line}\n"


def check(path: Path, number: int, line: str) -> None:
    """Refuse what names a place on this machine, and secrets: the file stays in the image, and who may read the image
    may read it. Raises UsageError."""
    from launcher.spec.secretive import known_secret

    if known_secret(line):
        raise UsageError(
            f"{FIELD}: {path}: line {number} holds a password or a token, which would stay in the image",
            "Take it out. A private package can travel as a wheel within image.code.",
            field=FIELD,
        )
    if NOT_SENT.match(line):
        raise UsageError(
            f"{FIELD}: {path}:{number}: {line!r} names something on this machine, which the image doesn't have",
            "Code of your own belongs into image.code; packages come from an index, or from git+https://…",
            field=FIELD,
        )
