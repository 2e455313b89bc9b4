"""The YAML that a spec may be written in: scalars of the 1.2 core schema, and the forms that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launcher.spec.nodes import Map, plain
from launcher.spec.yaml_loader import load, resolve
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
    assert [item.where for item in root.entries["a"].items] == ["3", "5"]  # type: ignore[union-attr]  # a list has items


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
def test_accepted_yaml(text: bytes) -> None:
    assert spec(text).machine.type == "h100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "s.yaml:2: duplicate setting a (first set at s.yaml:1)"),
        ("a: &x 1\n", "s.yaml:1: unsupported anchor &x"),
        ("b: 1\na: *x\n", "s.yaml:2: unsupported alias *x"),
        ("<<: {a: 1}\n", "s.yaml:1: unsupported merge key <<"),
        ("a: !!str 1\n", "s.yaml:1: unsupported tag tag:yaml.org,2002:str"),
        ("a: !!python/name:os.system x\n", "s.yaml:1: unsupported tag tag:yaml.org,2002:python/name:os.system"),
        ("a: ! x\n", "s.yaml:1: unsupported tag !"),
        ("1: a\n", "s.yaml:1: invalid key 1: not text"),
        ("~: a\n", "s.yaml:1: invalid key ~: not text"),
        ("? [a]\n: b\n", "s.yaml:1: invalid key: a list or a section"),
        ("---\na: 1\n---\nb: 1\n", "s.yaml:3: unsupported second document (---)"),
        ("", "s.yaml:1: the file is empty"),
        ("# nothing\n", "s.yaml:1: the file is empty"),
        ("a: b: c\n", "s.yaml:1: unexpected ':'"),
        ("a:\n\tb: 1\n", "s.yaml:2: a tab at the start of a line or value | indent with spaces"),
        ("a: 1\nb: @x\n", "s.yaml:2: a value cannot start with '@'"),
        ("a: [1,\n 2\nb: 1\n", "s.yaml:3: the list opened with '[' in line 1 is not closed, or a"),
        ("a: {b: 1\nc: 1\n", "s.yaml:2: the section opened with '{' in line 1 is not closed, or a"),
        ("a: 1\nb: 'x\n", "s.yaml:2: a quote is not closed"),
        ("a:\n  b: 1\n c: 1\n", "s.yaml:3: the indentation does not match the lines above"),
        ("a: 1\nb\nc: 1\n", "s.yaml:2: expected `key: value` or a list item"),
        ('a: "\\d"\n', "s.yaml:1: unknown escape in double quotes: a backslash before 'd'"),
        ('a: "\\U99999999"\n', "s.yaml:1: invalid escape sequence"),
        ('a: "\\0"\n', "s.yaml:1: unsupported escape (NUL or a lone surrogate)"),
        ('a: "\\ud800"\n', "s.yaml:1: unsupported escape (NUL or a lone surrogate)"),
        (b"a: 1\nb: \0\n", "s.yaml:2: invalid control character '\\x00'"),
        (b"a: 1\nb: \xff\n", "s.yaml:2: invalid UTF-8 (byte 0xff)"),
        ("a: 1\n".encode("utf-16"), "s.yaml:1: invalid UTF-8 (byte 0xff)"),
    ],
)
def test_refused_yaml(text: str | bytes, message: str) -> None:
    found = [line for line in lines(text) if line.startswith(message)]
    assert found
    assert all(line.partition(" | ")[2] for line in found)


def test_a_file_too_deep_too_large_or_too_long() -> None:
    assert "20 levels deep" in lines("[" * 21 + "]" * 21)[0]
    assert "levels deep" not in " ".join(lines("[" * 20 + "]" * 20))
    assert "larger than 256 KiB" in lines(b"#" * (256 * 1024 + 1))[0]
    assert "more than 10000 values" in lines("a: [" + "1," * 10_000 + "]")[0]


def test_form_and_fields_are_complained_about_together() -> None:
    found = lines("name: a\nmachine: {type: h100, gpus: two, gpus: 3}\nimage: &i {}\noutput: *i\nfoo: 1\n")
    assert [line.partition(" | ")[0] for line in found] == [
        "s.yaml:2: duplicate setting gpus (first set at s.yaml:2)",
        "s.yaml:2: machine.gpus: 'two' is text, not a whole number",
        "s.yaml:3: unsupported anchor &i",
        "s.yaml:4: unsupported alias *i",
        "s.yaml:5: unknown setting foo",
    ]
