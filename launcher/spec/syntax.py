"""Translate PyYAML's syntax errors: what is wrong, and what to do."""

from __future__ import annotations

from msgspec import Struct
from yaml.error import MarkedYAMLError


class Rule(Struct, frozen=True):
    """The start of a PyYAML message and its translation. `{start}` is the line where the construct opens."""

    known: str
    what: str
    fix: str
    from_start: bool = False
    """Report the line where the construct opens, not the line where PyYAML stopped."""


LIST = "the list opened with '[' in line {start} is not closed, or a comma is missing"
MAP = "the section opened with '{' in line {start} is not closed, or a comma is missing"
QUOTE = "a quote is not closed"
ESCAPE = "use single quotes, or double the backslash"
RULES = (
    Rule(
        "mapping values are not allowed",
        "unexpected ':'",
        "check the indentation, or put a value that contains ': ' in quotes",
    ),
    Rule("could not find expected ':'", "expected `key: value` or a list item", "write `key: value`", True),
    Rule(r"found character '\t'", "a tab at the start of a line or value", "indent with spaces"),
    Rule("found character", "a value cannot start with {sign}", "put the value in quotes"),
    Rule(
        "expected <block end>", "the indentation does not match the lines above", "indent the keys of a section alike"
    ),
    Rule("expected ',' or ']'", LIST, "close it with ']'"),
    Rule("expected ',' or '}'", MAP, "close it with '}'"),
    Rule("found unexpected end of stream", QUOTE, "close it", from_start=True),
    Rule("found unexpected document separator", QUOTE, "close it", from_start=True),
    Rule("found unknown escape character", "unknown escape in double quotes: a backslash before {sign}", ESCAPE),
    Rule("expected escape sequence", "an escape in double quotes is incomplete", ESCAPE),
    Rule("expected the node content", "a value is missing", "add a value, or remove the key"),
    Rule("found duplicate anchor", "unsupported anchor (&)", "remove it"),
    Rule("found undefined tag handle", "unsupported tag (!)", "remove it, or put the value in quotes"),
)


def explain(error: MarkedYAMLError) -> tuple[int, str, str]:
    """Return (line from 1, what is wrong, what to do) for a PyYAML error."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    start = error.context_mark.line + 1 if error.context_mark else line
    problem = error.problem or "unreadable"
    sign = problem.rpartition("character ")[2].partition(" that")[0]
    for rule in RULES:
        if problem.startswith(rule.known):
            place = start if rule.from_start else line
            return place, rule.what.replace("{start}", str(start)).replace("{sign}", sign), rule.fix
    return line, f"invalid YAML: {problem}", "check the line and its indentation"
