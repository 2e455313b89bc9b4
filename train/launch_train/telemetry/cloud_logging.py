"""Send the output of a VM's node and its processes to Cloud Logging. On Vertex AI the platform does this.

Best effort: the run folder has the same text, so a slow or closed Cloud Logging never blocks or ends a run. Uses REST
through google-auth, which the image contains; the Cloud Logging client library would add gRPC and OpenTelemetry.
https://cloud.google.com/logging/docs/reference/v2/rest/v2/entries/write
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from launch_train.common import contract
from launch_train.common.backoff import Backoff
from launch_train.common.errors import TrainError
from launch_train.common.secrets import RETRYABLE, message_and_reason, service_account_of, session
from launch_train.common.text import nanoseconds_text, one_line
from launch_train.telemetry.tee import Left, join_within

ENDPOINT: Final = "https://logging.googleapis.com"
SECOND: Final = 10**9
"""Times of entries are Unix nanoseconds."""
PIECE: Final = 60_000
"""Characters (up to four bytes each) after which a line is split over several entries; the limit of an entry is about
256 KB: https://cloud.google.com/logging/quotas."""
ENTRIES: Final = 1000
REQUEST: Final = 5_000_000
"""Upper bounds of entries and bytes in one request; Google's limit is 10 MB."""
REST: Final = 10 * SECOND
"""Longest wait for the end of a line. A progress bar may not end its line for hours; it becomes an entry each time."""
LONGEST_REST: Final = 1 << 16
BUFFER: Final = 1 << 24
"""Bytes that may be queued. Beyond that the oldest are dropped: users follow the newest lines, and the run folder has
all of them."""
TAKEN: Final = 1 << 21
"""Bytes that are turned into entries at a time."""
ANSWER_S: Final = 10.0
AGAIN_S: Final = 1.0
LONGEST_AGAIN_S: Final = 30.0
AGAIN_CLOSED_S: Final = 0.2
PATIENCE_S: Final = 30.0
"""Seconds without an answer after which a warning is printed."""
LAST_S: Final = 10.0
"""Longest wait in seconds at the end of a run."""


class _AwayError(Exception):
    """No answer, or a retryable one."""


class _ClosedError(Exception):
    """Cloud Logging rejects every request; retrying does not help."""


class _RefusedError(Exception):
    """Cloud Logging rejects this request only."""


