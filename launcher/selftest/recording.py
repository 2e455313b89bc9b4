"""Record requests and answers while a selftest runs, and write them to a bundle without identifying values.

Every HTTP request to Google goes through requests' HTTPAdapter, whichever client sends it: that one method is wrapped.
Vertex AI is called by gRPC, and by REST only in tests: its client is wrapped, and the messages of both are recorded as
JSON.

A bundle holds the shape of each request and answer: keys, kinds of values, and Google's own terms, such as a state. The
texts that it holds, in results and error messages, are redacted. Known values (the project, its number, the account,
tokens, this machine's user, name and home) are replaced everywhere, also in keys. E-mail addresses, tokens, keys and IP
addresses are recognised by pattern.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from launcher.services import vertex as backend

ALIKE: Final = 3
"""Maximum number of recorded calls per step of one operation with the same status."""
NAMED: Final = re.compile(
    r"/(projects|locations|regions|zones|instances|operations|customJobs|repositories|builds|family|images(?!/family)"
    r"|machineTypes|subnetworks|services|b|o|users)/[^/:]+"
)
"""Parts of a path that precede a resource name."""
BLOB: Final = re.compile(r"^/v2/.+?/(manifests|blobs/uploads|blobs)/.*$")
"""A registry's paths. The repository's name contains slashes."""
SECRET_HOSTS: Final = re.compile(r"(oauth2|accounts|sts|iamcredentials|metadata)(\..*)?|169\.254\.169\.254")
"""Hosts whose requests or answers contain credentials."""
TOKENS: Final = re.compile(r"/computeMetadata/|/oauth2/|/token$")
"""Paths of requests for credentials, including those to a registry's token endpoint."""
METHODS: Final = {
    "create_custom_job": ("POST", ""),
    "get_custom_job": ("GET", "/*"),
    "list_custom_jobs": ("GET", ""),
    "cancel_custom_job": ("POST", "/*:cancel"),
    "delete_custom_job": ("DELETE", "/*"),
}
"""JobService's methods as REST requests (google/cloud/aiplatform/v1/job_service.proto)."""
JOBS: Final = "/v1/projects/*/locations/*/customJobs"


