"""Read the files that describe a project's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.inputs.image_modules import normalised

FIELD = "image.requirements"


def read(path: Path) -> str:
    """Return a file's text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{FIELD}: {path} can't be read: {what}", "The path is relative to the spec file.", field=FIELD
        ) from error


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """Return a TOML file's content. Raises UsageError."""
    import tomllib

    try:
        return tomllib.loads(read(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{FIELD}: {path} isn't TOML: {error}", hint, field=FIELD) from error


def dependency_lists(data: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, list[str]]]:
    """Return the requirements that a pyproject.toml lists, and the files with others that setuptools or
    hatch-requirements-txt read: of each extra or dependency group, and of the project itself (by an empty name)."""
    project, tool = data.get("project"), data.get("tool", {})
    project = project if isinstance(project, dict) else {}
    hook = tool.get("hatch", {}).get("metadata", {}).get("hooks", {}).get("requirements_txt", {})
    dynamic = tool.get("setuptools", {}).get("dynamic", {})
    lists = {**data.get("dependency-groups", {}), **project.get("optional-dependencies", {})}
    own = project.get("dependencies")
    if isinstance(own, list) and all(isinstance(need, str) for need in own):
        lists[""] = own
    files = {name: entry.get("file") for name, entry in dynamic.get("optional-dependencies", {}).items()}
    files |= hook.get("optional-dependencies", {})
    files[""] = dynamic.get("dependencies", {}).get("file") or hook.get("files")
    return (
        {normalised(name): needs for name, needs in lists.items()},
        {normalised(name): [names] if isinstance(names, str) else names for name, names in files.items() if names},
    )
