"""gcloud's own settings: environment first, then the active configuration. Read as files; gcloud need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Settings = Mapping[str, str]
"""`section/property` -> value, such as `core/project`."""

ALSO = {"core/project": ("GOOGLE_CLOUD_PROJECT",)}
"""Names that Google's libraries read where gcloud's own is not set."""


def setting(name: str, environ: Mapping[str, str]) -> str | None:
    """One property as gcloud resolves it, or None.

    `CLOUDSDK_SECTION_PROPERTY` beats the active configuration (`CLOUDSDK_ACTIVE_CONFIG_NAME`, else the file
    `active_config`, else `default`).
    """
    variable = f"CLOUDSDK_{name.replace('/', '_').upper()}"
    for candidate in (variable, *ALSO.get(name, ())):
        if environ.get(candidate):
            return environ[candidate]
    section, _, key = name.partition("/")
    return active_configuration(environ).get(f"{section}/{key}")


def default_regions(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The region that gcloud would use: Vertex's own setting beats Compute Engine's. Empty when none is set."""
    region = setting("ai/region", environ) or setting("compute/region", environ)
    return (region,) if region else ()


def active_configuration(environ: Mapping[str, str]) -> Settings:
    """The properties of the active configuration; empty when there is none."""
    folder = Path(environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
    try:
        name = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text().strip()
    except OSError:
        name = "default"
    try:
        text = (folder / "configurations" / f"config_{name}").read_text()
    except OSError:
        return {}
    return properties(text)


def properties(text: str) -> Settings:
    """The INI text of a configuration as `section/property` -> value."""
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return {f"{section}/{key}": value for section in parser.sections() for key, value in parser[section].items()}
