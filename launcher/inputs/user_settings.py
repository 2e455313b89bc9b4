"""The user's own settings file, `~/.config/launch/config.yaml` (docs/settings.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.spec.project_file import Settings, read_settings


def user_settings_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's settings: below XDG_CONFIG_HOME (on Windows APPDATA), else ~/.config.

    None if the user has no home folder. A relative XDG_CONFIG_HOME is ignored, as its specification demands: it would
    name a file in the current folder.
    """
    folder = environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    if not folder or not Path(folder).is_absolute():
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError:  # no HOME, and no user entry for this uid, as in some containers
            return None
    return Path(folder, "launch", "config.yaml")


def read_user_settings(environ: Mapping[str, str]) -> Settings:
    """Read the user's settings; without a file, all fields have their defaults. Raises SpecError with all problems."""
    path = user_settings_path(environ)
    return read_settings(path, str(path)) if path and is_there(path) else Settings()


def is_there(path: Path) -> bool:
    """Return whether a settings file exists; False if its folder can't be read, as with another user's HOME."""
    return os.path.isfile(path)  # noqa: PTH113 -- Path.is_file raises in such a folder
