"""Whatever the bytes: a JobSpec or a SpecError, never another exception."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.errors import Problem, SpecError
from launcher.spec import yaml_loader
from launcher.spec.models import JobSpec
from launcher.spec.nodes import plain
from launcher.spec.reader import Override, parse_set, read_text
from launcher.spec.wording import every_path
from tests.spec.test_reader import FULL

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LONG = settings(
    max_examples=int(os.environ.get("LAUNCH_FUZZ_EXAMPLES", "4000")),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

PATHS = every_path(JobSpec)
KEYS = st.sampled_from([path.rpartition(".")[2] for path in PATHS]) | st.text(max_size=8)
WORDS = st.sampled_from(
    [
        *("", "a", "~", "1e-4", "017", ".nan", "-.inf", "no", "true", "1:30", "us-central1", "us-central1-a", "spot"),
        *("any", "reservation:projects/p/zones/z/reservations/r", "hf_" + "a" * 30, "gs://b", "6h", "9" * 400, "\\x00"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | WORDS
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
SNIPPETS = st.sampled_from(
    [
        *(
            "\n",
            " ",
            "  ",
            "\t",
            "\r",
            ": ",
            ":",
            "- ",
            "-",
            "[",
            "]",
            "{",
            "}",
            ",",
            "'",
            '"',
            "#",
            "&a ",
            "*a",
            "!t ",
        ),
        *("|\n", ">\n", "? ", "<<: *a", "---\n", "...\n", "%YAML 1.2\n", "\\", "\\U99999999", "\0", "\ufeff", "\x85"),
        *("~", "1e999", ".nan", "name", "machine", "gpus", "env", "@", "`", "%", "=", "\u2028", "a" * 1100),
    ]
)


def survives(text: bytes, *overrides: Override) -> None:
    """Reading it gives a JobSpec, or a SpecError whose problems can be printed."""
    try:
        read_text(text, "s.yaml", overrides)
    except SpecError as error:
        assert_printable(error.problems)


def assert_printable(found: Sequence[Problem]) -> None:
    assert found
    for problem in found:
        assert problem.where.startswith(("s.yaml", "--"))
        assert problem.what
        assert len(str(problem).encode()) < 2_000


def loose(tree: Any) -> str:
    """A tree as YAML, its texts mostly unquoted, which may well break it."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {loose(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(loose, tree)) + "]"
    return "~" if tree is None else str(tree).lower() if isinstance(tree, bool) else str(tree)


def of_bytes(data: bytes) -> None:
    survives(data)


def of_snippets(pieces: list[str]) -> None:
    survives("".join(pieces).encode())


def of_parsers(pieces: list[str]) -> None:
    """Both parsers give the same, whichever PyYAML has."""
    data = f"name: a\n{''.join(pieces)}\nlast: b\n".encode()
    assert outcome_with(data, libyaml=True) == outcome_with(data, libyaml=False)


def outcome_with(data: bytes, *, libyaml: bool) -> Any:
    """Return the plain data and the problems, or the error's text."""
    with patch.object(yaml_loader, "__with_libyaml__", libyaml):
        try:
            loaded = yaml_loader.load(data, str)
        except SpecError as error:
            return str(error)
    return plain(loaded.root), loaded.problems


def of_trees(tree: Any) -> None:
    survives(json.dumps(tree).encode())
    survives(loose(tree).encode("utf-8", "replace"))


def of_fields(path: str, value: Any) -> None:
    """A good spec, one of its fields set to anything."""
    survives(FULL.encode(), Override(path, value, "--flag"))


def of_sets(path: str, text: str) -> None:
    try:
        override = parse_set(f"{path}={text}")
    except SpecError:
        return
    survives(FULL.encode(), override)


def of_mutations(at: int, length: int, piece: str) -> None:
    """A good spec, some of it replaced."""
    at %= len(FULL)
    survives((FULL[:at] + piece + FULL[at + length :]).encode())


PIECES = st.lists(SNIPPETS, max_size=30)
MUTATIONS = (st.integers(0, 2_000), st.integers(0, 40), SNIPPETS)
SETTINGS = (st.sampled_from(PATHS), TREES)

test_bytes = QUICK(given(st.binary(max_size=60))(of_bytes))
test_snippets = QUICK(example(["%YAML 1.", "9" * 5_000, "\n--- a"])(given(PIECES)(of_snippets)))
test_libyaml_reads_what_the_python_parser_reads = QUICK(
    example(["k:\t1"])(example(["k: [a?b ? c?, {d?: e?}]"])(given(PIECES)(of_parsers)))
)
test_trees = QUICK(given(TREES)(of_trees))
test_fields = QUICK(given(*SETTINGS)(of_fields))
test_sets = QUICK(given(st.sampled_from(PATHS), WORDS | st.text(max_size=20))(of_sets))
test_mutations = QUICK(given(*MUTATIONS)(of_mutations))

test_many_bytes = pytest.mark.fuzz(LONG(given(st.binary(max_size=300))(of_bytes)))
test_many_snippets = pytest.mark.fuzz(LONG(given(PIECES)(of_snippets)))
test_many_trees = pytest.mark.fuzz(LONG(given(TREES)(of_trees)))
test_many_fields = pytest.mark.fuzz(LONG(given(*SETTINGS)(of_fields)))
test_many_mutations = pytest.mark.fuzz(LONG(given(*MUTATIONS)(of_mutations)))
