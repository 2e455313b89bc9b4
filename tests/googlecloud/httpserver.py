"""HTTP: requests as data to a function, its answers back, with what becomes of the connection."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.googlecloud.pieces import cut, size
from tests.googlecloud.wire import Request, Response


class Server(ThreadingHTTPServer):
    """Waits for its threads at the end, and ends the connections that clients keep open."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128  # of connections that wait to be accepted: clients come with 16 at once

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.connections: set[socket.socket] = set()
        self.to_reset: set[socket.socket] = set()
        self.stopping = threading.Event()

    def hang_up(self) -> None:
        for connection in list(self.connections):
            _shut(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; one that is to be reset is closed with unsent bytes thrown away, and an RST for a FIN."""
        if request not in self.to_reset:
            super().shutdown_request(request)
            return
        self.to_reset.discard(request)
        request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a mistake in here."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client was quicker
        return


def handler(
    serve: Callable[[Request], Response], clock: Callable[[], float] = time.time
) -> type[BaseHTTPRequestHandler]:
    """What speaks HTTP: each request goes to `serve`, its answer is sent as it says. `clock` is for the header Date."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: no wait for a delayed ACK
        server: Server

        def setup(self) -> None:
            super().setup()
            self.server.connections.add(self.connection)
            if self.server.stopping.is_set():  # accepted too late for hang_up to see it
                _shut(self.connection)

        def finish(self) -> None:
            self.server.connections.discard(self.connection)
            super().finish()

        def answer(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            response = serve(Request(self.command, url.path, query, headers, self.read_body(headers)))
            stopped = bool(response.wait) and self.server.stopping.wait(response.wait)
            if not stopped:
                self.send(response)
            self.close_connection = self.close_connection or stopped or response.then != "next"
            if response.then == "reset":
                self.server.to_reset.add(self.connection)
            while response.then == "hold" and self.connection.recv(1 << 16):
                continue  # until the client or the server hangs up

        def send(self, response: Response) -> None:
            if response.head:
                self.send_response(response.status)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                if response.status != 204:
                    self.send_header("Content-Length", str(size(response.pieces)))
                self.end_headers()
            for piece in response.pieces if response.shown is None else cut(response.pieces, 0, response.shown):
                self.wfile.write(piece)
            self.wfile.flush()

        def read_body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(headers.get("content-length", 0)))
            chunks = []
            while length := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - the names that the base class looks for

        def date_time_string(self, timestamp: float | None = None) -> str:
            """For the header Date: the cloud's own time, which a client's clock needn't agree with."""
            return super().date_time_string(clock() if timestamp is None else timestamp)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Requests are in `requests`."""

    return Handler
