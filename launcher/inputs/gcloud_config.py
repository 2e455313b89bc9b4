"""Read gcloud's settings: environment variables first, then the active configuration's files. gcloud is not needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from launch_train.common.loopback import is_plain_loopback

Settings = Mapping[str, str]
"""`section/property` -> value, such as `core/project`."""

ALSO = {"core/project": ("GOOGLE_CLOUD_PROJECT",)}
"""Fallback variables, which Google's own libraries read."""


def setting(name: str, environ: Mapping[str, str]) -> str | None:
    """Return one property as gcloud resolves it, or None.

    `CLOUDSDK_SECTION_PROPERTY` takes precedence over the active configuration (`CLOUDSDK_ACTIVE_CONFIG_NAME`, else the
    file `active_config`, else `default`). Values with unprintable characters are ignored.
    """
    if value := of_environment(name, environ):
        return value
    for candidate in ALSO.get(name, ()):
        if (value := environ.get(candidate)) and value.isprintable():
            return value
    return active_configuration(environ).get(name)


def of_environment(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the value of gcloud's own variable for a property, or None."""
    value = environ.get(f"CLOUDSDK_{name.replace('/', '_').upper()}")
    return value if value and value.isprintable() else None


def account(environ: Mapping[str, str]) -> str:
    """Return gcloud's account: the impersonated one, else the logged-in one. Empty if there is none."""
    return setting("auth/impersonate_service_account", environ) or setting("core/account", environ) or ""


def person(environ: Mapping[str, str]) -> str:
    """Return the account that is logged in to gcloud, also while it impersonates another. Empty if there is none."""
    return setting("core/account", environ) or ""


def default_regions(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return gcloud's default region, Vertex AI's before Compute Engine's. Empty if neither is set."""
    region = setting("ai/region", environ) or setting("compute/region", environ)
    return (region,) if region else ()


def is_here(api: str, environ: Mapping[str, str]) -> bool:
    """Return whether gcloud's endpoint variable of an API, such as AIPLATFORM, names a loopback server without TLS."""
    return is_plain_loopback(environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}", ""))


def active_configuration(environ: Mapping[str, str]) -> Settings:
    """Return the properties of the active configuration. Empty if there is none."""
    folder = config_folder(environ)
    if folder is None:
        return {}
    name = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or text_of(folder / "active_config").strip() or "default"
    return ini_properties(text_of(folder / "configurations" / f"config_{name}"))


def config_folder(environ: Mapping[str, str]) -> Path | None:
    """Return gcloud's configuration folder (as google-auth's _cloud_sdk.get_config_path does).

    None if the user has no home folder.
    """
    if named := environ.get("CLOUDSDK_CONFIG"):
        return Path(named)
    if sys.platform == "win32":
        return Path(environ["APPDATA"], "gcloud") if environ.get("APPDATA") else None
    try:
        return Path.home() / ".config" / "gcloud"
    except RuntimeError:  # no HOME, and no user entry for this uid, as in some containers
        return None


def text_of(path: Path) -> str:
    """Return a file's text, or an empty string if it can't be read.

    A byte order mark and invalid UTF-8 are tolerated.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""


@cache
def ini_properties(text: str) -> Settings:
    """Parse the INI text of a configuration to `section/property` -> value."""
    if not text:  # gcloud isn't set up here
        return {}
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    items = ((f"{section}/{key}", value) for section in parser.sections() for key, value in parser[section].items())
    return {name: value for name, value in items if value.isprintable()}
