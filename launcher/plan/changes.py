"""Compare the requests of two plans, field by field. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar

from launcher.jobs.job import IDENTITY_LABEL, PLAN_LABEL, RUN_LABEL
from launcher.plan.build import replace_text, with_hidden_webhook
from launcher.plan.model import Attempt, Frozen, Image, Plan
from launcher.text import listed, plural, size_text

DERIVED: Final = frozenset({RUN_LABEL, IDENTITY_LABEL, PLAN_LABEL, "launch-spec", "launch-version"})
"""Labels that change with everything else."""
PAIRS: Final = (("name", "value"), ("key", "value"))
"""How requests write a dict as a list: `env` of Vertex AI, metadata of VMs."""
PLACES_SHOWN: Final = 4
T = TypeVar("T")


class Change(Frozen, frozen=True, kw_only=True):
    """A field of the requests that differs; None: the field is absent."""

    field: str
    before: str | None
    after: str | None
    attempts: str = ""
    """`2 of 4 attempts` if not all have the change."""


class PlanChanges(Frozen, frozen=True, kw_only=True):
    """What differs between two plans of a spec. The run ID and the image, which change with the code, are not among
    the fields."""

    run: tuple[str, str] | None = None
    image: str = ""
    """What changed in the image's content; empty: nothing."""
    fields: tuple[Change, ...] = ()
    usd_at_most: tuple[float | None, float | None] | None = None
    usd_expected: tuple[float | None, float | None] | None = None

    def __bool__(self) -> bool:
        return self != PlanChanges()


def compare_plans(before: Plan, after: Plan) -> PlanChanges:
    """Return what differs between the requests and the costs of two plans."""
    before, after = with_hidden_webhook(before), with_hidden_webhook(after)
    old, new = before.limits, after.limits
    return PlanChanges(
        run=differing(before.run, after.run),
        image=image_change(before.image, after.image),
        fields=tuple(fields_changed(before, after)),
        usd_at_most=differing(old.usd_at_most, new.usd_at_most),
        usd_expected=differing(old.usd_expected, new.usd_expected),
    )


def differing(before: T, after: T) -> tuple[T, T] | None:
    """Return both values if they differ."""
    return (before, after) if before != after else None


def image_change(before: Image | None, after: Image | None) -> str:
    """Return what changed in an image's content: its tag is a hash of it."""
    old, new = (image.uri if image else "" for image in (before, after))
    if old == new:
        return ""
    if before is None or after is None or before.pinned or after.pinned:
        return f"{old or 'none'} -> {new or 'none'}"
    code = [f"{plural(image.files, 'file')}, {size_text(image.size)}" for image in (before, after)]
    dependencies = "unchanged" if before.dependencies == after.dependencies else "changed"
    return f"new content (code: {' -> '.join(dict.fromkeys(code))}; dependencies {dependencies})"


def fields_changed(before: Plan, after: Plan) -> Iterator[Change]:
    """Yield the changed fields: target, fallback order, then those of the requests, once for all attempts and nodes
    that have the same change."""
    if before.target != after.target:
        yield Change(field="target", before=before.target, after=after.target)
        return
    old, new = (
        {  # `spot us-central1`, and of several machine types that of the attempt
            " ".join([attempt.provisioning, attempt.where, *[attempt.machine_type] * (len(plan.machines) > 1)]): attempt
            for attempt in plan.attempts
        }
        for plan in (before, after)
    )
    if [*old] != [*new]:
        yield Change(field="attempts", before=listed([*old], PLACES_SHOWN), after=listed([*new], PLACES_SHOWN))
    pairs = [(old[place], new[place]) for place in new if place in old] or [(before.attempts[0], after.attempts[0])]
    fields_by_change: dict[tuple[str, str | None, str | None], list[str]] = {}
    seen: dict[tuple[str, str | None, str | None], set[int]] = {}
    for number, (old_attempt, new_attempt) in enumerate(pairs):
        old_fields, new_fields = request_fields(before, old_attempt), request_fields(after, new_attempt)
        for field in dict.fromkeys([*new_fields, *old_fields]):
            was, now = old_fields.get(field), new_fields.get(field)
            if was != now:
                key = (re.sub(r"\[\d+\]", "[*]", field), was, now)
                fields_by_change.setdefault(key, []).append(field)
                seen.setdefault(key, set()).add(number)
    for key, fields in fields_by_change.items():
        some = f"{len(seen[key])} of {plural(len(pairs), 'attempt')}" if len(seen[key]) < len(pairs) else ""
        name = fields[0] if len(set(fields)) == 1 else key[0]
        yield Change(field=name, before=key[1], after=key[2], attempts=some)


def request_fields(plan: Plan, attempt: Attempt) -> dict[str, str]:
    """Return a request as dotted fields, with the run's ID and image replaced by names."""
    request = replace_text(attempt.request, plan.run, "RUN")
    if plan.image and not plan.image.pinned:
        request = replace_text(request, plan.image.uri, "IMAGE")
    return dict(flattened_fields(request))


def flattened_fields(data: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted field, text) of plain data. A list of pairs and a text of JSON are treated as a dict; a list of
    scalars is one value."""
    if isinstance(data, list) and any(isinstance(item, dict) for item in data):
        names = next((keys for keys in PAIRS if all(set(item) == set(keys) for item in data)), None)
        data = {item[names[0]]: item[names[1]] for item in data} if names else {f"[{i}]": x for i, x in enumerate(data)}
    if isinstance(data, str) and data.startswith("{"):
        with suppress(ValueError):  # no JSON
            data = json.loads(data)
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in DERIVED:
                yield from flattened_fields(value, f"{field}{'' if key.startswith('[') or not field else '.'}{key}")
        return
    yield field, data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
