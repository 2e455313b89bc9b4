"""Read a job's output from Cloud Logging.

Uses REST through google-auth's session: for entries, the client library google-cloud-logging (3.17) has no public
transport other than gRPC, and it depends on packages that nothing else here needs (OpenTelemetry, App Engine, audit
logs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from launch_train.common import contract
from launch_train.common.text import nanoseconds_text
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.gcp.api import Api, Service, http_date, open_session
from launcher.jobs.job import Job
from launcher.jobs.vm import of_instance
from launcher.runs.logs.line import Line, split_lines

LOGGING: Final = Service("logging", "Cloud Logging", "roles/logging.viewer")
SECOND: Final = 10**9
"""In nanoseconds: all times in this module are Unix nanoseconds, as in Cloud Logging."""
MAX_LATENESS: Final = 65 * SECOND
"""Maximum delay between an entry's timestamp and the time when it can be read. Includes the rounding of the Date header
to seconds and the time of a query."""
USUAL_LATENESS: Final = 5 * SECOND
FULL_PASS_INTERVAL: Final = 60 * SECOND
"""Most entries arrive within seconds, so where there are many, a pass that also finds the late ones is made less
often."""
PAGE_SIZE: Final = 1000
"""The API's upper bound: https://cloud.google.com/logging/docs/reference/v2/rest/v2/entries/list."""
PAGES_PER_POLL: Final = 5
"""A project may read 60 times a minute."""
MAX_REMEMBERED: Final = 20_000
"""Entries remembered as seen before those that no later pass can return are forgotten."""


class LogClient:
    """The method entries.list, with the signature of Google's own clients, which `Api` expects."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises NotAuthorised: no credentials were found."""
        self._session, self._endpoint = open_session(LOGGING, environ)

    def list_log_entries(self, *, request: Mapping[str, Any], retry: None, timeout: float) -> tuple[Any, float | None]:
        """Return the response's JSON and the time of the server's clock."""
        response = self._session.post(f"{self._endpoint}/v2/entries:list", json=request, timeout=timeout)
        if response.status_code != 200:
            raise google_error(response)
        try:
            answer = json.loads(response.content.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError) as error:
            raise UnreachableError(
                f"{LOGGING.title}: incomplete response: {error}", "Try again in a moment."
            ) from error
        return answer, http_date(response.headers.get("Date", ""))


def google_error(response: Any) -> Exception:
    """Return the exception that Google's own clients raise for an error response."""
    from google.api_core.exceptions import from_http_response, from_http_status

    try:
        error = from_http_response(response)
    except (AttributeError, TypeError):  # JSON, but not Google's error format: from a gateway
        error = from_http_status(response.status_code, response.text, response=response)
    return error  # type: ignore[no-any-return]  # google-api-core has no types


class LogEntry(NamedTuple):
    """A log entry. `time` is in Unix nanoseconds."""

    time: int
    id: str
    replica: str
    text: str
    severity: str


