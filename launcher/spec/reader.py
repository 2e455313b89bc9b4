"""Read a spec file, with the flags that override it, into a `JobSpec`; on errors, report all of them at once."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launcher.errors import LaunchError, Problem, SpecError
from launcher.spec.checks import check
from launcher.spec.decoding import Decoder
from launcher.spec.models import JobSpec
from launcher.spec.nodes import Map, Node, clipped, dotted, from_plain, node_at, plain
from launcher.spec.overrides import Override, apply_overrides, parse_set
from launcher.spec.shapes import shape_of
from launcher.spec.yaml_loader import MAX_BYTES, Loaded, load
from launcher.text import either, near

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Located", "Override", "from_data", "parse_set", "read", "read_located", "read_text"]

VERSION = 1
"""The newest format of a spec that this launch reads."""


class Located(Struct, frozen=True):
    """A spec with the position of each of its values."""

    spec: JobSpec
    root: Node
    source: str

    def place(self, field: str) -> str:
        """Return `file:line` of a dotted field or the flag that set it; the file alone where nothing set it."""
        path = tuple(int(step) if step.isdecimal() else step for step in field.split("."))
        is_set = isinstance(self.root, Map) and path[0] in self.root.entries
        return node_at(self.root, path).where if is_set else self.source

    def changed(self, overrides: Sequence[Override]) -> Located:
        """Return the spec with some fields set. Raises SpecError: they are invalid, or cannot be combined."""
        return decode(Loaded(self.root, []), self.source, overrides)

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Prefix errors that are raised within with the position of their setting."""
        try:
            yield
        except LaunchError as error:
            if error.field:
                error.locate(self.place(error.field))
            raise


def read(path: Path, overrides: Sequence[Override] = ()) -> JobSpec:
    """Read a spec. Raises SpecError with all problems."""
    return read_located(path, overrides).spec


def read_located(path: Path, overrides: Sequence[Override] = ()) -> Located:
    """Read a spec with the positions of its values; its default name is the file's. Raises SpecError with all
    problems."""
    source = os.fsencode(path).decode("utf-8", "replace")
    loaded = load_text(content(path, source), source)
    if isinstance(loaded.root, Map) and "name" not in loaded.root.entries:
        name = re.sub("[^a-z0-9]+", "-", path.stem.lower()).strip("-")
        overrides = (Override("name", name, source), *overrides)
    return decode(loaded, source, overrides)


def read_text(text: bytes, source: str, overrides: Sequence[Override] = ()) -> JobSpec:
    """Decode a spec; `source` is the file name for messages. Raises SpecError with all problems."""
    return decode(load_text(text, source), source, overrides).spec


def load_text(text: bytes, source: str) -> Loaded:
    """Parse a spec; `source` is the file name for messages. Raises SpecError with all problems."""
    try:
        return load(text, lambda line: f"{source}:{line}")
    except SpecError as error:
        raise SpecError(by_line(error.problems, source)) from None


def from_data(data: Mapping[str, Any], source: str, overrides: Sequence[Override] = ()) -> Located:
    """Decode a spec from plain data, such as a parsed YAML file. Its values have `source` as their position. Raises
    SpecError with all problems."""
    return decode(Loaded(from_plain(data, source), []), source, overrides)


def decode(loaded: Loaded, source: str, overrides: Sequence[Override]) -> Located:
    """Decode the nodes of a spec, with the overrides applied. Raises SpecError with all problems."""
    root, override_problems = apply_overrides(loaded.root, overrides)
    if newer := newer_version(root, source):
        raise SpecError((newer,))
    decoder = Decoder(JobSpec)
    spec = decoder.decode(root, shape_of(JobSpec), ())
    problems = [*loaded.problems, *override_problems, *decoder.problems]
    if isinstance(spec, JobSpec):
        problems += combined(Located(spec, root, source), decoder.invalid)
        if not problems:
            return Located(spec, root, source)
    raise SpecError(by_line(problems, source))


def combined(located: Located, invalid: Sequence[tuple[str | int, ...]] = ()) -> list[Problem]:
    """Return the problems of fields that cannot be combined; `invalid` are the paths without a valid value."""
    problems = []
    for finding in check(located.spec, invalid):
        where, setting, what = node_at(located.root, finding.at).where, dotted(finding.at), finding.what
        if not where.endswith(f" {setting}"):  # `--set run.config.steps` names the setting already
            what = f"{what} {setting}" if what == "unknown setting" else f"{setting}: {what}"
        problems.append(Problem(where, what, finding.fix))
    return problems


def newer_version(root: Node, source: str) -> Problem | None:
    """Return the problem of a spec in a newer format: whatever else seems wrong in it may be right there."""
    version = plain(root.entries["version"]) if isinstance(root, Map) and "version" in root.entries else None
    if not isinstance(version, int) or version <= VERSION:
        return None
    return Problem(
        node_at(root, ("version",)).where,
        f"version {version} is not supported; this launch reads up to {VERSION}",
        "update launch",
    )


def by_line(problems: Sequence[Problem], source: str) -> tuple[Problem, ...]:
    """Sort problems by line; those of flags come first."""
    lines = {problem: problem.where.removeprefix(f"{source}:") for problem in problems}
    return tuple(sorted(lines, key=lambda problem: int(lines[problem]) if lines[problem].isdecimal() else 0))


def content(path: Path, source: str) -> bytes:
    """Return the bytes of a file, at most one more than the loader accepts. Raises SpecError."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = yaml_files(path)
            hint = f"name one of its files: {', '.join(names[:5])}" if names else "create a spec with `launch init`"
            raise SpecError((Problem(source, "is a folder, not a spec file", hint),))
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = f"the folder {clipped(str(path.parent))} does not exist"
        if path.parent.is_dir():
            files = {name.rpartition(".")[0]: name for name in yaml_files(path.parent)}
            close = [files[stem] for stem in near(path.stem, files, most=3)]
            hint = f"did you mean {either(close)}?" if close else "create a spec with `launch init`"
        raise SpecError((Problem(source, "no such file", hint),)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError((Problem(clipped(source), f"cannot be read: {reason}", "name a YAML file"),)) from None


def yaml_files(folder: Path) -> list[str]:
    """Return the names of the YAML files in a folder; none if it cannot be read."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith((".yaml", ".yml")))
    except OSError:
        return []
