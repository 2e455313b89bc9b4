"""The base of the loopback HTTP servers."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
        """Return HOST:PORT."""
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


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client was quicker
        return