class CloudLogReader:
    """Read the lines of one job. Lines that were returned are not lost or repeated if a later call fails.

    A pass reads all entries since a time, page by page, possibly over several calls. Because entries may arrive late,
    the next pass begins before the start of this one by Google's clock, and skips the entries already seen.
    """

    def __init__(self, job: Job, project: str, environ: Mapping[str, str], clock: Clock) -> None:
        """Raises NotAuthorised: no credentials were found."""
        self._api = Api(LOGGING, project, LogClient(environ), clock)
        self._filter = entry_filter(job, project)
        # A VM prints nothing before its creation; until then, entries of the same run are from the previous attempt.
        self._floor = to_nanoseconds(job.created) - (0 if job.zone else MAX_LATENESS)
        """Older entries belong to other jobs."""
        self._first = (self._floor, "")
        self._since = self._position = self._floor
        """The first timestamp of this pass, and how far it has read."""
        self._token = ""
        self._began: int | None = None
        """When this pass began, by the server's clock."""
        self._full_pass_began: int | None = None
        """When the last full pass began: one that also finds late entries."""
        self._is_full_pass = True
        self._pages = 0
        self._seen: set[tuple[int, str]] = set()

    @property
    def has_entries(self) -> bool:
        """Return whether any entry of the job was read, shown or not."""
        return bool(self._seen)

    def start_at(self, since: float) -> None:
        """Skip entries older than `since` (Unix seconds)."""
        self._floor = self._since = self._position = max(self._floor, to_nanoseconds(since))
        self._first = (self._floor, "")

    def read_new(self) -> list[Line]:
        """Return the next lines, of at most `PAGES_PER_POLL` pages. Raises LaunchError if none could be read."""
        new_lines: list[Line] = []
        for _ in range(PAGES_PER_POLL):
            try:
                lines, more = self._read_page(retry=False)
            except LaunchError:
                if new_lines:
                    break
                raise
            new_lines += lines
            if not more:
                break
        return new_lines

    def read_existing(self) -> Iterator[Line]:
        """Yield all lines written so far. Raises LaunchError: no answer for a minute, or a refusal."""
        more = True
        while more:
            lines, more = self._read_page(retry=True)
            yield from lines

    def read_tail(self, count: int) -> list[Line]:
        """Return the last `count` lines; `read_new` continues after them. Raises as `read_existing` does."""
        new_lines: list[Line] = []
        token, began = "", None
        while len(new_lines) < max(count, 1):
            body = self._request("desc", self._floor, token, min(PAGE_SIZE, max(count, 1)))
            answer, date = self._api.ask("list_log_entries", **body)
            began = began or (to_nanoseconds(date) if date else None)
            for entry in parse_entries(answer):
                self._seen.add((entry.time, entry.id))
                new_lines += reversed(list(lines_in(entry)))
                self._first = (entry.time, entry.id)
            if not (token := next_page_token(answer)):
                break
        if len(new_lines) < max(count, 1):
            self._first = (self._floor, "")  # all entries were read, so older ones that arrive late are new
        self._floor, self._began = self._first[0], began
        self._position = max((time for time, _ in self._seen), default=self._position)
        self._end_pass()
        return new_lines[:count][::-1]

    def _read_page(self, *, retry: bool) -> tuple[list[Line], bool]:
        """Return the new lines of the next page, and whether more pages follow."""
        body = self._request("asc", self._since, self._token, PAGE_SIZE)
        try:
            answer, date = (self._api.ask if retry else self._api.once)("list_log_entries", **body)
        except (UnreachableError, NotAuthorised):
            raise  # the next call requests the same page
        except LaunchError:
            if not self._token:
                raise
            self._token, self._since = "", max(self._since, self._position)  # the token may have expired
            return [], True
        if self._began is None and date is not None:
            self._began = to_nanoseconds(date)
        lines = [line for entry in parse_entries(answer) if self._is_new(entry) for line in lines_in(entry)]
        self._pages += 1
        self._token = next_page_token(answer)
        if not self._token:
            self._end_pass()
        self._forget_old_entries()
        return lines, bool(self._token)

    def _request(self, order: str, since: int, token: str, size: int) -> dict[str, Any]:
        return {
            "resourceNames": [f"projects/{self._api.project}"],
            "filter": f'{self._filter} AND timestamp>="{nanoseconds_text(since)}"',
            "orderBy": f"timestamp {order}",
            "pageSize": size,
            **({"pageToken": token} if token else {}),
        }

    def _is_new(self, entry: LogEntry) -> bool:
        """Record an entry as seen; return whether it had not been seen before."""
        key = (entry.time, entry.id)
        self._position = max(self._position, entry.time)
        if key in self._seen or key < self._first:
            return False
        self._seen.add(key)
        return True

    def _end_pass(self) -> None:
        """Decide where the next pass begins."""
        began = self._began if self._began is not None else self._position  # a proxy removed the Date header
        if self._is_full_pass or self._full_pass_began is None:
            self._full_pass_began = began
        self._is_full_pass = self._pages <= 1 or began - self._full_pass_began >= FULL_PASS_INTERVAL
        overlap_start = self._full_pass_began - MAX_LATENESS if self._is_full_pass else began - USUAL_LATENESS
        self._since = self._position = max(self._floor, overlap_start)
        self._began, self._pages = None, 0

    def _forget_old_entries(self) -> None:
        """Forget entries that no later pass can return."""
        if len(self._seen) > MAX_REMEMBERED:
            next_pass = (self._full_pass_began or self._began or 0) - MAX_LATENESS
            horizon = min(self._position if self._token else self._since, next_pass)
            self._seen = {key for key in self._seen if key[0] >= horizon}