class LogUploader:
    """Queues output and sends it from a thread every `every` seconds. `add` never blocks."""

    def __init__(
        self, source: LogSource, environ: Mapping[str, str], say: Callable[[str], None], every: float = 2.0
    ) -> None:
        self._say = say
        self._every = every
        self._client = EntriesClient(source, environ)
        self._entries = Entries(f"{source.resource['instance_id']}-{time.time_ns():x}")
        self._chunks: deque[Chunk] = deque()
        self._size = self._missed = 0
        self._closed = self._off = self._complained = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log upload", daemon=True)
        self._thread.start()

    def add(self, data: bytes, number: int) -> None:
        """Queue output written to file descriptor `number`; if the buffer is full, drop the oldest."""
        with self._news:
            if self._off:
                return
            self._chunks.append(Chunk(time.time_ns(), number, data))
            self._size += len(data)
            while self._size > BUFFER:
                lost = self._chunks.popleft().data
                self._size -= len(lost)
                self._missed += lost.count(b"\n") or 1
            if len(self._chunks) == 1 or self._size >= TAKEN > self._size - len(data):
                self._news.notify()

    def end(self) -> None:
        """Close the queue; the thread sends the rest."""
        with self._news:
            self._closed = True
            self._news.notify()

    def close(self, left: Left) -> None:
        """Close the queue and wait until all is sent, for at most LAST_S and the time left."""
        self.end()
        until = time.monotonic() + LAST_S
        join_within(self._thread, lambda: min(left(), until - time.monotonic()))
        if self._thread.is_alive():
            self._say("the last lines did not reach Cloud Logging")

    def _run(self) -> None:
        try:
            while True:
                chunks, missed, last = self._take()
                for batch in entry_batches(self._entries.from_chunks(chunks, missed, last=last)):
                    self._deliver(batch)
                if last:
                    return
        except _ClosedError as error:
            self._turn_off(str(error))
        except Exception as error:  # noqa: BLE001 - logging is optional; no error in it may end the run
            self._turn_off(f"{type(error).__name__}: {error}")

    def _take(self) -> tuple[list[Chunk], int, bool]:
        """Wait for output; return its chunks, the number of lines dropped before them, and True if none follow."""
        with self._news:
            self._news.wait_for(lambda: self._chunks or self._closed, REST / SECOND)
            self._news.wait_for(lambda: self._size >= TAKEN or self._closed, self._every)
            taken, size = [], 0
            while self._chunks and size < TAKEN:
                taken.append(self._chunks.popleft())
                size += len(taken[-1].data)
            self._size -= size
            missed, self._missed = self._missed, 0
            return taken, missed, self._closed and not self._chunks

    def _deliver(self, batch: list[bytes]) -> None:
        """Retry until the batch is delivered or rejected. Raises _ClosedError."""
        began, backoff = time.monotonic(), Backoff(AGAIN_S, LONGEST_AGAIN_S)
        while True:
            try:
                self._client.send(batch)
                return
            except _RefusedError as error:
                self._complain(f"Cloud Logging refuses some lines: {error}")
                return
            except _AwayError as error:
                if time.monotonic() - began > PATIENCE_S:
                    self._complain(f"{error}: lines come to Cloud Logging late, or not at all")
            with self._news:
                closed = self._news.wait_for(lambda: self._closed, backoff.wait())
            if closed:
                time.sleep(AGAIN_CLOSED_S)

    def _complain(self, line: str) -> None:
        """Print a warning, but only the first: warnings are output too and would be sent."""
        if not self._complained:
            self._complained = True
            self._say(line)

    def _turn_off(self, why: str) -> None:
        """Discard queued and future output, and print the reason."""
        with self._news:
            self._off = True
            self._chunks.clear()
            self._size = 0
        self._say(f"logging to Cloud Logging has stopped: {why}")


class EntriesClient:
    """Client of the entries.write method."""

    def __init__(self, source: LogSource, environ: Mapping[str, str]) -> None:
        self._source = source
        self._environ = environ
        self._endpoint = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING", "").rstrip("/")
        self._head = json.dumps(source.head()).encode()[:-1] + b', "entries": ['
        self._session: Any = None

    def send(self, entries: list[bytes]) -> None:
        """Send entries in one request. Raises _AwayError, _ClosedError or _RefusedError."""
        from google.auth.exceptions import GoogleAuthError, RefreshError
        from requests.exceptions import RequestException

        body = self._head + b",".join(entries) + b"]}"
        try:
            answer = self._post(body)
        except RefreshError as error:
            kind = _AwayError if error.retryable else _ClosedError
            raise kind(f"the credentials were rejected: {one_line(error)}") from error
        except (RequestException, GoogleAuthError) as error:
            raise _AwayError(f"Cloud Logging does not respond ({type(error).__name__})") from error
        except TrainError as error:
            raise _ClosedError(str(error)) from error
        if answer.status_code in RETRYABLE:
            raise _AwayError(f"Cloud Logging answers {answer.status_code}")
        if answer.status_code in (400, 413):
            raise _RefusedError(message_and_reason(answer)[0])
        if answer.status_code != 200:
            raise _ClosedError(self._refusal(answer))

    def _post(self, body: bytes) -> Any:
        if self._session is None:
            self._session = session(self._environ, self._endpoint)
        url = f"{self._endpoint or ENDPOINT}/v2/entries:write"
        return self._session.post(url, data=body, headers={"Content-Type": "application/json"}, timeout=ANSWER_S)

    def _refusal(self, answer: Any) -> str:
        """Return what is missing, with the command that fixes it."""
        message, reason = message_and_reason(answer)
        project = self._source.resource["project_id"]
        if reason == "SERVICE_DISABLED":
            return f"its API is disabled: gcloud services enable logging.googleapis.com --project={project}"
        if answer.status_code != 403 or reason == "ACCESS_TOKEN_SCOPE_INSUFFICIENT":
            return message
        account = service_account_of(self._session) or "ACCOUNT"
        return (
            f"this VM's account has no permission to write logs: gcloud projects add-iam-policy-binding {project} "
            f"--member=serviceAccount:{account} --role=roles/logging.logWriter"
        )


