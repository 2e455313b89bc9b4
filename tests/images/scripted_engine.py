"""A Docker engine that says what a test wrote down: the streams that a real one (20.10) sent, over a Unix socket."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit

API = "1.41"

BASE = "localhost:5055/base:bookworm"
TAG = "localhost:5055/team/train:1"
DIGEST = f"sha256:{'5' * 64}"


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    """Without the API's version."""
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """What an engine says: events make a stream, anything else one JSON document."""

    status: int = 200
    events: Iterable[Mapping[str, Any]] | None = None
    data: Any = None
    tail: str = ""
    """Text after the events."""
    cut: str = ""
    """Text that the stream ends with before its time: the engine dies in the midst of it."""


def failure(message: str, status: int) -> Answer:
    """An error as the engine's HTTP answer."""
    return Answer(status, data={"message": message})


class Engine(socketserver.ThreadingUnixStreamServer):
    """Answers by (method, path); an unknown image isn't there."""

    daemon_threads = True

    def __init__(self, socket: Path) -> None:
        super().__init__(str(socket), Handler)
        self.host = f"unix://{socket}"
        self.asked: list[Asked] = []
        self.answers: dict[tuple[str, str], list[Answer]] = {}
        self.says("GET", "/version", Answer(data={"ApiVersion": API, "MinAPIVersion": "1.12"}))
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def says(self, method: str, path: str, *answers: Answer) -> None:
        """What is answered there, one after the other; the last one from then on."""
        self.answers[method, path] = list(answers)

    def has(self, reference: str, architecture: str = "amd64") -> None:
        """There is such an image."""
        data = {"Id": f"sha256:{reference}", "Os": "linux", "Architecture": architecture}
        self.says("GET", f"/images/{reference}/json", Answer(data=data))

    def answer(self, asked: Asked) -> Answer:
        """What to say."""
        self.asked.append(asked)
        known = self.answers.get((asked.method, asked.path))
        if not known:
            return failure(f"No such image: {asked.path}", 404)
        return known.pop(0) if len(known) > 1 else known[0]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path).removeprefix(f"/v{API}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, path, dict(parse_qsl(parts.query)), dict(self.headers), body)
        self.say(self.server.answer(asked))

    def do_POST(self) -> None:
        self.do_GET()

    def say(self, answer: Answer) -> None:
        """Send it."""
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        if answer.events is None:
            body = json.dumps(answer.data).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in answer.events:
            self.chunk(json.dumps(event).encode() + b"\r\n")
        if answer.tail:
            self.chunk(answer.tail.encode())
        if answer.cut:
            self.wfile.write(f"{len(answer.cut) + 9:x}\r\n{answer.cut}".encode())
            self.close_connection = True
        else:
            self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        """A piece of a stream; an empty one ends it."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        """A Unix socket's peer has no address."""
        return ""
