"""A metadata server of one VM, as far as its notices go: hanging requests, and what may be wrong with an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from launcher.testing.httpserver import Server

QUIET = {"instance/preempted": "FALSE", "instance/maintenance-event": "NONE"}


class Metadata:
    """Its keys' values change with `set`. Each fault that is planned for a key spoils one answer: a status code,
    `cut` (fewer bytes than promised), `torn` (the same, unnoticed), `stranger` (no metadata server), `reset` or `noise`
    (no HTTP). `hold` off: it answers at once, whatever was asked."""

    def __init__(self) -> None:
        self.hold = True
        self.requests: list[str] = []
        self.faults: dict[str, list[int | str]] = {key: [] for key in QUIET}
        self._values = dict(QUIET)
        self._closed = False
        self._news = threading.Condition()
        self._server = Server(0, _handler(self), "metadata")
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        return self._server.host

    def set(self, key: str, value: str) -> None:
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def asked(self, key: str, etag: str, seconds: float) -> str:
        """The value, once its ETag (the value itself, here) is another than `etag`."""
        with self._news:
            self.requests.append(key)
            if self.hold:
                self._news.wait_for(lambda: self._closed or self._values[key] != etag, seconds)
            return self._values[key]

    @contextmanager
    def serving(self) -> Iterator[Metadata]:
        self._server.thread.start()
        yield self
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._server.stop()


def _handler(metadata: Metadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            key, query = url.path.removeprefix("/computeMetadata/v1/"), parse_qs(url.query)
            if self.headers["Metadata-Flavor"] != "Google":
                self.send_error(403)
            elif metadata.faults.get(key):
                metadata.requests.append(key)
                self._spoil(metadata.faults[key].pop(0), key)
            else:
                assert query["wait_for_change"] == ["true"]
                self._answer(metadata.asked(key, query["last_etag"][0], float(query["timeout_sec"][0])))

        def _answer(self, value: str, *, shown: str = "", flavor: bool = True, length: bool = True) -> None:
            self.send_response(200)
            if flavor:
                self.send_header("Metadata-Flavor", "Google")
            if length:
                self.send_header("Content-Length", str(len(value)))
            self.send_header("ETag", value)
            self.end_headers()
            self.wfile.write((shown or value).encode())

        def _spoil(self, fault: int | str, key: str) -> None:
            value = metadata._values[key]
            if isinstance(fault, int):
                self.send_error(fault)
            elif fault == "cut":
                self._answer(value, shown=value[:-2])
            elif fault == "torn":
                self._answer(value, shown=value[:-2], length=False)
            elif fault == "stranger":
                self._answer("TRUE", flavor=False)
            elif fault == "noise":
                self.wfile.write(b"no HTTP\r\n\r\n")
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler
