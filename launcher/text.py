"""Texts that every layer writes in the same way: suggestions, lists, counts, durations, money and sizes.

Only the standard library. What only the screen needs is in `cli/ui/text.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from launch_train.common.text import listed as listed  # noqa: PLC0414 - one form of lists, on both sides
from launch_train.common.text import plural as plural  # noqa: PLC0414 - one form of counts, on both sides


def near(word: str, known: Iterable[str], cutoff: float = 0.6, most: int = 1) -> list[str]:
    """Return the known words that are most like `word`, best first. Case does not count, nor does `_` against `-`."""
    from difflib import get_close_matches  # 2 ms, and only for a mistake

    def folded(text: str) -> str:
        return text.lower().replace("_", "-")

    names = {folded(name): name for name in known}
    return [names[name] for name in get_close_matches(folded(word[:80]), names, n=most, cutoff=cutoff)]


def did_you_mean(words: Sequence[str], otherwise: str = "") -> str:
    """Return `Did you mean a or b?`, or `otherwise` if there are no words."""
    return f"Did you mean {either(words)}?" if words else otherwise


def either(words: Iterable[str]) -> str:
    """Return `a`, `a or b`, or `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def parse_duration(text: str) -> int:
    """Return the seconds of `90s`, `30m`, `6h` or `2d`, the format of `spec.kinds.Duration`."""
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[text[-1]]


def exact_duration(seconds: float) -> str:
    """Return a duration in the largest unit that divides it: `6 h`, `90 min`, `45 s`."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def rough_duration(seconds: float) -> str:
    """Return a duration in one unit, rounded: `45 s`, `12 min`, `3 h`, `26 d`."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} d"


def usd_text(usd: float, approx: bool = False) -> str:
    """Return `$24.00`, or `≈$24.00`."""
    return f"{'≈' if approx else ''}${usd:,.2f}"


def hourly_price(usd: float | None, ceiling: float | None = None, *, approx: bool = False, bound: bool = False) -> str:
    """Return `$2.00/h`, `≈$12.87/h` for a derived price, `≤$28.77/h` for an upper bound, or `price unknown`."""
    known = ceiling if usd is None else usd
    if known is None:
        return "price unknown"
    return f"≤{usd_text(known)}/h" if bound or usd is None else f"{usd_text(known, approx)}/h"


def size_text(count: int) -> str:
    """Return a number of bytes: `812 B`, `13 kB`, `4.2 MB`, `1.3 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 10 * unit else f"{count / unit:,.0f} {name}"
    return f"{count} B"


def relative(folder: str) -> str:
    """Return the folder relative to the current one if it is inside it."""
    if folder.startswith("gs://"):
        return folder
    try:
        return str(Path(folder).relative_to(Path.cwd()))
    except ValueError:
        return folder