class Recorder:
    """The calls so far, as plain data. `step` is the current step."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.step = ""
        self._alike: Counter[tuple[str, str, Any]] = Counter()
        self._lock = threading.Lock()

    def note(self, operation: str, **call: Any) -> None:
        """Record a call. Of similar calls only the first ALIKE are kept."""
        key = (self.step, operation, call.get("status"))
        with self._lock:
            self._alike[key] += 1
            if self._alike[key] <= ALIKE:
                self.calls.append({"step": self.step, "operation": operation, **call})


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record every request and answer of this process inside the context."""
    from requests.adapters import HTTPAdapter

    send, open_jobs = HTTPAdapter.send, backend.open_jobs

    def noted(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        began, is_stream = time.monotonic(), bool(options.get("stream", args[0] if args else False))
        try:
            response = send(self, request, *args, **options)
            answer = None
            if response is not None and not is_stream and "json" in response.headers.get("Content-Type", ""):
                answer = as_json(response.content)
        except Exception as error:
            seconds = time.monotonic() - began
            note_http(recorder, request, None, seconds=seconds, error=f"{type(error).__name__}: {error}")
            raise
        seconds = time.monotonic() - began
        note_http(recorder, request, response.status_code, answer=answer, seconds=seconds)
        return response

    HTTPAdapter.send = noted  # type: ignore[method-assign]  # records every request of the process until the block ends
    backend.open_jobs = lambda *words: Jobs(open_jobs(*words), recorder)
    try:
        yield
    finally:
        HTTPAdapter.send = send  # type: ignore[method-assign]  # as above
        backend.open_jobs = open_jobs


# --- REST -------------------------------------------------------------------------------------------------------------


def note_http(
    recorder: Recorder, request: Any, status: int | None, *, seconds: float, answer: Any = None, error: str = ""
) -> None:
    """Record one request. Headers are not recorded: they contain tokens and are not compared."""
    url = urlsplit(request.url)
    if template(url.path).startswith(JOBS):
        return
    is_secret = SECRET_HOSTS.fullmatch(url.hostname or "") or TOKENS.search(url.path)
    body = request.body if isinstance(request.body, str | bytes) and not is_secret else b""
    recorder.note(
        f"{request.method} {template(url.path)}",
        host=url.hostname,
        path=url.path if is_secret else unquote(f"{url.path}?{url.query}"),
        request=as_json(body),
        status=status,
        answer=None if is_secret else answer,
        seconds=round(seconds, 3),
        error=error,
    )


def template(path: str) -> str:
    """Return a path without resource names: /v1/projects/*/locations/*/customJobs."""
    return NAMED.sub(r"/\1/*", BLOB.sub(r"/v2/*/\1/*", path))


def as_json(body: str | bytes) -> Any:
    """Parse JSON; None: it is invalid."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


# --- Vertex AI --------------------------------------------------------------------------------------------------------


class Jobs:
    """Wraps Google's client for custom jobs. Each method takes request= and returns one message or a pager."""

    def __init__(self, client: Any, recorder: Recorder) -> None:
        self._client, self._recorder = client, recorder

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name not in METHODS:
            return method

        def call(*, request: Mapping[str, Any], **options: Any) -> Any:
            began = time.monotonic()
            verb, path = METHODS[name]
            noted = {"host": "aiplatform", "path": str(request.get("name") or request.get("parent"))}
            noted["request"] = message_json(request.get("custom_job"))
            try:
                answer = method(request=request, **options)
            except Exception as error:
                code, said = int(getattr(error, "code", 0) or 0), f"{type(error).__name__}: {error}"
                self._note(f"{verb} {JOBS}{path}", noted, began, code, None, said)
                raise
            self._note(f"{verb} {JOBS}{path}", noted, began, 200, message_json(answer), "")
            return answer

        return call

    def _note(self, operation: str, noted: dict[str, Any], began: float, status: int, answer: Any, error: str) -> None:
        seconds = round(time.monotonic() - began, 3)
        self._recorder.note(operation, **noted, status=status or None, answer=answer, seconds=seconds, error=error)


def message_json(message: Any) -> Any:
    """Return a Google message as canonical JSON (a pager's page, an operation's message); None for anything else."""
    from google.protobuf.json_format import MessageToDict

    message = getattr(message, "_response", getattr(message, "operation", message))
    plain = type(message).pb(message) if hasattr(type(message), "pb") else message
    return MessageToDict(plain) if hasattr(plain, "DESCRIPTOR") else None


# --- The bundle -------------------------------------------------------------------------------------------------------

LONGEST: Final = 2000
"""Maximum length of a text, such as a VM's startup script, in characters."""
ITEMS: Final = 100
"""Maximum number of elements in a list. A page of prices has 5,000."""
CREDENTIAL: Final = r"\w*token|\w*secret|private_?key\w*|password"
"""Names of fields and parameters whose value is hidden."""
PUBLIC_PROJECTS: Final = "deeplearning-platform-release|vertex-ai|cloud-builders"


def unless_path(match: re.Match[str]) -> str:
    """Return BASE64, or the same text if it is a path such as v1/projects/PROJECT/customJobs."""
    is_path = all(PART.fullmatch(part) for part in match[0].split("/"))
    return match[0] if is_path and "/" in match[0] else "BASE64"


PART: Final = re.compile(r"[a-z]*([A-Z][a-z]+)*|[A-Z]+|v\d\w*|\d+|[0-9a-f]+")
PATTERNS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(rf"\b((?:{CREDENTIAL})[\"']?\s*[=:]\s*[\"']?)[^&\s\"',}}]+", re.IGNORECASE), r"\1TOKEN"),
    (re.compile(r"[\w.+%-]+@[\w-]+(\.[\w-]+)+"), "EMAIL"),
    (re.compile(r"\bya29\.[\w.-]+"), "TOKEN"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), "TOKEN"),
    (re.compile(r"\b(ssh-(rsa|ed25519)|ecdsa-sha2-\S+) [A-Za-z0-9+/=]+"), "SSH-KEY"),
    (re.compile(r"(?<![A-Za-z0-9+/])(?![0-9a-f]+(?![A-Za-z0-9+/]))[A-Za-z0-9+/]{48,}={0,2}"), unless_path),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b"), "IP"),
    (re.compile(r"(?<![\w:])([0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"), "IP"),
    (re.compile(r"(?<=/home/)[^/\s\"']+|(?<=/Users/)[^/\s\"']+"), "USER"),
    (re.compile(r"(?<=\bprojects/)\d{6,}"), "PROJECT-NUMBER"),
    (re.compile(rf"\b(projects/|docker\.pkg\.dev/)(?!({PUBLIC_PROJECTS})\b)[a-z][\w.:-]*"), r"\1OTHER-PROJECT"),
)
NUMBER: Final = re.compile(
    r"(?:\bprojects/|[?&]project=|\"project(?:Number|Id)?\": \"?|\"compute#project\", \"id\": \"?)(\d{6,})"
    r"|\b(?:service-)?(\d{6,})(?:-compute)?@"
)
BUCKET: Final = re.compile(r"(?:\bgs://|/b/)(?!launch-selftest-)([a-z0-9][\w.-]+)")


