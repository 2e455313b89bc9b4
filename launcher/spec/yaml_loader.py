"""Parse YAML into nodes with positions. Supports a safe subset of YAML 1.2: no anchors, aliases, merge keys or tags.

The nodes are composed here from PyYAML's events, so that unsupported syntax is rejected before anything is built from
it. libyaml produces them where PyYAML has it. PyYAML's own parser reads a file that libyaml rejects again, because its
messages are clearer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from yaml import __with_libyaml__
from yaml.error import MarkedYAMLError, YAMLError
from yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from launcher.errors import Problem, SpecError
from launcher.spec.nodes import Broken, List, Map, Node, Scalar, clipped

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 10_000
"""Together these limits bound the time: the slowest accepted file takes well under a second."""

UNSENDABLE = "[\0\ud800-\udfff]"
"""NUL and lone surrogates: escapes in quotes can produce them, but neither environment variables nor JSON can hold
them."""
LENIENT = frozenset("\t\ufeff")
"""Characters that libyaml accepts in more places than PyYAML's parser."""


class Loaded(Struct, frozen=True):
    """The content of a file, and its recoverable syntax problems."""

    root: Node
    problems: list[Problem]


def load(data: bytes, at: Callable[[int], str]) -> Loaded:
    """Parse one document. `at` formats the position of a line (from 1). Raises SpecError if parsing cannot continue."""
    text = decode(data, at)
    if unprintable := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, unprintable.start()) + 1
        raise SpecError((Problem(at(line), f"invalid control character {unprintable[0]!r}", "remove it"),))
    if __with_libyaml__ and LENIENT.isdisjoint(text):  # a twentieth of the time
        from yaml import CSafeLoader

        composer = Composer(CSafeLoader(text), at)
        with suppress(YAMLError):
            return Loaded(composer.document(), composer.problems)
    events = Events(text)
    composer = Composer(events, at)
    try:
        return Loaded(composer.document(), composer.problems)
    except MarkedYAMLError as error:
        from launcher.spec.syntax import explain

        line, what, fix = explain(error)
        raise SpecError((*composer.problems, Problem(at(line), what, fix))) from None
    except (ValueError, OverflowError):  # PyYAML calls chr() and int() unguarded: "\U99999999", %YAML 1.999…
        line = events.line + 1
        raise SpecError((Problem(at(line), "invalid escape sequence", "use single quotes, or remove it"),)) from None


def decode(data: bytes, at: Callable[[int], str]) -> str:
    """Decode UTF-8, with or without a byte order mark. Raises SpecError."""
    if len(data) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES // 1024} KiB"
        raise SpecError((Problem(at(1), what, "name a spec file; data belongs in a bucket"),))
    try:
        return data.decode().removeprefix("\ufeff")  # Python would import a module for utf-8-sig
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"invalid UTF-8 (byte 0x{data[error.start]:02x})"
        raise SpecError((Problem(at(line), what, "save the file as UTF-8"),)) from None