def entry_filter(job: Job, project: str) -> str:
    """Return the filter for a job's entries.

    On a VM the node writes them (train/launch_train/telemetry/cloud_logging.py). With several VMs, or an unknown
    number, the filter selects the run's entries up to the job's end instead of one instance's.
    """
    if job.zone is None:
        return f'resource.type="ml_job" AND resource.labels.job_id="{job.id}"'
    log = f'resource.type="gce_instance" AND logName="projects/{project}/logs/{contract.LOG}"'
    if not job.run or len(of_instance(job.request, project).parameters.get("nodes") or ()) == 1:
        return f'{log} AND resource.labels.instance_id="{job.id}"'
    until = f' AND timestamp<"{nanoseconds_text(to_nanoseconds(job.ended) + SECOND)}"' if job.ended else ""
    return f'{log} AND labels."{contract.LOG_RUN}"="{job.run}"{until}'


def parse_entries(answer: Any) -> Iterator[LogEntry]:
    """Yield the entries of a response; skip malformed ones."""
    entries = answer.get("entries") if isinstance(answer, Mapping) else None
    for raw in entries if isinstance(entries, list) else ():
        if isinstance(raw, Mapping) and (entry := parse_entry(raw)):
            yield entry


def parse_entry(raw: Mapping[str, Any]) -> LogEntry | None:
    """Parse a google.logging.v2.LogEntry; None if it has no timestamp."""
    time = parse_rfc3339(raw.get("timestamp")) or parse_rfc3339(raw.get("receiveTimestamp"))
    if time is None:
        return None
    resource_labels = as_mapping(as_mapping(raw.get("resource")).get("labels"))  # Vertex AI's; a VM's are the entry's
    labels = (resource_labels, as_mapping(raw.get("labels")))
    task = next((str(label[contract.LOG_TASK]) for label in labels if contract.LOG_TASK in label), "")
    text = raw.get("textPayload")
    if not isinstance(text, str):  # Vertex AI writes jsonPayload.message
        payload = as_mapping(raw.get("jsonPayload") or raw.get("protoPayload"))
        message = payload.get("message")
        text = message if isinstance(message, str) else json.dumps(payload, ensure_ascii=False)
    name = str(raw.get("insertId") or text)
    return LogEntry(time, name, task, text, str(raw.get("severity") or "DEFAULT"))


def lines_in(entry: LogEntry) -> Iterator[Line]:
    """Yield the lines of an entry, which may be several."""
    for text in split_lines(entry.text):
        yield Line(entry.time / SECOND, entry.replica, text, entry.severity)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def next_page_token(answer: Any) -> str:
    """Return the token of the next page; empty on the last one. A page before the last one may have no entries."""
    return str(as_mapping(answer).get("nextPageToken") or "")


RFC3339: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def parse_rfc3339(text: Any) -> int | None:
    """Return an RFC 3339 time in Unix nanoseconds; None if it is malformed."""
    match = RFC3339.fullmatch(text) if isinstance(text, str) else None
    if not match:
        return None
    try:
        second = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    except ValueError:
        return None
    return to_nanoseconds(second.timestamp()) + int((match[2] or "0").ljust(9, "0"))


def to_nanoseconds(seconds: float) -> int:
    """Convert Unix seconds, rounded to the microsecond: a float holds no more digits of a current time."""
    return round(seconds * 1_000_000) * 1000
