"""The loopback HTTP servers: requests, answers that may be cut off, and connections that are reset or held."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit


class Server(ThreadingHTTPServer):
    """An HTTP server that closes the connections that clients keep open, and joins its threads at the end."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128  # pending connections: a client opens up to 16 at once

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), name=name)
        self.connections: set[socket.socket] = set()
        self.to_reset: set[socket.socket] = set()
        self.stopping = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        """Stop serving, and close all connections, also those that are accepted meanwhile."""
        self.stopping.set()
        self.shutdown()
        for connection in list(self.connections):
            _shut(connection)
        self.server_close()
        self.thread.join()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. One in `to_reset` is reset: unsent bytes are discarded, and an RST is sent, no FIN."""
        if request not in self.to_reset:
            super().shutdown_request(request)
            return
        self.to_reset.discard(request)
        request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that closed the connection; report any other error, which is a bug of the server."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """An HTTP/1.1 handler whose connections `Server` closes. It logs nothing."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True  # a body beyond the buffer would wait for a delayed ACK, 40 ms
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)
        if self.server.stopping.is_set():  # accepted too late for hang_up to see it
            _shut(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def read_body(self, headers: Mapping[str, str], most: int | None = None) -> bytes:
        """Return the request's body; at most `most` bytes unless it is chunked. `headers` are in lower case."""
        if headers.get("transfer-encoding", "").lower() != "chunked":
            length = int(headers.get("content-length", 0))
            return self.rfile.read(length if most is None else min(most, length))
        chunks = []
        while length := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the servers record the requests."""


class Head(NamedTuple):
    """A request's line and headers; `read` returns at most so many bytes of its body (None: all).

    The path is percent-encoded. Header names are in lower case; the values of a repeated one are joined with commas.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    read: Callable[[int | None], bytes]


@dataclass(frozen=True)
class Response:
    """An answer, how much of it is sent, and what happens to the connection."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds before anything is sent."""
    head: bool = True
    """True if status and headers are sent."""
    shown: int | None = None
    """How many bytes of the body are sent. None: all. Content-Length always has the full size."""
    then: Literal["next", "close", "reset", "hold"] = "next"
    """The connection afterwards: it accepts the next request, is closed, is reset, or stays open without an answer."""


def handler(serve: Callable[[Head], Response], clock: Callable[[], float] = time.time) -> type[BaseHTTPRequestHandler]:
    """Return an HTTP handler that passes requests to `serve` and sends the answers. `clock` is for the Date header."""

    class RequestHandler(Handler):
        def answer(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): ", ".join(self.headers.get_all(name, [])) for name in self.headers}
            head = Head(self.command, url.path, url.query, headers, lambda most: self.read_body(headers, most))
            response = serve(head)
            stopped = bool(response.wait) and self.server.stopping.wait(response.wait)
            if not stopped:
                self.send(response)
            self.close_connection = self.close_connection or stopped or response.then != "next"
            if response.then == "reset":
                self.server.to_reset.add(self.connection)
            while response.then == "hold" and self.connection.recv(1 << 16):
                continue  # until the client or the server closes the connection

        def send(self, response: Response) -> None:
            if response.head:
                self.send_response(response.status)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                if response.status != 204:
                    self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body[: response.shown])
            self.wfile.flush()

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - names that the base class requires

        def date_time_string(self, timestamp: float | None = None) -> str:
            """Return the Date header by the cloud's clock, which may differ from the client's."""
            return super().date_time_string(clock() if timestamp is None else timestamp)

    return RequestHandler


class LoopbackServer:
    """A service on loopback, as a context manager. `serve` answers its requests; `clock` is for the Date header."""

    def __init__(
        self, serve: Callable[[Head], Response], name: str, *, port: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._server = Server(port, handler(serve, clock), name)

    @property
    def host(self) -> str:
        """Return HOST:PORT."""
        return self._server.host

    @property
    def url(self) -> str:
        """Return the address without a trailing slash."""
        return f"http://{self.host}"

    def __enter__(self) -> Self:
        self._server.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._server.stop()


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client was quicker
        return
