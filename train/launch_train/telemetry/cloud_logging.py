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
from collections.abc import Callable, Mapping
from typing import Any, Final

from launch_train.common.backoff import Backoff
from launch_train.common.errors import TrainError
from launch_train.common.secrets import RETRYABLE, message_and_reason, one_line, session
from launch_train.telemetry.log_entry import REST, SECOND, Chunk, Entries, LogSource, batches
from launch_train.telemetry.tee import Left

ENDPOINT: Final = "https://logging.googleapis.com"
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
        self._entries = Entries(f"{source.instance}-{time.time_ns():x}")
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
        while self._thread.is_alive() and (seconds := min(left(), until - time.monotonic())) > 0:
            self._thread.join(min(0.1, seconds))
        if self._thread.is_alive():
            self._say("the last lines did not reach Cloud Logging")

    def _run(self) -> None:
        try:
            while True:
                chunks, missed, last = self._take()
                for batch in batches(self._entries.made(chunks, missed, last=last)):
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
            raise kind(f"the credentials were rejected: {one_line(str(error))}") from error
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
        project = self._source.project
        if reason == "SERVICE_DISABLED":
            return f"its API is disabled: gcloud services enable logging.googleapis.com --project={project}"
        if answer.status_code != 403 or reason == "ACCESS_TOKEN_SCOPE_INSUFFICIENT":
            return message
        email = str(getattr(self._session.credentials, "service_account_email", None) or "")
        account = email if "@" in email else "ACCOUNT"
        return (
            f"this VM's account has no permission to write logs: gcloud projects add-iam-policy-binding {project} "
            f"--member=serviceAccount:{account} --role=roles/logging.logWriter"
        )
