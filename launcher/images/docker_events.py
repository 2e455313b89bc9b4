"""Read the event streams of a Docker engine's builds, pushes and pulls.

The events are those of the engine's API (https://docs.docker.com/reference/api/engine/). A build sends its output in
pieces of text; a push or pull sends the state of each layer. An error may come inside the stream, after HTTP status
200.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from launcher.errors import LaunchError
from launcher.images.reference import parse
from launcher.images.registry.transport import RepositoryMissing, denied

Event = Mapping[str, Any]
OnLine = Callable[[str], None]
OnLayer = Callable[[str, int, int], None]
"""Called with a layer's name, the bytes done and its size."""

LAST_LINES = 10
"""Lines of a failed step's output in an error."""

MOVING = frozenset({"Pushing", "Downloading"})
GONE = frozenset({"Pushed", "Download complete"})
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOISE = (" ---> ", "---> ", "Removing intermediate container", "Successfully built ", "Successfully tagged ")
"""Messages of the engine that don't concern the user."""

NO_ACCESS = ("unauthorized", "denied", "authentication required", "no basic auth credentials", "forbidden")
HINTS = (
    (
        ("no space left on device",),
        "The engine's disk is full. `docker system df` shows the usage; `docker builder prune` empties its cache.",
    ),
    (
        ("exec format error",),
        "The base is for another CPU architecture, and this engine has no emulator for it (binfmt, qemu-user-static).",
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
        "The registry does not respond. Check its name, and that it is running.",
    ),
)
"""Messages of the engine, pip or apt → a hint."""

HINT_REQUIREMENTS = "These are the job's own requirements (image.requirements); see pip's output above."
BROKE_OFF = "the engine closed the connection before it had finished"


class EngineError(LaunchError):
    """No Docker engine is available, or it reported an error."""


class Failure(NamedTuple):
    """A failed build: the engine's name of the step (may be empty), the error, the output before it."""

    step: str
    error: str
    output: tuple[str, ...]


def built(events: Iterable[Event], name: str, on_line: OnLine) -> str:
    """Read a build's events and return the image's id. Raises EngineError: it failed or was interrupted."""
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
    """Yield (line, event): each complete line of output with an empty event, and each other event with an empty line.

    A line may be split over any number of events. A carriage return, used by progress bars, overwrites the line.
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
    """Return the text that a terminal shows for a line with carriage returns."""
    return line.rstrip().rpartition("\r")[2]


def failed(name: str, failure: Failure) -> EngineError:
    """Return the error of a failed build: the step, the engine's message, the last lines, and a hint."""
    where = f"{name} can't be built: {failure.step or 'before its first step'}"
    shown = "".join(f"\n  {line}" for line in failure.output)
    hint = hint_for(" ".join((*failure.output, failure.error)))
    conflict = any(
        "ResolutionImpossible" in line for line in (*failure.output, failure.error)
    )  # pip found conflicting versions, even if one of its indexes was unreachable
    if "requirements.txt" in failure.step and (conflict or not hint):
        hint = HINT_REQUIREMENTS
    return EngineError(f"{where}\n{failure.error}{shown}", hint)


def pushed(events: Iterable[Event], name: str, on_layer: OnLayer) -> str:
    """Read a push's events and return the image's digest. Raises LaunchError: it failed or was interrupted."""
    digest = ""
    for event in followed(events, on_layer, name, "can't be pushed"):
        digest = (event.get("aux") or {}).get("Digest", digest)
    if not digest:
        raise EngineError(f"{name} isn't pushed: {BROKE_OFF}", "Push again: layers that have arrived stay there.")
    return digest


def pulled(events: Iterable[Event], name: str, on_layer: OnLayer) -> None:
    """Read a pull's events. Raises LaunchError: it failed."""
    for _ in followed(events, on_layer, name, "can't be pulled"):
        pass


def followed(events: Iterable[Event], on_layer: OnLayer, name: str, what: str) -> Iterator[Event]:
    """Yield the events of a push or pull and report each layer's progress. Raises LaunchError: an event is an error."""
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
    """Return the message of an error event, else an empty string."""
    return str((event.get("errorDetail") or {}).get("message") or event.get("error") or "").strip()


def read_out(events: Iterator[object]) -> None:
    """Read a stream to its end, so that its connection is closed."""
    deque(events, maxlen=0)


def refused(name: str, what: str, message: str) -> LaunchError:
    """Return the error of an image operation with the engine's message; NotAuthorised: no permission."""
    problem, words = f"{name} {what}: {message}", message.lower()
    if any(phrase in words for phrase in NO_ACCESS):
        return denied(parse(name).host, problem, "what launch found for it, handed to the engine")
    if "name unknown" in words:
        return RepositoryMissing(problem, "Create the repository first: launch build --create-repository")
    if "not found" in words or "manifest unknown" in words:
        return EngineError(problem, "Check its name, and that it exists for this platform.")
    return EngineError(problem, hint_for(message))


def hint_for(text: str) -> str:
    """Return a hint for a message of the engine or pip, if one is known."""
    words = text.lower()
    return next((hint for signs, hint in HINTS if any(sign in words for sign in signs)), "")