# --- Entries: pure, except for the clock. https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry ---


@dataclass(frozen=True)
class LogSource:
    """Origin of entries: the labels of the resource (a gce_instance) and the labels of each entry."""

    resource: Mapping[str, str]
    labels: Mapping[str, str]

    def head(self) -> dict[str, Any]:
        """Return the fields that all entries of a request share."""
        return {
            "logName": f"projects/{self.resource['project_id']}/logs/{contract.LOG}",
            "resource": {"type": "gce_instance", "labels": dict(self.resource)},
            "labels": dict(self.labels),
            "partialSuccess": True,
        }


class Chunk(NamedTuple):
    """Bytes written to file descriptor `number` (1 or 2) at `time`."""

    time: int
    number: int
    data: bytes


class Entries:
    """Converts chunks into entries.

    Each has a unique id: Cloud Logging drops duplicates, and orders entries of the same time by id.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._rests: dict[int, Chunk] = {}

    def from_chunks(self, chunks: Iterable[Chunk], missed: int = 0, *, last: bool) -> Iterator[bytes]:
        """Yield entries as JSON. An incomplete line is held until it ends, until REST has passed, or until `last`."""
        if missed:
            text = f"launch: {missed} lines are missing here: Cloud Logging took them too slowly"
            yield from self._entry(time.time_ns(), "WARNING", text)
        for chunk in chunks:
            yield from self._lines(chunk)
        for number, rest in list(self._rests.items()):
            if last or time.time_ns() - rest.time >= REST or len(rest.data) >= LONGEST_REST:
                del self._rests[number]
                yield from self._line(rest.time, number, rest.data)

    def _lines(self, chunk: Chunk) -> Iterator[bytes]:
        before = self._rests.pop(chunk.number, None)
        *whole, rest = ((before.data if before else b"") + chunk.data).split(b"\n")
        for line in whole:
            yield from self._line(chunk.time, chunk.number, line)
        if rest:
            since = before.time if before and not whole else chunk.time
            self._rests[chunk.number] = Chunk(since, chunk.number, rest)

    def _line(self, time: int, number: int, line: bytes) -> Iterator[bytes]:
        """Yield the entry of the text after the last carriage return, as a terminal shows it. Severities are those of
        Vertex AI."""
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        return self._entry(time, "ERROR" if number == 2 else "INFO", shown)

    def _entry(self, time: int, severity: str, text: str) -> Iterator[bytes]:
        """Yield one entry, or several for a very long line."""
        for start in range(0, max(1, len(text)), PIECE):
            self._count += 1
            entry = {
                "timestamp": nanoseconds_text(time),
                "severity": severity,
                "insertId": f"{self._prefix}-{self._count:010d}",
                # jsonPayload, because Cloud Logging treats an empty textPayload as missing, and would lose empty lines.
                "jsonPayload": {"message": text[start : start + PIECE]},
            }
            yield json.dumps(entry, ensure_ascii=False).encode()


def entry_batches(entries: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group entries into requests of at most ENTRIES entries and about REQUEST bytes."""
    batch: list[bytes] = []
    size = 0
    for entry in entries:
        if batch and (len(batch) >= ENTRIES or size + len(entry) > REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += len(entry) + 1
    if batch:
        yield batch
