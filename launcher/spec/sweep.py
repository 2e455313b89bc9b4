"""The values of a sweep: parse `--set SETTING=VALUES`, and expand them to points. Pure, and the same for each call."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from launcher.errors import UsageError
from launcher.spec.overrides import Override, parse_set

NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,62}")
"""A sweep's name."""
MOST_POINTS: Final = 1000
DRAWS: Final = 50
"""Draws for each point of a random sweep, until enough points differ."""
DIGITS: Final = 4
"""Significant digits of a drawn number: enough for a search, and short in commands and tables."""
FUNCTION: Final = re.compile(r"\s*(?P<name>[a-z_]+)\((?P<arguments>.*)\)\s*", re.DOTALL)
KINDS: Final = ("log", "uniform", "int")
EXAMPLE: Final = "--set run.config.optimizer.lr=1e-4,3e-4"

Point = tuple[Override, ...]
"""A value for each swept setting."""


class Axis(NamedTuple):
    """A swept setting: its values, or how one is drawn."""

    path: str
    text: str
    """The values as they were typed."""
    choices: tuple[Override, ...] = ()
    draw: Callable[[float], object] | None = None
    """Return the value for a number from 0 to 1; None: draw one of the choices."""

    def value(self, share: float) -> Override:
        """Return the value for a number from 0 (included) to 1."""
        if self.draw is None:
            return self.choices[int(share * len(self.choices))]
        return Override(self.path, self.draw(share), f"--set {self.path}")


def parse_axes(texts: Sequence[str]) -> tuple[list[str], tuple[Axis, ...]]:
    """Return the `--set` texts with one value, which hold for all points, and the axes of those with several.

    Raises:
        UsageError: a range is invalid, a value is missing or listed twice, or a setting is swept twice.
        SpecError: a text is not SETTING=VALUES, or a value is not valid YAML.
    """
    single, axes = [], []
    for text in texts:
        path, _, values = text.partition("=")
        axis = distribution(path.strip(), values) or choices(path.strip(), values)
        if axis:
            axes.append(axis)
        else:
            parse_set(text)
            single.append(text)
    paths = [axis.path for axis in axes] + [text.partition("=")[0].strip() for text in single]
    if twice := next((axis.path for axis in axes if paths.count(axis.path) > 1), None):
        raise UsageError(f"--set {twice} is given twice", f"List all values in one: --set {twice}=VALUE,VALUE")
    return single, tuple(axes)


def distribution(path: str, text: str) -> Axis | None:
    """Return the axis of `log(1e-5,1e-2)`, `uniform(0,0.3)` or `int(1,8)`; None: it is another value. Raises
    UsageError: a bound is missing or invalid."""
    match = FUNCTION.fullmatch(text)
    if not match or match["name"] not in KINDS:
        return None
    kind = match["name"]
    low, high = bounds(path, kind, match["arguments"])
    drawn: dict[str, Callable[[float], object]] = {
        "log": lambda share: rounded(math.exp(math.log(low) + share * math.log(high / low))),
        "uniform": lambda share: rounded(low + share * (high - low)),
        "int": lambda share: int(low) + int(share * (int(high) - int(low) + 1)),
    }
    return Axis(path, text.strip(), draw=drawn[kind])


def bounds(path: str, kind: str, text: str) -> tuple[float, float]:
    """Return the two bounds of a range. Raises UsageError."""
    example = {"log": "log(1e-5,1e-2)", "uniform": "uniform(0,0.3)", "int": "int(1,8)"}[kind]
    where, fix = f"--set {path}={kind}({text})", f"For example: --set '{path}={example}'"
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"{where}: expected two numbers", fix) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"{where}: the first number must be below the second", fix)
    if kind == "log" and low <= 0:
        raise UsageError(f"{where}: a logarithmic range must begin above 0", fix)
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"{where}: expected whole numbers", fix)
    return low, high


def rounded(value: float) -> float:
    """Return a number with DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def choices(path: str, text: str) -> Axis | None:
    """Return the axis of `1e-4,3e-4`; None: there is one value. Raises UsageError: a value is listed twice; SpecError:
    a value is missing or not valid YAML."""
    parts = split(text)
    if len(parts) < 2:
        return None
    values = tuple(parse_set(f"{path}={part}") for part in parts)
    keys = [key(value) for value in values]
    if twice := next((part for part, value_key in zip(parts, keys, strict=True) if keys.count(value_key) > 1), None):
        raise UsageError(f"--set {path}: {twice.strip()} is listed twice", "Remove one of them.")
    return Axis(path, text.strip(), values)


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1].strip():
            quote = character
        elif character == "," and not depth:
            parts.append("")
            continue
        else:
            depth += (character in "[{(") - (character in "]})")
        parts[-1] += character
    return parts


def key(value: Override) -> str:
    """Return a text that is the same for equal values of a setting."""
    return json.dumps(value.value, sort_keys=True, default=str)


def points(axes: Sequence[Axis], count: int | None, seed: int) -> tuple[Point, ...]:
    """Return the points of a sweep: the grid, or with `count` at most so many random ones, all different.

    A random point depends on the seed and its number alone, so a larger `count` adds points to the same ones.

    Raises UsageError: nothing is swept, a grid has a range, or there are too many points.
    """
    if not axes:
        raise UsageError("no setting has several values, so there is nothing to sweep", f"For example: {EXAMPLE}")
    total = count if count is not None else math.prod(len(axis.choices) or 1 for axis in axes)
    if count is None and (drawn := next((axis for axis in axes if axis.draw), None)):
        raise UsageError(
            f"--set {drawn.path}={drawn.text} is a range, which only a random sweep draws from",
            "Add the number of points: --random 20; or list values.",
        )
    if total > MOST_POINTS:
        raise UsageError(
            f"the sweep has {total:,} points; at most {MOST_POINTS:,} are possible",
            "List fewer values, or draw some of the points: --random 100",
        )
    if count is None:
        return tuple(product(*(axis.choices for axis in axes)))
    return tuple(random_points(axes, count, seed))


def random_points(axes: Sequence[Axis], count: int, seed: int) -> Iterator[Point]:
    """Yield `count` different points, or fewer if the values allow no more."""
    seen: set[tuple[str, ...]] = set()
    for draw in range(count * DRAWS):
        point = tuple(axis.value(share(f"{seed} {draw} {axis.path}")) for axis in axes)
        keys = tuple(map(key, point))
        if keys not in seen:
            seen.add(keys)
            yield point
            if len(seen) == count:
                return


def share(text: str) -> float:
    """Return a number from 0 (included) to 1 that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
