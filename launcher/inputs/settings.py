"""The settings that a launch would use, each with its origin (docs/settings.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from launcher.inputs import gcloud_config
from launcher.inputs.gather import (
    AppliedSettings,
    built_in,
    find_project,
    folder_of,
    refuse_python,
    with_defaults,
)
from launcher.plan.names import default_output, default_repository
from launcher.spec.models import JobSpec
from launcher.spec.project_file import NAME, Settings, user_settings_path
from launcher.spec.reader import Located, read_located

NOT_SET: Final = "not set"
BUILT_IN: Final = "default"
CAPS: Final = ("max_usd_per_run", "regions", "machines", "required_labels", "owner_label")
"""Caps in the section `project`, in the order of its documentation."""


class Setting(Struct, frozen=True, kw_only=True):
    """A setting with its value (None: not set) and its origin: FILE:LINE, a variable, gcloud, or default."""

    name: str
    value: Any
    origin: str


class EffectiveSettings(Struct, frozen=True, kw_only=True):
    """All settings, and the settings files: path -> whether it exists."""

    settings: tuple[Setting, ...]
    files: dict[str, bool]


def effective_settings(path: Path | None) -> EffectiveSettings:
    """Return the settings for a spec, or those that apply without a spec file.

    Raises SpecError: the spec or a settings file is invalid.
    """
    refuse_python(path)
    beside = folder_of(path) if path else None
    read = read_located(path or built_in("vertex", training=True))
    located, settings = with_defaults(read, "vertex", path, beside)
    user = user_settings_path(os.environ)
    files = [*([path.parent / NAME] if path and beside else []), *([user] if user else [])]
    return EffectiveSettings(
        settings=tuple(all_settings(located, settings)),
        files={str(file): os.path.isfile(file) for file in files},  # noqa: PTH113 -- Path.is_file may raise
    )


def all_settings(located: Located, settings: AppliedSettings) -> Iterator[Setting]:
    spec = located.spec
    project = find_project(os.environ, settings.files)
    yield Setting(
        name="project", value=project.value if project else None, origin=project.where if project else NOT_SET
    )
    yield region_setting(located)
    repository = default_repository(project.value) if project else None
    yield field(located, "image.repository", spec.image.repository, repository)
    yield field(located, "output", spec.output, default_output(project.value) if project else None)
    for key, value in spec.labels.items():
        yield Setting(name=f"labels.{key}", value=value, origin=located.place(f"labels.{key}"))
    yield field(located, "limits.usd", spec.limits.usd, None)
    for name in CAPS:
        yield from caps(name, settings.files)


def field(located: Located, name: str, value: Any, default: str | None) -> Setting:
    if value is not None:
        return Setting(name=name, value=value, origin=located.place(name))
    return Setting(name=name, value=default, origin=BUILT_IN if default else NOT_SET)


def region_setting(located: Located) -> Setting:
    """Return the regions: the spec's, those of its zones, or gcloud's."""
    spec: JobSpec = located.spec
    if spec.regions is not None or spec.zones:
        name = "regions" if spec.regions is not None else "zones"
        return Setting(name=name, value=spec.regions or spec.zones, origin=located.place(name))
    if of_gcloud := gcloud_config.default_regions(os.environ):
        return Setting(name="regions", value=of_gcloud, origin="gcloud")
    return Setting(name="regions", value=None, origin=NOT_SET)


def caps(name: str, files: tuple[Settings, ...]) -> Iterator[Setting]:
    """Yield the values of a cap that take effect: the lowest amount, the first file's owner label, and all lists, since
    a plan must satisfy each of them."""
    settings = [
        Setting(name=f"project.{name}", value=value, origin=file.place(name))
        for file in files
        if (value := getattr(file.project, name))
    ]
    if name == "max_usd_per_run":
        settings = sorted(settings, key=lambda setting: float(setting.value))[:1]
    yield from settings[:1] if name == "owner_label" else settings
