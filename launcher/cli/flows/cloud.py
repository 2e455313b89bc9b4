"""The cloud that a command works with; its messages are printed to stderr."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path

from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.inputs.gather import project
from launcher.inputs.price_table import cache_folder
from launcher.runs.cloud import CloudContext, open_cloud
from launcher.spec.reader import read


def of_project(name: str) -> CloudContext:
    """Return the context of a project; endpoints and credentials come from the environment."""
    gc.enable()  # the process may run for days from here on
    return open_cloud(name, say)


def here() -> CloudContext:
    """Return the context of gcloud's project. Raises UsageError: none is set."""
    return of_project(project("vertex", os.environ))


def say_not_searched(error: LaunchError, *, always: bool = False) -> None:
    """Print why the cloud was not searched, unless a command has printed the same in the last 24 hours and the cloud
    has not answered since. `always`: even then."""
    fix = f" ({error.hint.splitlines()[0]})" if error.hint else ""
    text = f"the cloud was not searched: {error.problem.splitlines()[0]}{fix}"
    path = not_searched()
    with suppress(OSError, ValueError):
        if not always and path.read_text(encoding="utf-8") == text and time.time() - path.stat().st_mtime < 86400:
            return
    say(text)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def not_searched() -> Path:
    """Return the file with the last reason why the cloud was not searched; it is removed when the cloud answers."""
    folder = cache_folder(os.environ)
    return folder.with_name("not-searched") if folder else Path(os.devnull)


def run_name_of(text: str) -> str:
    """Return the name of a spec file's runs; any other text as it is. Raises SpecError."""
    return read(Path(text)).name if is_spec_file(text) else text


def is_spec_file(text: str) -> bool:
    """Return whether a text is the path of a spec file."""
    return text.endswith((".yaml", ".yml")) and os.path.isfile(text)  # noqa: PTH113 -- Path.is_file raises on long texts
