"""YAML text -> nodes with their lines. A small and safe part of YAML 1.2: no anchors, aliases, merge keys or tags.

PyYAML's pure-Python scanner and parser do the reading; nodes are made here, from its events, so that what is not
allowed is seen before anything is built from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace
from yaml.error import MarkedYAMLError
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
from launcher.spec.scalars import resolve
from launcher.spec.syntax import explain

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 10_000
"""Together they bound the time: the slowest file that is let through takes well under a second."""

UNSENDABLE = re.compile("[\0\ud800-\udfff]")
"""What an escape in quotes can make and no environment or JSON can carry: NUL and half characters."""


class Loaded(NamedTuple):
    """A file's content, and what is wrong with its form where reading could go on."""

    root: Node
    problems: list[Problem]


def load(data: bytes, at: Callable[[int], str]) -> Loaded:
    """Read one document. `at` makes the place shown of a line (from 1). Raises SpecError where reading can't go on."""
    text = decode(data, at)
    if unprintable := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, unprintable.start()) + 1
        raise SpecError((Problem(at(line), f"a control character ({unprintable[0]!r})", "remove it"),))
    composer = Composer(text, at)
    try:
        return Loaded(composer.document(), composer.problems)
    except MarkedYAMLError as error:
        line, what, fix = explain(error)
        raise SpecError((*composer.problems, Problem(at(line), what, fix))) from None
    except (ValueError, OverflowError):  # PyYAML calls chr() and int() unguarded: "\U99999999", %YAML 1.999…
        line = composer.events.line + 1
        raise SpecError(
            (Problem(at(line), "an escape that is no character", "use single quotes, or remove it"),)
        ) from None


def decode(data: bytes, at: Callable[[int], str]) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises SpecError."""
    if len(data) > MAX_BYTES:
        raise SpecError((Problem(at(1), f"larger than {MAX_BYTES // 1024} KiB", "a spec is a page of YAML"),))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8 (byte 0x{data[error.start]:02x})"
        raise SpecError((Problem(at(line), what, "save the file as UTF-8"),)) from None


class Events(Reader, Scanner, Parser):  # PyYAML composes its own loaders this way
    """PyYAML's reader, scanner and parser over one text: a stream of events."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


class Composer:
    """Makes nodes from events. `problems` grows while it reads on; what makes reading on senseless is raised."""

    def __init__(self, text: str, at: Callable[[int], str]) -> None:
        self.events = Events(text)
        self.at = at
        self.problems: list[Problem] = []
        self.values = 0

    def document(self) -> Node:
        """The only document of the stream."""
        self.next()
        if isinstance(self.peek(), StreamEndEvent):
            raise SpecError((Problem(self.at(1), "the file is empty", "`launch init` writes a spec to start from"),))
        self.next()
        root = self.node(self.next(), depth=1)
        while isinstance(event := self.next(), DocumentEndEvent):
            pass
        if isinstance(event, DocumentStartEvent):
            self.stop(event, "a second document (---)", "one file holds one spec")
        return root

    def peek(self) -> Event:
        event: Event = self.events.peek_event()  # type: ignore[no-untyped-call]
        return event

    def next(self) -> Event:
        event: Event = self.events.get_event()  # type: ignore[no-untyped-call]
        return event

    def node(self, event: Event, depth: int) -> Node:
        """The node that starts with `event`."""
        self.values += 1
        if depth > MAX_DEPTH:
            self.stop(event, f"more than {MAX_DEPTH} levels deep", "a spec has about four")
        if self.values > MAX_VALUES:
            self.stop(event, f"more than {MAX_VALUES} values", "data belongs in a file of its own")
        if isinstance(event, AliasEvent):
            return self.broken(
                event, f"an alias (*{clipped(event.anchor or '')})", "write the value again: a spec has no anchors"
            )
        self.undecorated(event)
        if isinstance(event, MappingStartEvent):
            return self.mapping(event, depth)
        if isinstance(event, SequenceStartEvent):
            return self.sequence(event, depth)
        return self.scalar(event)

    def undecorated(self, event: Event) -> None:
        if not isinstance(event, NodeEvent):
            return
        if event.anchor:
            self.broken(event, f"an anchor (&{clipped(event.anchor)})", "remove it: a spec has no anchors")
        if tag := getattr(event, "tag", None):
            self.broken(event, f"a tag ({clipped(tag)})", "remove it: values have no tags in a spec")

    def scalar(self, event: Event) -> Node:
        if not isinstance(event, ScalarEvent):
            return self.broken(event, "not a value", "check the indentation")
        text: str = event.value
        if UNSENDABLE.search(text):
            return self.broken(event, "an escape for NUL or half a character", "remove it: it can't be sent")
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
                what = f"`{clipped(key)}` is given twice (first: {entries[key].where})"
                self.broken(event, what, "keep one of the two")
            else:
                entries[key] = replace(value, where=self.where(event))  # a section stands where its name does
        return Map(self.where(start), entries)

    def key(self, event: Event, depth: int) -> str | None:
        """A key's text; None (and a problem) where it can't be one."""
        before = len(self.problems)
        node = self.node(event, depth)
        if len(self.problems) > before:
            return None
        if not isinstance(node, Scalar):
            self.broken(event, "a key that is itself a list or a map", "keys are text")
        elif node.text == "<<" and isinstance(event, ScalarEvent) and not event.style:
            self.broken(event, "a merge key (<<)", "write the keys out: a spec has no merging")
        elif not isinstance(node.value, str):
            key = clipped(node.text)
            self.broken(event, f"the key {key or 'here'} is not text", f'put it in quotes: "{key}"')
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
