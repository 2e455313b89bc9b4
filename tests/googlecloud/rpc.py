"""The jobs API over gRPC, for clients that can't use REST at an address without TLS.

Each call is converted to the equivalent REST request, so both use one service with its faults and tokens. A fault that
affects HTTP's bytes appears to a gRPC client as a broken connection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import grpc
from google.api_core import path_template
from google.cloud import aiplatform_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from launcher.testing.googlecloud.server import GoogleCloud
from launcher.testing.googlecloud.wire import Request, Response

SERVICE = "google.cloud.aiplatform.v1.JobService"
DETAILS = {
    "type.googleapis.com/google.rpc.ErrorInfo": error_details_pb2.ErrorInfo,
    "type.googleapis.com/google.rpc.BadRequest": error_details_pb2.BadRequest,
}
BROKEN = {"close": "Socket closed", "reset": "Connection reset by peer", "hold": "Deadline Exceeded"}
"""Messages of gRPC clients by the fate of the connection."""
CODES = {408: "UNAVAILABLE", 410: "NOT_FOUND", 502: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
"""Codes for answers of a proxy, which are not JSON."""


class Method(NamedTuple):
    """The request and answer types of a call (protobuf), and its rule of google.api.http: verb, URI and body."""

    request: Any
    answer: Any
    verb: str
    uri: str
    body: str = ""


PARENT = "/v1/{parent=projects/*/locations/*}/customJobs"
NAME = "/v1/{name=projects/*/locations/*/customJobs/*}"
JOB, JOBS = aiplatform_v1.CustomJob.pb(), aiplatform_v1.ListCustomJobsResponse.pb()
METHODS = {
    "CreateCustomJob": Method(aiplatform_v1.CreateCustomJobRequest.pb(), JOB, "post", PARENT, "custom_job"),
    "GetCustomJob": Method(aiplatform_v1.GetCustomJobRequest.pb(), JOB, "get", NAME),
    "ListCustomJobs": Method(aiplatform_v1.ListCustomJobsRequest.pb(), JOBS, "get", PARENT),
    "CancelCustomJob": Method(aiplatform_v1.CancelCustomJobRequest.pb(), empty_pb2.Empty, "post", NAME + ":cancel"),
    "DeleteCustomJob": Method(aiplatform_v1.DeleteCustomJobRequest.pb(), operations_pb2.Operation, "delete", NAME),
}


@contextmanager
def serve_grpc(cloud: GoogleCloud) -> Iterator[str]:
    """Yield the address for grpc.insecure_channel."""
    pool = ThreadPoolExecutor(16, thread_name_prefix="grpc")
    server = grpc.server(pool)
    handlers = {name: _handler(cloud, method) for name, method in METHODS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
        pool.shutdown()


def _handler(cloud: GoogleCloud, method: Method) -> Any:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        rule = {"method": method.verb, "uri": method.uri, **({"body": method.body} if method.body else {})}
        call = path_template.transcode([rule], request)
        body = json_format.MessageToJson(call["body"]).encode() if "body" in call else b""
        query = {name: str(value) for name, value in json_format.MessageToDict(call["query_params"]).items()}
        headers = {key: str(value) for key, value in context.invocation_metadata()}
        return _said(
            cloud.serve(Request(method.verb.upper(), call["uri"], query, headers, body)), method.answer(), context
        )

    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=method.request.FromString, response_serializer=method.answer.SerializeToString
    )


def _said(response: Response, message: Any, context: grpc.ServicerContext) -> Any:
    """Return the answer as protobuf. A refusal or a broken connection aborts the call instead."""
    _wait(response.wait, context)
    if response.then == "hold":
        _wait(float("inf"), context)
    if response.then != "next":
        context.abort(grpc.StatusCode.UNAVAILABLE, BROKEN[response.then])
    text = response.body
    if response.status != 200:
        _refuse(response.status, text, context)
    try:
        return json_format.Parse(text, message)
    except (json_format.ParseError, ValueError):
        context.abort(grpc.StatusCode.INTERNAL, "Failed parsing HTTP/2")


def _wait(seconds: float, context: grpc.ServicerContext) -> None:
    """Wait for `seconds`, or until the client has cancelled the call."""
    until = time.monotonic() + seconds
    while context.is_active() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))


def _refuse(status: int, text: bytes, context: grpc.ServicerContext) -> NoReturn:
    """Abort with google.rpc.Status, whose details are sent in the trailers."""
    try:
        error = json.loads(text)["error"]
    except ValueError:
        error = {"status": CODES.get(status, "UNKNOWN"), "message": text.decode(errors="replace")}
    status_message = status_pb2.Status(code=code_pb2.Code.Value(error["status"]), message=error["message"])
    for detail in error.get("details", ()):
        content = {name: value for name, value in detail.items() if name != "@type"}
        status_message.details.add().Pack(json_format.ParseDict(content, DETAILS[detail["@type"]]()))
    context.abort_with_status(rpc_status.to_status(status_message))
    raise AssertionError("abort_with_status raises")
