"""Texts that several modules write in the same way: suggestions, counts, durations and large numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean steps?` with the known word that is most like `word`, or an empty text."""
    from difflib import get_close_matches  # 2 ms, and only for a mistake

    close = get_close_matches(word[:80], list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def nanoseconds_text(time: int) -> str:
    """Format Unix nanoseconds as RFC 3339; those before 1970 as its begin."""
    seconds, rest = divmod(max(time, 0), 10**9)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2,000 ranks`, `2 processes`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ss") else "s")


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names of a list: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def si(value: float | None) -> str:
    """Return three digits and a letter: `812`, `12.3k`, `1.21M`; `?` for None."""
    if value is None:
        return "?"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit * 0.9995:
            scaled = value / limit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


def elapsed(seconds: float) -> str:
    """Return a duration in two units: `42 s`, `3 min 20 s`, `5 h 10 min` or `4 d 7 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: `0:41`, `12:05`, `3:00:00`."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def format_duration(seconds: float) -> str:
    """Return a duration in one unit: `45 s`, `4.2 min`, `8 h`, `12 days`."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def one_line(error: object, limit: int = 300) -> str:
    """Return an error's message in one line of at most `limit` characters, or its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
