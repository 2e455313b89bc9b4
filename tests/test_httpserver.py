"""The HTTP servers of the tests put no traceback into the output of a run that is green."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from launcher.testing.httpserver import Handler, Server


def hung_up(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    """Ask a server, and go away before its answer."""
    asked, gone = threading.Event(), threading.Event()

    class Late(Handler):
        def do_GET(self) -> None:
            asked.set()
            gone.wait(10)
            answer(self)

    server = Server(0, Late, "late")
    server.thread.start()
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asked.wait(10)
    gone.set()
    server.stop()


def test_a_disconnected_client_is_not_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def late(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(10):
            handler.wfile.write(bytes(1 << 20))

    hung_up(late)
    assert capfd.readouterr().err == ""


def test_an_error_of_the_server_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    hung_up(lambda handler: handler.send_header("a", str(int("no number"))))
    assert "ValueError" in capfd.readouterr().err
