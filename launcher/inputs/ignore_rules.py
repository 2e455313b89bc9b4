"""Read the rules of .dockerignore and .gitignore files, and match paths against them.

.dockerignore follows Docker's rules (github.com/moby/patternmatcher, used by Docker and BuildKit;
docs.docker.com/build/concepts/context/#dockerignore-files): unlike git's, its patterns are anchored at the top folder.
Docker's Python SDK implements them too, but a dry run must work without the SDK.
"""

from __future__ import annotations

import codecs
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from launcher.errors import UsageError
from launcher.inputs.content import unreadable

NAME = ".dockerignore"
CHARACTER = r"(?:\\.|[^\\\]\-])"
TOKEN = re.compile(rf"\*\*/?|[*?]|\\.|\[\^?+(?:{CHARACTER}(?:-{CHARACTER})?)+\]|[^\\\[*?]", re.DOTALL)
"""The tokens of a pattern. As in Go's filepath.Match, an unclosed [ and a trailing backslash are invalid."""


class Rule(NamedTuple):
    """One line. `keeps`: it begins with `!` and includes again what earlier lines excluded."""

    pattern: re.Pattern[str]
    keeps: bool


def read_dockerignore(folder: Path) -> DockerIgnore:
    """Read a folder's .dockerignore; return one without rules if the file doesn't exist. Raises UsageError."""
    return DockerIgnore(parsed_rule for parsed_rule in parse_lines(folder / NAME, parse_rule) if parsed_rule)


def parse_rule(line: str) -> Rule | None:
    """Parse a line; return None for a comment or an empty line. Raises ValueError: Docker would refuse the line."""
    text = line.strip()
    if not text or line.startswith("#"):
        return None
    keeps = text.startswith("!")
    name = text[keeps:].strip()
    if not name:
        raise ValueError("a ! alone")
    clean = posixpath.normpath(name)
    return Rule(re.compile(regex(clean.lstrip("/") or "/"), re.DOTALL), keeps)


def regex(pattern: str) -> str:
    """Translate a pattern to a regular expression. Raises ValueError or re.error: invalid pattern."""
    tokens = TOKEN.findall(pattern)
    if "".join(tokens) != pattern:
        raise ValueError(pattern)
    if tokens[0] == "**" and not any(token[0] in "*?[\\" for token in tokens[1:]):
        return ".*" + re.escape(pattern[2:])  # **.py: Docker compares the end of the path, across folders
    last = len(tokens) - 1
    return "".join(translated(token, is_last=number == last) for number, token in enumerate(tokens))


def translated(token: str, *, is_last: bool) -> str:
    match token[0]:
        case "*" if len(token) == 1:
            return "[^/]*"
        case "*":
            return ".*" if is_last else "(?:.*/)?"
        case "?":
            return "[^/]"
        case "[":
            inside = re.sub(r"\\(.)|([^\-])", lambda match: re.escape(match[1] or match[2]), token[1:-1].lstrip("^"))
            return f"[{'^' if token[1] == '^' else ''}{inside}]"
        case "\\":
            return re.escape(token[1])
        case _:
            return re.escape(token)


class DockerIgnore:
    """The rules of a file, in order."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._final = not any(each.keeps for each in self._rules)
        self._folders: dict[str, list[bool]] = {"": [False] * len(self._rules)}

    def excludes(self, path: str) -> bool:
        """Return whether a path is excluded. The last rule that matches it or a folder above it decides."""
        excluded = False
        if not self._rules:
            return excluded
        for each, matches in zip(self._rules, self._matches(path), strict=True):
            if matches:
                excluded = not each.keeps
        return excluded

    def excludes_all_of(self, folder: str) -> bool:
        """Return whether every file below the folder is excluded, so that it need not be read."""
        return self._final and self.excludes(folder)

    def _matches(self, path: str) -> list[bool]:
        """Return for each rule whether it matches the path or a folder above it. Results for folders are cached."""
        above = path.rpartition("/")[0]
        if (before := self._folders.get(above)) is None:
            before = self._folders[above] = self._matches(above)
        pairs = zip(self._rules, before, strict=True)
        return [matched or bool(each.pattern.fullmatch(path)) for each, matched in pairs]


# --- .gitignore -------------------------------------------------------------------------------------------------------


class GitIgnore:
    """The rules of a .gitignore file, for the paths below its folder ("" or "…/")."""

    def __init__(self, folder: str, path: Path) -> None:
        """Raises UsageError."""
        from pathspec import GitIgnoreSpec

        specs = parse_lines(path, lambda line: GitIgnoreSpec.from_lines([line]))
        self._folder = folder
        patterns = [pattern for spec in specs for pattern in spec.patterns]
        self._rules = [(pattern.regex, pattern.include) for pattern in patterns if pattern.regex][::-1]

    def says(self, name: str) -> bool | None:
        """Return whether the rules ignore a file or folder ("…/"). None: no rule matches. The last match decides."""
        inside = name.removeprefix(self._folder)
        return next((ignored for rule, ignored in self._rules if matches_name(rule, inside)), None)


def matches_name(rule: re.Pattern[str], name: str) -> bool:
    """Return whether a rule matches the name itself.

    In pathspec a rule also matches the content of a matched folder. In git such a folder is already ignored, or a later
    rule includes it again. So `!a/` does not match a/b.
    """
    if rule.groupindex:  # pathspec marks the / after the folder
        return any(match.end() == len(name) for match in rule.finditer(name))
    return rule.search(name.rstrip("/")) is not None  # *, and a/**, which does not match a/ itself


def ignores(rules: tuple[GitIgnore, ...], name: str) -> bool:
    """Return whether the rules ignore a name, nearest folder first. None of its parent folders is ignored."""
    return next((said for each in rules if (said := each.says(name)) is not None), False)


# --- Both -------------------------------------------------------------------------------------------------------------


T = TypeVar("T")


def parse_lines(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """Parse each line, in the encoding of this machine's file names. Yield nothing if the file does not exist.

    Raises UsageError: the file can't be read, or `parse` rejects a line.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    for number, line in enumerate((os.fsdecode(line.removesuffix(b"\r")) for line in lines), 1):
        try:
            yield parse(line)
        except (ValueError, re.error):  # pathspec's own error is a ValueError
            raise UsageError(
                f"{path}:{number}: {line!r} is not a valid pattern", "Remove the line, or correct it."
            ) from None
