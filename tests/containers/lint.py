"""What an image must be for its users: not root's, without secrets, stopped by SIGTERM, quick to send after an edit.

DL3002 and DL3025 are hadolint's (https://github.com/hadolint/hadolint#rules).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """One instruction, its lines joined."""

    name: str
    text: str


class Stage(NamedTuple):
    """A FROM and what follows. `above` is the stage that it begins with, if it is one of this file."""

    image: str
    name: str
    steps: tuple[Step, ...]
    above: Stage | None


class File(NamedTuple):
    """A Dockerfile: the arguments before its first stage, and its stages."""

    arguments: dict[str, str]
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> list[Step]:
        """Of all stages."""
        return [step for stage in self.stages for step in stage.steps]


Rule = Callable[[File], Iterator[str]]


def findings(text: str) -> list[str]:
    """What is wrong with a Dockerfile; each begins with the rule's name."""
    file = parsed(text)
    return [f"{rule.__name__}: {found}" for rule in RULES for found in rule(file)]


def parsed(text: str) -> File:
    """The file as stages of instructions."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for step in instructions(text):
        if step.name == "FROM":
            image, name = re.fullmatch(r"(\S+)(?: (?i:AS) (\S+))?", step.text).groups(default="")  # type: ignore[union-attr]  # Docker has accepted it
            stages.append(Stage(image, name, (), next((one for one in stages if one.name == image), None)))
        elif stages:
            stages[-1] = stages[-1]._replace(steps=(*stages[-1].steps, step))
        elif step.name == "ARG":
            name, _, value = step.text.partition("=")
            arguments[name] = value
    return File(arguments, tuple(stages))


def instructions(text: str) -> Iterator[Step]:
    """Each instruction; comments are left out, also those between the lines of one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Step(name.upper(), " ".join(rest.split()))


def lineage(stage: Stage) -> tuple[Step, ...]:
    """The stage's steps after those of the stages that it begins with."""
    return (*(lineage(stage.above) if stage.above else ()), *stage.steps)


# --- The rules ------------------------------------------------------------------------------------------------------


def exec_form(file: File) -> Iterator[str]:
    """DL3025: a shell before the process would not hand SIGTERM on."""
    for step in file.steps:
        if step.name in ("CMD", "ENTRYPOINT"):
            try:
                json.loads(step.text)
            except json.JSONDecodeError:
                yield step.text


def no_root(file: File) -> Iterator[str]:
    """DL3002: the last stage ends as a user with a number, which need not be looked up, and not root's."""
    users = [step.text for step in lineage(file.stages[-1]) if step.name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        yield f"USER {users[-1] if users else 'is missing'}"


def no_secrets(file: File) -> Iterator[str]:
    """Whoever has an image can read its arguments and its environment."""
    steps = [*(Step("ARG", name) for name in file.arguments), *file.steps]
    for step in steps:
        if step.name in ("ARG", "ENV"):
            names = re.findall(r"(\w+)(?==|$)", step.text)
            yield from (name for name in names if re.search(r"(?i)secret|token|passw|credential|(^|_)key", name))


def code_comes_last(file: File) -> Iterator[str]:
    """What changes most is copied last, and nothing is made from it: an edit changes one small layer."""
    *before, last = [step for step in file.steps if step.name != "LABEL"]
    if not copies_code(last):
        yield f"the last step is {last.name} {last.text}"
    yield from (step.text for step in before if copies_code(step))


def copies_code(step: Step) -> bool:
    """Whether a step copies the user's code."""
    return step.name == "COPY" and bool(re.search(r"(^| )code ", step.text))


def only_the_environment_leaves_the_build(file: File) -> Iterator[str]:
    """What the build needed (locks, a wheel) is in no layer of an image that is pushed."""
    for step in lineage(file.stages[-1]):
        if step.name == "COPY" and re.search(r"\.lock|\.whl|(^| )torch\b|(^| )\.( |$)", step.text):
            yield step.text


RULES: tuple[Rule, ...] = (
    exec_form,
    no_root,
    no_secrets,
    code_comes_last,
    only_the_environment_leaves_the_build,
)
