"""Refusals as data, by REST and by gRPC, and credentials from a file that somebody keeps fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from google.api_core.exceptions import GoogleAPICallError, from_http_response, from_http_status
from google.api_core.grpc_helpers import wrap_errors
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import RefreshError
from google.auth.transport.grpc import AuthMetadataPlugin
from google.auth.transport.requests import Request
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from grpc_status import rpc_status

from launcher.diagnosis import Refusal
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.gcp.api import Service, credentials, explain, http_date, open_session, refusal_of, retry_after, status_of
from launcher.testing.googlecloud import Fault, GoogleCloud, Status
from launcher.testing.googlecloud.faults import Effect, Serve, Step
from launcher.testing.googlecloud.wire import Call, Response

VERTEX = Service("aiplatform", "Vertex AI", "roles/aiplatform.user")
LOGGING = Service("logging", "Cloud Logging", "roles/logging.viewer")
LIST = "logging.entries.list"
QUOTA = (
    "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus"
)


def answered(cloud: GoogleCloud, effect: Effect) -> GoogleAPICallError:
    """What Google's REST clients raise at an answer."""
    cloud.faults.add(Fault(LIST, effect))
    session, endpoint = open_session(LOGGING, cloud.environ())
    error = from_http_response(session.post(f"{endpoint}/v2/entries:list", json={}))
    assert isinstance(error, GoogleAPICallError)
    return error


def test_a_refusal_by_rest(cloud: GoogleCloud) -> None:
    metadata = {"service": "aiplatform.googleapis.com", "consumer": "projects/32555940559"}
    effect = Status(403, message="It is\tdisabled.\n", info="SERVICE_DISABLED", metadata=metadata)
    assert refusal_of(answered(cloud, effect), VERTEX) == Refusal(
        code=403, message="It is disabled.", reason="SERVICE_DISABLED", metadata=metadata, service="aiplatform"
    )
    assert refusal_of(answered(cloud, Status(429, retry_after=7, message=QUOTA)), VERTEX) == Refusal(
        code=429, message=QUOTA, retry_after=7.0
    )


def test_an_older_apis_reason() -> None:
    errors = [{"reason": "quotaExceeded", "message": "…"}, {"reason": "other"}]
    error = from_http_status(403, "POST https://compute.googleapis.com/x: Quota 'A' exceeded.", errors=errors)
    found = refusal_of(error, Service("compute", "Compute Engine", ""))
    assert (found.reason, found.message, found.service) == ("quotaExceeded", "Quota 'A' exceeded.", "compute")


def test_refusals_that_say_little(cloud: GoogleCloud) -> None:
    found = refusal_of(answered(cloud, Status(502)), VERTEX)
    assert (found.code, found.reason, found.metadata) == (502, "", {})
    assert refusal_of(GoogleAPICallError("?"), VERTEX) == Refusal(code=0, message="?")
    assert len(refusal_of(from_http_status(400, "x" * 10_000), VERTEX).message) == 4000


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "30"}, (), 30),
        ({"Retry-After": "Wed, 15 Nov 2023 10:00:40 GMT", "Date": "Wed, 15 Nov 2023 10:00:00 GMT"}, (), 40),
        ({"Retry-After": "Wed, 15 Nov 2023 10:00:00 GMT", "Date": "Wed, 15 Nov 2023 10:00:40 GMT"}, (), 0),
        ({"Retry-After": "Wed, 15 Nov 2023 10:00:40 GMT"}, (), 0),
        ({"Retry-After": "-5"}, (), 0),
        ({"Retry-After": "soon"}, (), 0),
        ({}, ({"@type": "…/google.rpc.RetryInfo", "retryDelay": "2.5s"},), 2.5),
        ({}, ({"retryDelay": "x"}, "?", RetryInfo(retry_delay={"seconds": 3, "nanos": 500_000_000})), 3.5),
        ({}, (), 0),
    ],
)
def test_retry_after(headers: dict[str, str], details: tuple[Any, ...], seconds: float) -> None:
    class Answer:
        def __init__(self) -> None:
            self.headers = headers

    assert retry_after(from_http_status(429, "slower", response=Answer(), details=details)) == seconds


