"""Data as YAML text: specs, requests and results."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./@-]*[A-Za-z0-9_/]")
NOT_PLAIN: Final = frozenset({"yes", "no", "on", "off", "true", "false", "null"})


class Dumper(yaml.SafeDumper):
    """Writes no aliases, which launch's reader refuses, and quotes each string that is not unambiguous."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, value: str) -> yaml.ScalarNode:
        """Return a script as a block, a word as it is, and any other string in double quotes."""
        style = "|" if value.startswith("#!") and value.isascii() else '"'
        if PLAIN.fullmatch(value) and value.lower() not in NOT_PLAIN:
            style = ""
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style or None)


Dumper.add_representer(str, Dumper.represent_text)


def as_yaml(data: Any) -> str:
    """Return YAML that every loader reads as the same data: gcloud's reads plain `n`, `y` and `1e3` as booleans and a
    float."""
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, width=10**9)).rstrip()
