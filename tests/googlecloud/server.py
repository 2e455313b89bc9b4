"""The HTTP server: one address for all services, as data in and data out."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tests.googlecloud.compute import Compute
from tests.googlecloud.custom_jobs import LIFE, CustomJobs, Stage
from tests.googlecloud.errors import ApiError
from tests.googlecloud.storage import Objects, Storage
from tests.googlecloud.uploads import Uploads
from tests.googlecloud.wire import Recorded, Request, Response, dispatch, json_response


class GoogleCloud:
    """A Google Cloud with one project, from `with` to its end. All requests are kept in `requests`, in their order.

    `clock` answers Unix seconds. `script` is the life of each job that is created. `record` is a file to which each
    request is appended as a line of JSON.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        project: str = "my-project",
        number: str = "123456789012",
        buckets: tuple[str, ...] = ("my-bucket",),
        clock: Callable[[], float] = time.time,
        script: tuple[Stage, ...] = LIFE,
        record: Path | None = None,
    ) -> None:
        self.project = project
        self.record = record
        self.requests: list[Recorded] = []
        self.jobs = CustomJobs(project, number, clock, script)
        self.compute = Compute(project, number, clock, lambda: self.url)
        self.objects = Objects(buckets, clock)
        self.storage = Storage(self.objects, lambda: self.url)
        self.uploads = Uploads(self.objects, self.storage, lambda: self.url)
        self._routes = [*self.jobs.routes, *self.compute.routes, *self.storage.routes, *self.uploads.routes]
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _handler(self._serve))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="google-cloud")
        self._config = tempfile.TemporaryDirectory(prefix="gcloud-")

    @property
    def url(self) -> str:
        """The address of all services, without a slash at the end."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environ(self) -> dict[str, str]:
        """What a process needs in its environment so that gcloud and Google's clients come here."""
        endpoints = {
            "AIPLATFORM": f"{self.url}/",
            "COMPUTE": f"{self.url}/compute/v1/",
            "STORAGE": f"{self.url}/storage/v1/",
        }
        return {
            "CLOUDSDK_CONFIG": self._config.name,
            "CLOUDSDK_CORE_PROJECT": self.project,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "STORAGE_EMULATOR_HOST": self.url,
            **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": value for name, value in endpoints.items()},
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()
        self._config.cleanup()

    def _serve(self, request: Request) -> Response:
        with self._lock:
            self._keep(request)
            try:
                response = dispatch(self._routes, request)
            except ApiError as error:
                return json_response(error.body(), error.code)
        if response is None:
            message = f"The loopback cloud has no {request.method} {request.path}."
            return json_response(ApiError(404, message, reason="notFound").body(), 404)
        return response

    def _keep(self, request: Request) -> None:
        try:
            body: Any = json.loads(request.body)
        except ValueError:
            body = None
        kept = Recorded(request.method, request.path, body, request.query)
        self.requests.append(kept)
        if self.record:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept._asdict()) + "\n")


class _Server(ThreadingHTTPServer):
    """Waits for its threads at the end, and ends the connections that clients keep open."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.connections: set[socket.socket] = set()

    def hang_up(self) -> None:
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the client was quicker
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _handler(serve: Callable[[Request], Response]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: no wait for a delayed ACK
        server: _Server

        def setup(self) -> None:
            super().setup()
            self.server.connections.add(self.connection)

        def finish(self) -> None:
            self.server.connections.discard(self.connection)
            super().finish()

        def answer(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            request = Request(self.command, url.path, query, headers, self.read_body(headers))
            response = serve(request)
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            if response.status != 204:
                self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        def read_body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - the names that the base class looks for

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Requests are in `requests`."""

    return Handler
