"""The YAML that a spec may be written in: scalars of the 1.2 core schema, and the forms that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launcher.spec.loader import load
from launcher.spec.nodes import Map, plain
from launcher.spec.scalars import resolve
from tests.spec.helpers import SMALL, lines, spec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("+12", 12),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("-0x1F", "-0x1F"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("~", None),
        ("Null", None),
        ("", None),
        ("-.INF", -math.inf),
        ("inf", "inf"),
        ("nan", "nan"),
        (".", "."),
        ("-", "-"),
        ("1e", "1e"),
        ("=", "="),
        ("9" * 5000, math.inf),
        ("-" + "9" * 5000, -math.inf),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    nan = resolve(".nan")
    assert isinstance(nan, float)
    assert math.isnan(nan)


def test_quoted_scalars_are_text() -> None:
    assert plain(load(b"a: '1'\nb: \"no\"\nc: |\n  1\nd: >-\n  2\n", str).root) == {
        "a": "1",
        "b": "no",
        "c": "1\n",
        "d": "2",
    }


def test_a_section_stands_where_its_name_does() -> None:
    root = load(b"# comment\na:\n  - 1\n\n  - 2\n", str).root
    assert isinstance(root, Map)
    assert root.entries["a"].where == "2"
    assert [item.where for item in root.entries["a"].items] == ["3", "5"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbf" + SMALL.encode(),
        SMALL.replace("\n", "\r\n").encode(),
        b"%YAML 1.2\n---\n" + SMALL.encode() + b"...\n",
        b"# only a comment\n\n" + SMALL.encode(),
        b'{"name": "a", "machine": {"type": "h100"}}',
    ],
)
def test_forms_that_are_taken(text: bytes) -> None:
    assert spec(text).machine.type == "h100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "s.yaml:2: `a` is given twice (first: s.yaml:1) | keep one of the two"),
        ("a: &x 1\n", "s.yaml:1: an anchor (&x) | remove it: a spec has no anchors"),
        ("b: 1\na: *x\n", "s.yaml:2: an alias (*x) | write the value again: a spec has no anchors"),
        ("<<: {a: 1}\n", "s.yaml:1: a merge key (<<) | write the keys out: a spec has no merging"),
        ("a: !!str 1\n", "s.yaml:1: a tag (tag:yaml.org,2002:str) | remove it: values have no tags in a spec"),
        ("a: !!python/name:os.system x\n", "s.yaml:1: a tag (tag:yaml.org,2002:python/name:os.system) | "),
        ("a: ! x\n", "s.yaml:1: a tag (!) | remove it: values have no tags in a spec"),
        ("1: a\n", 's.yaml:1: the key 1 is not text | put it in quotes: "1"'),
        ("~: a\n", 's.yaml:1: the key ~ is not text | put it in quotes: "~"'),
        ("? [a]\n: b\n", "s.yaml:1: a key that is itself a list or a map | keys are text"),
        ("---\na: 1\n---\nb: 1\n", "s.yaml:3: a second document (---) | one file holds one spec"),
        ("", "s.yaml:1: the file is empty | `launch init` writes a spec to start from"),
        ("# nothing\n", "s.yaml:1: the file is empty | `launch init` writes a spec to start from"),
        ("a: b: c\n", "s.yaml:1: a ':' where no key can start | put a text that has ': ' in it in quotes, or check"),
        ("a:\n\tb: 1\n", "s.yaml:2: a tab at the start of a line or value | indent with spaces"),
        ("a: 1\nb: @x\n", "s.yaml:2: a value can't start with '@' | put the value in quotes"),
        ("a: [1,\n 2\nb: 1\n", "s.yaml:3: the list opened with '[' in line 1 isn't closed, or a comma is missing | "),
        ("a: {b: 1\nc: 1\n", "s.yaml:2: the map opened with a curly brace in line 1 isn't closed, or a comma is missi"),
        ("a: 1\nb: 'x\n", "s.yaml:2: a quote that is never closed | close it"),
        ("a:\n  b: 1\n c: 1\n", "s.yaml:3: the indentation doesn't fit the lines above | give one section's keys the"),
        ("a: 1\nb\nc: 1\n", "s.yaml:2: neither `key: value` nor an item of a list | write `key: value`"),
        ('a: "\\d"\n', "s.yaml:1: a backslash before 'd' means nothing in double quotes | use single quotes, or write"),
        ('a: "\\U99999999"\n', "s.yaml:1: an escape that is no character | use single quotes, or remove it"),
        ('a: "\\0"\n', "s.yaml:1: an escape for NUL or half a character | remove it: it can't be sent"),
        ('a: "\\ud800"\n', "s.yaml:1: an escape for NUL or half a character | remove it: it can't be sent"),
        (b"a: 1\nb: \0\n", "s.yaml:2: a control character ('\\x00') | remove it"),
        (b"a: 1\nb: \xff\n", "s.yaml:2: not UTF-8 (byte 0xff) | save the file as UTF-8"),
        ("a: 1\n".encode("utf-16"), "s.yaml:1: not UTF-8 (byte 0xff) | save the file as UTF-8"),
    ],
)
def test_forms_that_are_refused(text: str | bytes, message: str) -> None:
    assert any(line.startswith(message) for line in lines(text)), lines(text)


def test_a_file_too_deep_too_large_or_too_long() -> None:
    assert "more than 20 levels deep" in lines("[" * 21 + "]" * 21)[0]
    assert "levels deep" not in " ".join(lines("[" * 20 + "]" * 20))
    assert "larger than 256 KiB" in lines(b"#" * (256 * 1024 + 1))[0]
    assert "more than 10000 values" in lines("a: [" + "1," * 10_000 + "]")[0]


def test_form_and_fields_are_complained_about_together() -> None:
    found = lines("name: a\nmachine: {type: h100, gpus: two, gpus: 3}\nimage: &i {}\noutput: *i\nfoo: 1\n")
    assert [line.partition(" | ")[0] for line in found] == [
        "s.yaml:2: `gpus` is given twice (first: s.yaml:2)",
        "s.yaml:2: machine.gpus: 'two' is text, not a whole number",
        "s.yaml:3: an anchor (&i)",
        "s.yaml:4: an alias (*i)",
        "s.yaml:5: foo: no such field",
    ]
