"""PyYAML's complaints in plain words: what is wrong, and what to do."""

from __future__ import annotations

from typing import NamedTuple

from yaml.error import MarkedYAMLError


class Rule(NamedTuple):
    """How one of PyYAML's messages begins, and what to say instead. `{start}`: the line where it opened."""

    known: str
    what: str
    fix: str
    from_start: bool = False
    """The place to look at is where it opened, not where PyYAML gave up."""


LIST = "the list opened with '[' in line {start} isn't closed, or a comma is missing"
MAP = "the map opened with a curly brace in line {start} isn't closed, or a comma is missing"
QUOTE = "a quote that is never closed"
ESCAPE = "use single quotes, or write the backslash twice"
RULES = (
    Rule(
        "mapping values are not allowed",
        "a ':' where no key can start",
        "put a text that has ': ' in it in quotes, or check the indentation",
    ),
    Rule("could not find expected ':'", "neither `key: value` nor an item of a list", "write `key: value`", True),
    Rule(r"found character '\t'", "a tab at the start of a line or value", "indent with spaces"),
    Rule("found character", "a value can't start with {sign}", "put the value in quotes"),
    Rule("expected <block end>", "the indentation doesn't fit the lines above", "give one section's keys the same one"),
    Rule("expected ',' or ']'", LIST, "close it with ']'"),
    Rule("expected ',' or '}'", MAP, "close it with '}'"),
    Rule("found unexpected end of stream", QUOTE, "close it", from_start=True),
    Rule("found unexpected document separator", QUOTE, "close it", from_start=True),
    Rule("found unknown escape character", "a backslash before {sign} means nothing in double quotes", ESCAPE),
    Rule("expected escape sequence", "an escape in double quotes isn't complete", ESCAPE),
    Rule("expected the node content", "a value is missing", "give the key a value, or remove it"),
    Rule("found duplicate anchor", "an anchor (&)", "remove it: a spec has no anchors"),
    Rule("found undefined tag handle", "a tag (!)", "remove it, or put the value in quotes"),
)


def explain(error: MarkedYAMLError) -> tuple[int, str, str]:
    """(line from 1, what is wrong, what to do) of one of PyYAML's errors."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    start = error.context_mark.line + 1 if error.context_mark else line
    problem = error.problem or "unreadable"
    sign = problem.rpartition("character ")[2].partition(" that")[0]
    for rule in RULES:
        if problem.startswith(rule.known):
            place = start if rule.from_start else line
            return place, rule.what.replace("{start}", str(start)).replace("{sign}", sign), rule.fix
    return line, f"not valid YAML: {problem}", "check the line and its indentation"