class Events(Reader, Scanner, Parser):  # PyYAML composes its own loaders this way
    """Stream of PyYAML events over a text."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def scan_plain(self) -> Any:
        """Return the token of a scalar without quotes. In brackets it may contain a question mark, as in YAML 1.2 and
        for libyaml; PyYAML's method ends it there, so it reads a letter instead (the token's text is not read here)."""
        self.peek = lambda index=0: character if (character := Reader.peek(self, index)) != "?" else "a"  # type: ignore[method-assign]
        try:
            return super().scan_plain()
        finally:
            del self.peek


class Composer:
    """Composes nodes from events. Recoverable problems are collected in `problems`, others are raised."""

    def __init__(self, events: Any, at: Callable[[int], str]) -> None:
        self.next: Callable[[], Event] = events.get_event
        self.at = at
        self.problems: list[Problem] = []
        self.values = 0

    def document(self) -> Node:
        self.next()
        if isinstance(self.next(), StreamEndEvent):
            raise SpecError((Problem(self.at(1), "the file is empty", "create a spec with `launch init`"),))
        root = self.node(self.next(), depth=1)
        while isinstance(event := self.next(), DocumentEndEvent):
            pass
        if isinstance(event, DocumentStartEvent):
            self.stop(event, "unsupported second document (---)", "put each spec in its own file")
        return root

    def node(self, event: Event, depth: int) -> Node:
        """Compose the node that starts with `event`."""
        self.values += 1
        if depth > MAX_DEPTH:
            self.stop(event, f"nested more than {MAX_DEPTH} levels deep", "check the brackets and the indentation")
        if self.values > MAX_VALUES:
            self.stop(event, f"more than {MAX_VALUES} values", "move the data to a separate file")
        if isinstance(event, AliasEvent):
            return self.broken(event, f"unsupported alias *{clipped(event.anchor or '')}", "write out the value")
        self.check_properties(event)
        if isinstance(event, MappingStartEvent):
            return self.mapping(event, depth)
        if isinstance(event, SequenceStartEvent):
            return self.sequence(event, depth)
        return self.scalar(event)

    def check_properties(self, event: Event) -> None:
        """Report an anchor or a tag."""
        if not isinstance(event, NodeEvent):
            return
        if event.anchor:
            self.broken(event, f"unsupported anchor &{clipped(event.anchor)}", "remove it")
        if tag := getattr(event, "tag", None):
            self.broken(event, f"unsupported tag {clipped(tag)}", "remove it")

    def scalar(self, event: Event) -> Node:
        if not isinstance(event, ScalarEvent):
            return self.broken(event, "a value is missing", "check the indentation")
        text: str = event.value
        if not text.isprintable() and re.search(UNSENDABLE, text):
            return self.broken(event, "unsupported escape (NUL or a lone surrogate)", "remove it")
        return Scalar(self.where(event), text, text if event.style else resolve(text))

    def sequence(self, start: Event, depth: int) -> List:
        items = []
        while not isinstance(event := self.next(), SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return List(self.where(start), tuple(items))

    def mapping(self, start: Event, depth: int) -> Map:
        entries: dict[str, Node] = {}
        while not isinstance(event := self.next(), MappingEndEvent):
            key = self.key(event, depth + 1)
            value = self.node(self.next(), depth + 1)
            if key is None:
                continue
            if key in entries:
                what = f"duplicate setting {clipped(key)} (first set at {entries[key].where})"
                self.broken(event, what, "keep one of the two")
            else:
                entries[key] = replace(value, where=self.where(event))  # the position of a section is its key's line
        return Map(self.where(start), entries)

    def key(self, event: Event, depth: int) -> str | None:
        """Return the text of a key; None, and a problem, if it is invalid."""
        before = len(self.problems)
        node = self.node(event, depth)
        if len(self.problems) > before:
            return None
        if not isinstance(node, Scalar):
            self.broken(event, "invalid key: a list or a section", "use text as a key")
        elif node.text == "<<" and isinstance(event, ScalarEvent) and not event.style:
            self.broken(event, "unsupported merge key <<", "write out the merged settings")
        elif not isinstance(node.value, str):
            key = clipped(node.text)
            self.broken(event, f"invalid key{f' {key}' if key else ''}: not text", f'put it in quotes: "{key}"')
        else:
            return node.value
        return None

    def where(self, event: Event) -> str:
        return self.at(event.start_mark.line + 1 if event.start_mark else 1)

    def broken(self, event: Event, what: str, fix: str) -> Broken:
        self.problems.append(Problem(self.where(event), what, fix))
        return Broken(self.where(event))

    def stop(self, event: Event, what: str, fix: str) -> None:
        raise SpecError((*self.problems, Problem(self.where(event), what, fix)))


# --- Plain scalars ----------------------------------------------------------------------------------------------------


CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{sign + name: float(sign + "inf") for sign in ("", "+", "-") for name in (".inf", ".Inf", ".INF")},
}
NUMBER = re.compile(
    r"(?P<dec>[-+]?[0-9]+)|0o(?P<oct>[0-7]+)|0x(?P<hex>[0-9a-fA-F]+)|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
)
BASES = {"dec": 10, "oct": 8, "hex": 16}
MAX_DIGITS = 4000
"""Python refuses to parse integers above 4,300 digits."""


def resolve(text: str) -> bool | int | float | str | None:
    """Return the value of a plain (unquoted) scalar by YAML 1.2's core schema (https://yaml.org/spec/1.2.2/, 10.3.2);
    infinity for an integer with more than MAX_DIGITS digits.

    PyYAML follows YAML 1.1, where `1e-4` is text, `no` is false, `017` is 15, `1:30` is 90 and a date is an object.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    match = NUMBER.fullmatch(text)
    if not match:
        return text
    base = BASES.get(match.lastgroup or "")
    if base is None:
        return float(text)
    digits = match[match.lastgroup or ""]
    if len(digits) > MAX_DIGITS:
        return float("-inf" if digits[0] == "-" else "inf")
    return int(digits, base)
