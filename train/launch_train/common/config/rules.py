"""Validation rules for settings: a test with its description, and a walk that reports all problems."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from launch_train.common.text import did_you_mean

Path = tuple[str | int, ...]
Problem = tuple[Path, str, str]
"""Path of keys, what is wrong, and how to fix it."""


class Rule(NamedTuple):
    """A rule for a value: a test, and its description."""

    holds: Callable[[Any], bool]
    description: str
    words: tuple[str, ...] = ()
    """The words among the values."""


def whole(low: int, high: int) -> Rule:
    return Rule(lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float, *, above: bool = False) -> Rule:
    def holds(value: Any) -> bool:
        # A nan fails every comparison.
        return type(value) in (int, float) and (low < value if above else low <= value) and bool(value <= high)

    return Rule(holds, f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}")


def one_of(*values: Any) -> Rule:
    def holds(value: Any) -> bool:
        return any(value == known and type(value) is type(known) for known in values)

    description = "one of " + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    return Rule(holds, description, tuple(v for v in values if isinstance(v, str)))


def either(first: Rule, second: Rule) -> Rule:
    description = f"{first.description}, or {second.description}"
    return Rule(lambda v: first.holds(v) or second.holds(v), description, first.words + second.words)


FLAG: Final = one_of(True, False)

# --- Names and paths --------------------------------------------------------------------------------------------------

HUGGING_FACE: Final = r"^hf:[\w.-]+(/[\w.-]+)?$"
RUN_ID: Final = r"^[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?$"
"""A run's ID, as launch makes it. It must be told from a local path, so one that --run-id set needs its folder."""

_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_DATASET = r"^hf:[\w.-]+/[\w.-]+(@[\w.-]+)?(/.+)?$"
_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]*:/"
_BUCKET = r"^gs://[a-z0-9][\w.-]*[a-z0-9](/|$)"


def is_code(name: object) -> bool:
    """Return whether a name is a user function, my_pkg.model:build."""
    return isinstance(name, str) and bool(re.match(_CODE, name)) and not re.match(HUGGING_FACE, name)


def is_foreign(name: object) -> bool:
    """Return whether a model's name is one of transformers', or a user function."""
    return isinstance(name, str) and bool(re.match(HUGGING_FACE, name) or re.match(_CODE, name))


def is_path(value: object) -> bool:
    """Return whether a value is a path, a gs:// URL or a data set of the Hugging Face hub."""
    if not isinstance(value, str) or not value.strip():
        return False
    if value.startswith("hf:"):
        return bool(re.match(_DATASET, value))
    return not re.match(_SCHEME, value) or bool(re.match(_BUCKET, value))


# --- Validation -------------------------------------------------------------------------------------------------------


def check(config: Mapping[str, Any], fields: Mapping[str, Any], path: Path) -> list[Problem]:
    """Return unknown keys and invalid values of one mapping, and of the mappings in it."""
    invalid: list[Problem] = []
    for key, value in config.items():
        where = (*path, key)
        rule = fields.get(key, _UNKNOWN)
        if rule is _UNKNOWN:
            invalid.append((where, "unknown setting", suggestion(str(key), fields)))
        elif isinstance(rule, Rule) and not rule.holds(value):
            close = did_you_mean(value, rule.words) if isinstance(value, str) else ""
            invalid.append((where, f"invalid value {shown(value)}", close or f"must be {rule.description}"))
        elif isinstance(rule, dict) and not isinstance(value, Mapping):
            invalid.append((where, f"{shown(value)} is not a mapping", f"its keys are {', '.join(rule)}"))
        elif isinstance(rule, dict):
            invalid += check(value, rule, where)
    return invalid


_UNKNOWN: Final = object()


def suggestion(key: str, fields: Mapping[str, Any]) -> str:
    return did_you_mean(key, fields) or f"available: {', '.join(fields)}"


def shown(value: object) -> str:
    """Return a value for an error: shortened, and quoted, so that '3' is not taken for 3."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes out (sys.get_int_max_str_digits)
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
