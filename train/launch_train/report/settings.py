"""The settings of runs by dotted name, without secrets, and what differs between several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch_train.common.masking import mask
from launch_train.runfolder.run import RunData


@dataclass(frozen=True)
class Difference:
    """A setting that differs between runs, and its value in each; an empty text: the run doesn't have it."""

    name: str
    values: tuple[str, ...]


def differences(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    """Return what differs between runs: image, machine and launch's version, then the settings by name."""
    origins = [origin(run) for run in runs]
    settings = [flat_settings(run) for run in runs]
    names = [*dict.fromkeys(name for each in origins for name in each)]
    names += sorted({name for each in settings for name in each})
    rows = (
        (name, tuple((run_origin | more).get(name, "") for run_origin, more in zip(origins, settings, strict=True)))
        for name in names
    )
    return tuple(Difference(name, values) for name, values in rows if len({*values}) > 1)


def origin(run: RunData) -> dict[str, str]:
    """Return what a run was made from and where it runs: its image, machine, launch's version and PyTorch.

    An image's tag is the hash of its content, so `image` differs if the code differs; `dependencies` has the packages
    alone, and `code` the number and size of the user's files.
    """
    image, plan = run.plan.get("image") or {}, run.plan
    requests = (attempt.get("request") or {} for attempt in plan.get("attempts") or ())
    labels: Mapping[str, Any] = next(
        (request_labels for request in requests if (request_labels := request.get("labels"))), {}
    )
    texts = {
        "image": image.get("uri"),
        "image: dependencies": image.get("dependencies"),
        "image: code": f"{image['files']} files, {image.get('size', 0):,} bytes" if image.get("files") else "",
        "launch": str(labels.get("launch-version", "")).replace("-", "."),
        "torch": first_event(run, "start").get("torch"),
        "machine": machine_text(run),
    }
    return {name: str(text) for name, text in texts.items() if text}


def machine_text(run: RunData) -> str:
    """Return `2 × a3-highgpu-8g`, the newest attempt's; of a local run, the machine that this one stood in for."""
    machine, is_local = run.plan.get("machine") or {}, run.plan.get("target") == "local"
    newest = run.attempts[-1].entry.get("machine") if run.attempts and not is_local else None
    nodes, name = machine.get("nodes", 1), newest or machine.get("machine_type", "")
    text = f"{nodes} × {name}" if nodes != 1 else str(name)
    return f"this machine, in place of {text}" if is_local and text else text


def first_event(run: RunData, kind: str) -> Mapping[str, Any]:
    """Return the event of a kind in the newest start that has one, else an empty one."""
    return next((event for each in reversed(run.starts) if (event := each.event(kind))), {})


def flat_settings(run: RunData) -> dict[str, str]:
    """Return the spec's and the trainer's settings by dotted name, without what may be a secret."""
    settings = spec_settings(run)
    config = mask(first_event(run, "start").get("config"))
    return settings | {f"run.config.{name}": text for name, text in _flat(config, "") if name} if config else settings


def spec_settings(run: RunData) -> dict[str, str]:
    """Return the spec's settings by dotted name, each argument of the program on its own, without what may be a
    secret."""
    spec = mask(run.plan.get("spec") or {})
    settings = dict(_flat(spec, ""))
    program = spec.get("run")
    if isinstance(program, Mapping) and isinstance(arguments := program.get("args"), list):
        settings.pop("run.args", None)
        settings |= argument_settings([_text(argument) for argument in arguments])
    return settings


def argument_settings(arguments: Sequence[str]) -> dict[str, str]:
    """Return a program's arguments by name: `run.args.lr` of `--lr 0.1`, `--lr=0.1` and `lr=0.1`. `run.args` has
    those without a name; a name that occurs several times has all its values."""
    values: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        option, sign, value = argument.partition("=")
        is_number = argument[1:2].isdigit() or argument[1:2] == "."
        if (argument.startswith("-") and not is_number and argument.strip("-")) or (sign and option.isidentifier()):
            key = f"run.args.{option.lstrip('-')}"
            values.setdefault(key, []).extend([value] if sign else [])
            name = "" if sign else key
        else:
            values.setdefault(name or "run.args", []).append(argument)
            name = ""
    return {key: " ".join(texts) if texts else "true" for key, texts in values.items()}


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif value not in (None, {}, []):
        yield name, _text(value)


def shown_text(name: str, value: Any) -> str:
    """Return a value as text, without what may be a secret: by its name, by the flag before it, or by its looks."""
    return _text(mask(value, name))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as the spec has it: null, true
    return f"{value:g}" if isinstance(value, float) else str(value)
