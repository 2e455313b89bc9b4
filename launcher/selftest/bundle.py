"""Write the bundle: results, versions, requests and answers, without identifying values.

Known values (the project, its number, the account, tokens, this machine's user, name and home) are replaced everywhere,
also in keys. E-mail addresses, tokens, keys and IP addresses are recognised by pattern.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LONGEST: Final = 2000
"""Characters that are kept of a text, such as a VM's startup script."""
ITEMS: Final = 100
"""Elements that are kept of a list: a page of prices has 5,000."""
PATTERNS: Final = (
    (re.compile(r"[\w.+%-]+@[\w-]+(\.[\w-]+)+"), "EMAIL"),
    (re.compile(r"\bya29\.[\w.-]+"), "TOKEN"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), "TOKEN"),
    (re.compile(r"\b(ssh-(rsa|ed25519)|ecdsa-sha2-\S+) [A-Za-z0-9+/=]+"), "SSH-KEY"),
    (re.compile(r"(?<![A-Za-z0-9+/])(?![0-9a-f]+(?![A-Za-z0-9+/]))[A-Za-z0-9+/]{48,}={0,2}"), "BASE64"),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b"), "IP"),
    (re.compile(r"(?<![\w:])([0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"), "IP"),
    (re.compile(r"(?<=/home/)[^/\s\"']+|(?<=/Users/)[^/\s\"']+"), "USER"),
    (re.compile(r"(?<=\bprojects/)\d{6,}"), "PROJECT-NUMBER"),
)
PERSONAL: Final = frozenset({"username", "homedirectory", "uid", "gid", "name", "key", "sshpublickey", "fingerprint"})
"""Fields that hold a person's name or key, or irrelevant values of metadata items."""
PEOPLE: Final = "/users/"
"""Only in paths of OS Login."""
NUMBER: Final = re.compile(r"\bprojects/(\d{6,})")
BUCKET: Final = re.compile(r"(?:\bgs://|/b/)(?!launch-selftest-)([a-z0-9][\w.-]+)")


def written(
    folder: Path, name: str, results: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], known: Mapping[str, str]
) -> Path:
    """Write a zip file with results.json (as benchmarks/results/selftest-DATE.json) and calls.json; return its path."""
    redact = Redactor({**learnt(calls), **known})
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        kept = [redact(without_people(call)) for call in calls]
        for part, data in (("results.json", redact(results)), ("calls.json", kept)):
            file.writestr(part, json.dumps(data, indent=1, ensure_ascii=False))
    return path


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a bundle's results and calls. Raises OSError, ValueError, KeyError: it is no bundle."""
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("results.json")), json.loads(file.read("calls.json"))


def learnt(calls: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return replacements for the project's number and for buckets of others that a call names, as they may occur
    elsewhere too."""
    text = json.dumps([*calls])
    return {**dict.fromkeys(BUCKET.findall(text), "BUCKET"), **dict.fromkeys(NUMBER.findall(text), "PROJECT-NUMBER")}


def without_people(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call of OS Login without personal data."""
    if PEOPLE not in str(call.get("path", "")):
        return call
    return {
        **call,
        "path": str(call["operation"]),
        "request": hidden(call["request"]),
        "answer": hidden(call["answer"]),
    }


def hidden(value: Any, name: str = "") -> Any:
    """Return JSON with the texts of PERSONAL fields hidden; a map by fingerprint gets numbers as keys."""
    if isinstance(value, Mapping):
        if name.lower() == "sshpublickeys":
            return {str(number): hidden(each) for number, each in enumerate(value.values())}
        return {key: "HIDDEN" if key.lower() in PERSONAL else hidden(each, key) for key, each in value.items()}
    return [hidden(each, name) for each in value] if isinstance(value, list) else value


class Redactor:
    """Replaces known values and patterns in any JSON."""

    def __init__(self, known: Mapping[str, str]) -> None:
        """`known`: value -> replacement. A short value is only replaced as a whole word."""
        longest = sorted((value for value in known if value), key=len, reverse=True)
        self._known = [(re.compile(whole(value), re.IGNORECASE), known[value]) for value in longest]

    def __call__(self, value: Any) -> Any:
        """Return the JSON redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self(each) for key, each in value.items()}
        return [self(each) for each in value[:ITEMS]] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        """Return one text redacted."""
        for pattern, instead in self._known:
            text = pattern.sub(instead, text)
        for pattern, instead in PATTERNS:
            text = pattern.sub(instead, text)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


SHORT: Final = 6


def whole(value: str) -> str:
    """Return a value as a pattern: `root` must not match in `chroot`."""
    plain = re.escape(value)
    return plain if len(value) > SHORT else rf"(?<![A-Za-z0-9]){plain}(?![A-Za-z0-9])"
