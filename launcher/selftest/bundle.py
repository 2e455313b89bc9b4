"""The bundle: results, versions, requests and answers, with nothing in it that tells whose they are.

Known values (the project, its number, the account, tokens, this machine's user, name and home) are replaced wherever
they stand, in keys too; what looks like an e-mail address, a token, a key or an IP address goes by its pattern.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LONGEST: Final = 2000
"""Characters of a text that are kept, such as a VM's startup script."""
ITEMS: Final = 100
"""Elements of a list that are kept: a page of prices has 5,000."""
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
"""Fields that hold a person's name or key, or, as a metadata item's, nothing that matters."""
PEOPLE: Final = "/users/"
"""In answers of OS Login alone."""
NUMBER: Final = re.compile(r"\bprojects/(\d{6,})")
BUCKET: Final = re.compile(r"(?:\bgs://|/b/)(?!launch-selftest-)([a-z0-9][\w.-]+)")


def written(
    folder: Path, name: str, results: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], known: Mapping[str, str]
) -> Path:
    """A zip file with results.json (as benchmarks/results/selftest-DATE.json) and calls.json."""
    redact = Redactor({**learnt(calls), **known})
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        kept = [redact(without_people(call)) for call in calls]
        for part, data in (("results.json", redact(results)), ("calls.json", kept)):
            file.writestr(part, json.dumps(data, indent=1, ensure_ascii=False))
    return path


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A bundle's results and calls. Raises OSError, ValueError, KeyError: it is no bundle."""
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("results.json")), json.loads(file.read("calls.json"))


def learnt(calls: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The project's number and buckets that aren't the selftest's, where a call names them: they may stand elsewhere,
    too."""
    text = json.dumps([*calls])
    return {**dict.fromkeys(BUCKET.findall(text), "BUCKET"), **dict.fromkeys(NUMBER.findall(text), "PROJECT-NUMBER")}


def without_people(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call of OS Login's without what its answer says of a person."""
    if PEOPLE not in str(call.get("path", "")):
        return call
    return {
        **call,
        "path": str(call["operation"]),
        "request": hidden(call["request"]),
        "answer": hidden(call["answer"]),
    }


def hidden(value: Any, name: str = "") -> Any:
    """JSON with the texts of PERSONAL taken out; a map by fingerprints loses those."""
    if isinstance(value, Mapping):
        if name.lower() == "sshpublickeys":
            return {str(number): hidden(each) for number, each in enumerate(value.values())}
        return {key: "HIDDEN" if key.lower() in PERSONAL else hidden(each, key) for key, each in value.items()}
    return [hidden(each, name) for each in value] if isinstance(value, list) else value


class Redactor:
    """Replaces known values and patterns in any JSON."""

    def __init__(self, known: Mapping[str, str]) -> None:
        """`known`: value -> what stands in its place. A short value counts as a whole word only."""
        longest = sorted((value for value in known if value), key=len, reverse=True)
        self._known = [(re.compile(whole(value), re.IGNORECASE), known[value]) for value in longest]

    def __call__(self, value: Any) -> Any:
        """The same JSON, redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self(each) for key, each in value.items()}
        return [self(each) for each in value[:ITEMS]] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        """One text."""
        for pattern, instead in self._known:
            text = pattern.sub(instead, text)
        for pattern, instead in PATTERNS:
            text = pattern.sub(instead, text)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


SHORT: Final = 6


def whole(value: str) -> str:
    """A value as a pattern: `root` is no user in `chroot`."""
    plain = re.escape(value)
    return plain if len(value) > SHORT else rf"(?<![A-Za-z0-9]){plain}(?![A-Za-z0-9])"
