"""Mask what may be a secret in plain data and in messages, before a report or a logger shows them.

A value is masked by its name, by the flag before it, or by its form. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

SECRET_NAME: Final = re.compile(
    r"(?i)secret|passw|passphrase|token|credential|api.?key|private.?key|access.?key|webhook"
)
NOT_SECRET: Final = re.compile(r"(?i)tokens|tokenizer|token_dtype")
_NAMED = r"(?:secret|passw|passphrase|webhook|token(?!s|iz|_dtype)|credential|(?:api|private|access).?key)"
INLINE: Final = re.compile(
    rf"(?i)(?<![\w-])(-[\w-]*{_NAMED}[\w-]*(?:\s+|=)['\"]?|[\w-]*{_NAMED}[\w-]*=['\"]?)[^\s&,'\"]+"
)
"""A secret within a line: `sh -c "train.py --password …"`, `?token=…`."""
LIKE_SECRET: Final = re.compile(
    r"(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9_\-+=.]{20,}"  # random characters
    r"|.*(?<![A-Za-z0-9_-])(hf_|gh[pousr]_|github_pat_|sk-|AKIA|ASIA|AIza|ya29\.|GOCSPX-|xox[a-z]-|glpat-"
    r"|pypi-AgEIcHlwaS|gsk_|wandb_v1_|eyJ)[\w.-]{8,}.*"
    r"|.*://[^\s/@:]*:[^\s/@]+@.*|.*PRIVATE KEY.*",
    re.DOTALL,
)
"""Random text, the known forms of keys, a password in a URL."""
HIDDEN: Final = "•••"
SHORTEST: Final = 6
"""Characters of a secret that is looked for in a message; a shorter one would match other words."""


def mask(value: Any, name: str = "") -> Any:
    """Return plain data with what may be a secret masked; `name` is its dotted name. No value of a mapping `env` is
    kept, and numbers are."""
    if isinstance(value, Mapping):
        return {
            key: dict.fromkeys(item, HIDDEN)
            if key == "env" and isinstance(item, Mapping)
            else mask(item, f"{name}.{key}" if name else str(key))
            for key, item in value.items()
        }
    if value is None or isinstance(value, (int, float)):
        return value
    if SECRET_NAME.search(NOT_SECRET.sub("", name)):
        return HIDDEN
    if isinstance(value, (list, tuple)):
        return _mask_list(value)
    text = INLINE.sub(rf"\1{HIDDEN}", str(value))
    return HIDDEN if LIKE_SECRET.fullmatch(text) else text


def _mask_list(values: Sequence[Any]) -> list[Any]:
    """Mask the items of a list, which may be a command line: a flag may name the secret after it."""
    shown: list[Any] = []
    hide = False
    for item in values:
        flag, equals, _ = str(item).partition("=")
        named = SECRET_NAME.search(NOT_SECRET.sub("", flag))
        shown.append(HIDDEN if hide else f"{flag}={HIDDEN}" if named and equals else mask(item))
        hide = bool(named and flag.startswith("-") and not equals)
    return shown


def mask_message(text: str, env: Mapping[str, str]) -> str:
    """Return a library's message on one line, at most 200 characters, without the values of `env`'s secrets and
    without a URL's user and password."""
    for name, given in env.items():
        value = given.strip()
        if len(value) >= SHORTEST and SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    text = re.sub(r"://[^\s/@]+@", f"://{HIDDEN}@", " ".join(text.split()))
    text = INLINE.sub(rf"\1{HIDDEN}", text)
    return text if len(text) <= 200 else f"{text[:199]}…"
