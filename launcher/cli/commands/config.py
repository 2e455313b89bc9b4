"""`launch config`: print each setting with its origin."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.cli.options import Output, OutputFormat, SpecFile
from launcher.cli.ui.documents import printed
from launcher.inputs.settings import EffectiveSettings, effective_settings


def config(spec: SpecFile = None, *, output_format: OutputFormat = Output.text) -> None:
    """Print the settings and their origin.

    Precedence: flags and CLOUDSDK_CORE_PROJECT, the spec, the launch.yaml beside it, your config.yaml, gcloud. Of
    several caps the lowest applies.
    """

    settings = effective_settings(spec)
    printed(msgspec.to_builtins(settings), output_format, page=setting_lines(settings))


def setting_lines(settings: EffectiveSettings) -> list[str]:
    """Return a line for each setting, its origin below it, and the files."""
    width = max(len(setting.name) for setting in settings.settings)
    rows = []
    for setting in settings.settings:
        rows.append(f"{setting.name:<{width}}  {setting_text(setting.value)}".rstrip())
        rows.append(f"{'':<{width}}    {setting.origin}")
    files = [f"{path}{'' if exists else ' (does not exist)'}" for path, exists in settings.files.items()]
    return [*rows, "", "settings files:", *(f"  {file}" for file in files)]


def setting_text(value: Any) -> str:
    """Return a value as text; `-` if it is not set."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
