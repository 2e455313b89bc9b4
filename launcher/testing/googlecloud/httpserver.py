"""The HTTP layer: pass requests to a function, send its answers, and break connections as requested."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, urlsplit

from launcher.testing.googlecloud.pieces import cut, size
from launcher.testing.googlecloud.wire import Request, Response
from launcher.testing.httpserver import Handler


def handler(
    serve: Callable[[Request], Response], clock: Callable[[], float] = time.time
) -> type[BaseHTTPRequestHandler]:
    """Return an HTTP handler that passes requests to `serve` and sends the answers. `clock` is for the Date header."""

    class RequestHandler(Handler):
        def answer(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = parameters(url.query)
            response = serve(Request(self.command, url.path, query, headers, self.read_body(headers)))
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
                    self.send_header("Content-Length", str(size(response.pieces)))
                self.end_headers()
            shown = response.pieces if response.shown is None else cut(response.pieces, 0, response.shown)
            for piece in shown if self.command != "HEAD" else ():
                self.wfile.write(piece)
            self.wfile.flush()

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - names that the base class requires

        def date_time_string(self, timestamp: float | None = None) -> str:
            """Return the Date header by the cloud's clock, which may differ from the client's."""
            return super().date_time_string(clock() if timestamp is None else timestamp)

    return RequestHandler


def parameters(query: str) -> dict[str, str]:
    """Return the query's parameters; the values of a repeated one are joined with commas."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        found[name] = f"{found[name]},{value}" if name in found else value
    return found
