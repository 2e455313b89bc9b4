"""Reading a spec in a test: the result, or the problems as lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.errors import Problem, SpecError
from launcher.spec.models import JobSpec
from launcher.spec.reader import Override, parse_set, read_text

SMALL = "name: a\nmachine: {type: h100}\n"


def spec(text: str | bytes, *sets: str | Override) -> JobSpec:
    """The spec in `text`, with each of `sets` (as after --set, or an Override) on top."""
    overrides = [parse_set(one) if isinstance(one, str) else one for one in sets]
    return read_text(text.encode() if isinstance(text, str) else text, "s.yaml", overrides)


def problems(text: str | bytes, *sets: str | Override) -> tuple[Problem, ...]:
    """What is wrong with it."""
    with pytest.raises(SpecError) as caught:
        spec(text, *sets)
    assert caught.value.exit_code == 2
    return caught.value.problems


def lines(text: str | bytes, *sets: str | Override) -> list[str]:
    """What is wrong with it, each as `where: what | fix`."""
    return [f"{one.where}: {one.what} | {one.fix}" for one in problems(text, *sets)]


def whats(found: Sequence[Problem]) -> list[str]:
    return [one.what for one in found]
