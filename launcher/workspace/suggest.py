"""Files that somebody may have meant."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence


def near_names(name: str, names: Sequence[str]) -> str:
    """The files that may have been meant: of the same name elsewhere, or of a name like it."""
    from difflib import get_close_matches

    base = posixpath.basename(name)
    scripts = [one for one in names if one.endswith(".py")]
    same = [one for one in scripts if posixpath.basename(one) == base]
    return " or ".join(same[:3] or get_close_matches(name, scripts, n=3))