def test_the_answer_behind_an_error() -> None:
    answer = from_http_status(404, "Not Found")
    told, again = LaunchError("told"), LaunchError("told again")
    told.__cause__, again.__cause__ = answer, told
    assert [status_of(error) for error in (answer, told, again, LaunchError("none"))] == [404, 404, 404, 0]
    try:
        try:
            raise answer
        except GoogleAPICallError:
            raise told from told
    except LaunchError:
        assert status_of(told) == 404


def test_an_invalid_http_date() -> None:
    assert http_date("") is http_date("Someday, 99 Foo 2023") is None
    assert retry_after(None) == retry_after(ValueError("x")) == 0


# --- gRPC -----------------------------------------------------------------------------------------------------------


class Rpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A server that keeps the tokens it is shown, and refuses in Google's way."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.refusal: RpcStatus | None = None

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request: bytes, context: Any) -> bytes:
        self.seen.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.refusal:
            context.abort_with_status(rpc_status.to_status(self.refusal))
        return b""


@pytest.fixture
def rpc() -> Iterator[tuple[Rpc, str]]:
    handler = Rpc()
    server = grpc.server(ThreadPoolExecutor(1), handlers=(handler,))
    port = server.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None).wait()


def caller(address: str, who: Any) -> Callable[[], bytes]:
    """A call as Google's gRPC clients make it, as `who`."""
    token = grpc.metadata_call_credentials(AuthMetadataPlugin(who, Request()))
    channel = grpc.secure_channel(address, grpc.composite_channel_credentials(grpc.local_channel_credentials(), token))
    call = wrap_errors(channel.unary_unary("/google.cloud.aiplatform.v1.JobService/GetCustomJob"))
    return lambda: call(b"", timeout=5)


def packed(*messages: Any) -> list[AnyMessage]:
    found = []
    for message in messages:
        one = AnyMessage()
        one.Pack(message)
        found.append(one)
    return found


def test_a_refusal_by_grpc(rpc: tuple[Rpc, str]) -> None:
    handler, address = rpc
    info = ErrorInfo(reason="RATE_LIMIT_EXCEEDED", metadata={"quota_limit": "X"})
    details = packed(info, RetryInfo(retry_delay={"seconds": 4}))
    handler.refusal = RpcStatus(code=8, message=QUOTA, details=details)
    with pytest.raises(GoogleAPICallError) as raised:
        caller(address, AnonymousCredentials())()
    assert refusal_of(raised.value, VERTEX) == Refusal(
        code=429, message=QUOTA, reason="RATE_LIMIT_EXCEEDED", metadata={"quota_limit": "X"}, retry_after=4.0
    )


@pytest.mark.parametrize(
    ("code", "http", "kind"),
    [
        (3, 400, LaunchError),
        (4, 504, UnreachableError),
        (5, 404, LaunchError),
        (7, 403, NotAuthorised),
        (9, 400, LaunchError),
        (13, 500, UnreachableError),
        (14, 503, UnreachableError),
        (16, 401, NotAuthorised),
    ],
)
def test_grpcs_codes(rpc: tuple[Rpc, str], code: int, http: int, kind: type[LaunchError]) -> None:
    handler, address = rpc
    handler.refusal = RpcStatus(code=code, message="said")
    with pytest.raises(GoogleAPICallError) as raised:
        caller(address, AnonymousCredentials())()
    assert refusal_of(raised.value, VERTEX).code == http
    assert type(explain(raised.value, VERTEX, "p")) is kind


