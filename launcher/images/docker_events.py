"""What a Docker engine says while it builds, pushes and pulls: its streams of events, read to their end.

The events are those of the engine's API (https://docs.docker.com/reference/api/engine/): a build tells its output in
pieces of text, a push and a pull tell the state of each layer, and each may end in an error inside the stream, whose
HTTP status was 200 long before.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from launcher.errors import LaunchError
from launcher.images.registry.errors import RepositoryMissing, denied
from launcher.images.registry.reference import parse

Event = Mapping[str, Any]
OnLine = Callable[[str], None]
OnLayer = Callable[[str, int, int], None]
"""Name of a layer, bytes done, all its bytes."""

LAST_LINES = 10
"""How much of a failed step's output an error shows."""

MOVING = frozenset({"Pushing", "Downloading"})
GONE = frozenset({"Pushed", "Download complete"})
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOISE = (" ---> ", "---> ", "Removing intermediate container", "Successfully built ", "Successfully tagged ")
"""The engine's own housekeeping, of no use to who waits."""

NO_ACCESS = ("unauthorized", "denied", "authentication required", "no basic auth credentials", "forbidden")
HINTS = (
    (
        ("no space left on device",),
        "The engine's disk is full. `docker system df` says with what; `docker builder prune` empties its cache.",
    ),
    (
        ("exec format error",),
        "The base is for another kind of processor, and this engine has no emulator for it (binfmt, qemu-user-static).",
    ),
    (
        ("is not a supported wheel on this platform",),
        "The wheel (image.torch) is for another Python or platform than the base image's.",
    ),
    (
        ("name resolution", "failed to establish a new connection", "network is unreachable", "no such host"),
        "The engine, or the containers that it builds in, can't reach the network.",
    ),
    (
        ("connection refused",),
        "Nothing answers there: is the name right, and does the registry run?",
    ),
)
"""Words of an engine, pip or apt -> what to do about it."""

HINT_REQUIREMENTS = "These are the job's own requirements (image.requirements); pip's words are above."
BROKE_OFF = "the engine broke off before it was done"


class EngineError(LaunchError):
    """The Docker engine isn't there, or couldn't do what it was asked."""


class Failure(NamedTuple):
    """Where a build failed: the step as the engine names it (may be empty), the error, the output before it."""

    step: str
    error: str
    output: tuple[str, ...]


def built(events: Iterable[Event], name: str, on_line: OnLine) -> str:
    """The id of the image that a build's events tell of. Raises EngineError: it failed, or broke off."""
    step, output, image = "", deque[str](maxlen=LAST_LINES), ""
    rest = lines(events)
    for line, event in rest:
        if message := error_in(event):
            read_out(rest)
            raise failed(name, Failure(step, message, tuple(output)))
        image = (event.get("aux") or {}).get("ID", image)
        if line.startswith("Step "):
            step = " ".join(line.split())
            output.clear()
            on_line(step)
        elif line and not line.startswith(NOISE):
            output.append(line)
            on_line(line)
    if not image:
        raise EngineError(f"{name} isn't built: {BROKE_OFF}", "Try again; `docker info` says whether it runs.")
    return image


def lines(events: Iterable[Event]) -> Iterator[tuple[str, Event]]:
    """(line, event): each whole line of the output with an empty event, each other event with no line.

    A line comes in any number of pieces. A carriage return, by which bars are redrawn, begins it anew.
    """
    rest = ""
    for event in events:
        if "stream" in event:
            *whole, rest = (rest + COLOUR.sub("", event["stream"])).split("\n")
            yield from ((shown(line), {}) for line in whole)
        else:
            yield shown(rest), {}
            yield "", event
            rest = ""
    yield shown(rest), {}


def shown(line: str) -> str:
    """What a terminal would show of a line in the end."""
    return line.rstrip().rpartition("\r")[2]


def failed(name: str, failure: Failure) -> EngineError:
    """The error about a build: the step, the engine's words, the last lines, and what may help."""
    where = f"{name} can't be built: {failure.step or 'before its first step'}"
    shown = "".join(f"\n  {line}" for line in failure.output)
    hint = hint_for(" ".join((*failure.output, failure.error)))
    conflict = any(
        "ResolutionImpossible" in line for line in (*failure.output, failure.error)
    )  # pip found what it needs, even if one of its indexes is away
    if "requirements.txt" in failure.step and (conflict or not hint):
        hint = HINT_REQUIREMENTS
    return EngineError(f"{where}\n{failure.error}{shown}", hint)


def pushed(events: Iterable[Event], name: str, on_layer: OnLayer) -> str:
    """The digest of the image that a push's events tell of. Raises LaunchError: it failed, or broke off."""
    digest = ""
    for event in followed(events, on_layer, name, "can't be pushed"):
        digest = (event.get("aux") or {}).get("Digest", digest)
    if not digest:
        raise EngineError(f"{name} isn't pushed: {BROKE_OFF}", "Push again: layers that have arrived stay there.")
    return digest


def pulled(events: Iterable[Event], name: str, on_layer: OnLayer) -> None:
    """A pull's events to their end. Raises LaunchError: it failed."""
    for _ in followed(events, on_layer, name, "can't be pulled"):
        pass


def followed(events: Iterable[Event], on_layer: OnLayer, name: str, what: str) -> Iterator[Event]:
    """The events of a push or pull, each layer's bytes reported on the way. Raises LaunchError: an error is in it."""
    sizes: dict[str, int] = {}
    rest = iter(events)
    for event in rest:
        if message := error_in(event):
            read_out(rest)
            raise refused(name, what, message)
        layer, status, detail = event.get("id", ""), event.get("status"), event.get("progressDetail") or {}
        if status in MOVING and detail.get("total"):
            sizes[layer] = detail["total"]
            on_layer(f"layer {layer}", min(detail.get("current", 0), sizes[layer]), sizes[layer])
        elif status in GONE and layer in sizes:
            on_layer(f"layer {layer}", sizes[layer], sizes[layer])
        yield event


def error_in(event: Event) -> str:
    """The message of an event that is an error, else nothing."""
    return str((event.get("errorDetail") or {}).get("message") or event.get("error") or "").strip()


def read_out(events: Iterator[object]) -> None:
    """Read a stream to its end: until then its connection stays open."""
    deque(events, maxlen=0)


def refused(name: str, what: str, message: str) -> LaunchError:
    """The error about an image, what can't be done with it, and the engine's words. No rights: NotAuthorised."""
    problem, words = f"{name} {what}: {message}", message.lower()
    if any(one in words for one in NO_ACCESS):
        return denied(parse(name).host, problem, "what launch found for it, handed to the engine")
    if "name unknown" in words:
        return RepositoryMissing(problem, "Make the repository first: launch build --create-repository")
    if "not found" in words or "manifest unknown" in words:
        return EngineError(problem, "Is its name right, and is it there for this platform?")
    return EngineError(problem, hint_for(message))


def hint_for(text: str) -> str:
    """What to do about an engine's or pip's words, where that is known."""
    words = text.lower()
    return next((hint for signs, hint in HINTS if any(sign in words for sign in signs)), "")