def write_bundle(
    folder: Path, name: str, results: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], known: Mapping[str, str]
) -> Path:
    """Write a zip file with results.json (as benchmarks/results/selftest-DATE.json) and calls.json; return its path."""
    # The project's number and other people's buckets in a call may occur elsewhere in the bundle too.
    text = json.dumps([*calls])
    buckets = dict.fromkeys(BUCKET.findall(text), "BUCKET")
    numbers = dict.fromkeys((match[1] or match[2] for match in NUMBER.finditer(text)), "PROJECT-NUMBER")
    redact = Redactor({**buckets, **numbers, **known})
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        kept = []
        for call in calls:
            shapes = {name: shape(call.get(name)) for name in ("request", "answer")}
            kept.append(redact({name: value for name, value in call.items() if name != "path"} | shapes))
        for part, data in (("results.json", redact(results)), ("calls.json", kept)):
            file.writestr(part, json.dumps(data, indent=1, ensure_ascii=False))
    return path


class Redactor:
    """Replaces known values and patterns in any JSON."""

    def __init__(self, known: Mapping[str, str]) -> None:
        """`known`: value -> replacement. Short values are only replaced as whole words."""
        longest = sorted((value for value in known if value), key=len, reverse=True)
        self._known = [(re.compile(whole_word(value), re.IGNORECASE), known[value]) for value in longest]

    def __call__(self, value: Any) -> Any:
        """Return the redacted JSON."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self(each) for key, each in value.items()}
        return [self(each) for each in value[:ITEMS]] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        """Return the redacted text."""
        for pattern, instead in self._known:
            text = pattern.sub(instead, text)
        for pattern, word in PATTERNS:
            text = pattern.sub(word, text)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


SHORT: Final = 6


def whole_word(value: str) -> str:
    """Return a pattern that matches a value as a whole word: `root` must not match in `chroot`."""
    plain = re.escape(value)
    return plain if len(value) > SHORT else rf"(?<![A-Za-z0-9]){plain}(?![A-Za-z0-9])"


# --- Shapes -----------------------------------------------------------------------------------------------------------

TERMS: Final = re.compile(
    "@type|IPProtocol|architecture|code|currencyCode|direction|domain|format|kind|locationType|metric|mode|reason|shell"
    "|natIpAllocateOption|onHostMaintenance|operatingSystemType|operationType|provisioningModel"
    "|sourceSubnetworkIpRangesToNat|state|status|storageClass|strategy|usageType"
)
"""Fields whose values are Google's own terms."""
WORD: Final = re.compile(r"[\w#./-]{1,80}")
FREE: Final = frozenset({"labels", "annotations", "jsonPayload", "protoPayload", "sshPublicKeys", "metadata"})
"""Maps whose keys are chosen by users."""


def shape(value: Any, name: str = "") -> Any:
    """Return JSON of the same shape. `name` is the field that contains it. An error's message explains a failed step,
    and is kept."""
    if isinstance(value, Mapping):
        if not name and value.keys() == {"error"}:
            return value
        keys = [str(number) for number in range(len(value))] if name in FREE else [*map(str, value)]
        return {key: shape(each, name if name in FREE else key) for key, each in zip(keys, value.values(), strict=True)}
    if isinstance(value, list):
        return [shape(each, name or "items") for each in value]
    if isinstance(value, str):
        return value if TERMS.fullmatch(name) and WORD.fullmatch(value) else "string"
    return type(value)() if isinstance(value, int | float) and not isinstance(value, bool) else value