def test_a_token_that_can_not_be_made_is_no_outage(rpc: tuple[Rpc, str], caplog: pytest.LogCaptureFixture) -> None:
    class Expired(AnonymousCredentials):  # type: ignore[misc]  # google-auth has no types
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

        def before_request(self, *_: Any) -> None:
            raise RefreshError(self.text)

    for text, kind in (("invalid_grant: Bad Request", NotAuthorised), ("Connection reset", UnreachableError)):
        with pytest.raises(GoogleAPICallError) as raised:
            caller(rpc[1], Expired(text))()
        told = explain(raised.value, VERTEX, "p")
        assert type(told) is kind, raised.value


# --- The token file -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("ya29.one\n")
    return path


def environ_of(file: Path) -> dict[str, str]:
    return {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(file)}


def test_grpc_shows_the_newest_token(rpc: tuple[Rpc, str], file: Path) -> None:
    handler, address = rpc
    call = caller(address, credentials(environ_of(file), "https://x"))
    call()
    file.write_text("ya29.two")
    call()
    file.unlink()
    call()  # it is being replaced: the old one still may do
    file.write_text("")
    call()
    file.write_text("ya29.three")
    call()
    assert handler.seen == [f"Bearer ya29.{n}" for n in ("one", "two", "two", "two", "three")]


def test_rest_shows_the_newest_token(clock: Any) -> None:
    with GoogleCloud(clock=clock, tokens=set()) as cloud:
        cloud.let_in("one")
        session, endpoint = open_session(LOGGING, cloud.environ())
        ask = f"{endpoint}/v2/entries:list"
        body = {"resourceNames": ["projects/my-project"]}
        assert session.post(ask, json=body).status_code == 200
        cloud.tokens = {"two"}
        with pytest.raises(RefreshError, match="was rejected, and the file has no newer one") as raised:
            session.post(ask, json=body)
        assert isinstance(explain(raised.value, LOGGING, "p"), NotAuthorised)
        assert len(cloud.requests) == 2, "the same token is not shown again and again"
        cloud.let_in("two")
        assert session.post(ask, json=body).status_code == 200


@pytest.mark.parametrize("seen_by_another_thread", [False, True])
def test_a_token_that_comes_with_the_401(cloud: GoogleCloud, file: Path, seen_by_another_thread: bool) -> None:
    environ = {**cloud.environ(), "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "", **environ_of(file)}
    session, endpoint = open_session(LOGGING, environ)

    class Renew:
        step: ClassVar[Step | None] = None

        def __call__(self, call: Call, serve: Serve) -> Response:
            file.write_text("ya29.two")
            if seen_by_another_thread:
                session.credentials.before_request(None, "GET", "", {})
            return Status(401)(call, serve)

    cloud.faults.add(Fault(LIST, Renew()))
    assert session.post(f"{endpoint}/v2/entries:list", json={"resourceNames": ["projects/my-project"]}).ok
    assert session.credentials.token == "ya29.two"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe", b"two\nlines", "töken".encode()])
def test_a_file_without_a_token(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(NotAuthorised, match=r"(?s)can't be read from .*ACCESS_TOKEN_FILE names that file"):
        credentials(environ_of(file), "https://x")


def test_sources_of_credentials(file: Path) -> None:
    both = {**environ_of(file), "CLOUDSDK_AUTH_ACCESS_TOKEN": "ya29.x"}
    assert credentials(both, "https://x").token == "ya29.x"
    disabled = {**both, "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "True"}
    assert isinstance(credentials(disabled, "https://x"), AnonymousCredentials)
    assert isinstance(credentials({}, "http://127.0.0.1:1"), AnonymousCredentials)
    assert credentials({}, "https://x") is None


def test_a_failing_token_server_is_an_outage() -> None:
    assert isinstance(explain(RefreshError("503", retryable=True), VERTEX, "p"), UnreachableError)
    assert isinstance(explain(RefreshError("invalid_grant"), VERTEX, "p"), NotAuthorised)
    assert explain(ValueError("a bug"), VERTEX, "p") is None
