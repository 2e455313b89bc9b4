"""What is kept of requests and answers, by REST and by gRPC."""

from __future__ import annotations

import grpc
import pytest
import requests

from launcher.clock import Clock
from launcher.errors import LaunchError
from launcher.selftest.recording import ALIKE, Recorder, note_http, recorded, template
from launcher.services.compute.client import Compute
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, parse_custom_job
from tests.googlecloud.rpc import serve_grpc
from tests.services.test_vertex import BODY


def test_paths_lose_their_names() -> None:
    for path, known in (
        ("/v1/projects/p/locations/us-central1/customJobs/12:cancel", "/v1/projects/*/locations/*/customJobs/*:cancel"),
        ("/compute/v1/projects/p/zones/z/instances/n/stop", "/compute/v1/projects/*/zones/*/instances/*/stop"),
        ("/compute/v1/projects/p/global/images/family/f", "/compute/v1/projects/*/global/images/family/*"),
        ("/storage/v1/b/bucket/o/a%2Fb", "/storage/v1/b/*/o/*"),
        ("/v2/p/r/train/manifests/sha256:0", "/v2/*/manifests/*"),
        ("/v1/users/me@example.com:importSshPublicKey", "/v1/users/*:importSshPublicKey"),
        ("/v2/entries:list", "/v2/entries:list"),
    ):  # fmt: skip
        assert template(path) == known


def test_rest_and_its_refusals(cloud: GoogleCloud, clock: FakeClock) -> None:
    recorder = Recorder()
    vertex = Vertex("my-project", cloud.environ(), Clock(clock, clock.advance))
    with recorded(recorder):
        recorder.step = "cpu"
        made = vertex.create_in("us-central1", BODY)
        for _ in range(ALIKE + 2):
            vertex.get(made.name)
        with pytest.raises(LaunchError):
            vertex.get(f"{made.name}0")
    vertex.get(made.name)
    kept = [(call["operation"], call["status"]) for call in recorder.calls]
    jobs = "/v1/projects/*/locations/*/customJobs"
    assert kept == [(f"POST {jobs}", 200), *[(f"GET {jobs}/*", 200)] * ALIKE, (f"GET {jobs}/*", 404)]
    assert recorder.calls[0]["request"]["displayName"] == BODY["displayName"]
    assert recorder.calls[0]["answer"]["name"] == made.name
    assert "headers" not in recorder.calls[0]


def test_grpc_is_kept_as_rest_is(cloud: GoogleCloud, clock: FakeClock) -> None:
    """The same calls, so that both can be compared."""
    kept = []
    with serve_grpc(cloud) as address, grpc.insecure_channel(address) as channel:
        for way in (None, channel):
            recorder = Recorder()
            with recorded(recorder):
                vertex = Vertex("my-project", cloud.environ(), Clock(clock, clock.advance), way)
                made = vertex.create_in("us-central1", BODY)
                vertex.find("labels.launch-run:*", ["us-central1"])
                vertex.cancel(made.name)
                with pytest.raises(LaunchError):
                    vertex.get(f"{made.name}0")
                vertex.delete(made.name)
            assert recorder.calls[-1]["operation"].startswith("DELETE ")
            kept.append([(call["operation"], call["status"], call["request"]) for call in recorder.calls])
            assert recorder.calls[0]["answer"]["state"] == "JOB_STATE_QUEUED"
            assert len(recorder.calls[1]["answer"]["customJobs"]) == 1
    rest, by_grpc = kept
    assert [one[:2] for one in rest] == [one[:2] for one in by_grpc]
    assert parse_custom_job(rest[0][2]) == parse_custom_job(by_grpc[0][2])


def test_a_connection_that_is_lost_is_kept(cloud: GoogleCloud, clock: FakeClock) -> None:
    cloud.faults.add(Fault("aiplatform.*", Reset(), times=1))
    recorder = Recorder()
    with recorded(recorder):
        Vertex("my-project", cloud.environ(), Clock(clock, clock.advance)).find("", ["us-central1"])
    lost, found = recorder.calls
    assert (lost["status"], found["status"]) == (None, 200)
    assert "Connection" in lost["error"]
    cloud.faults.add(Fault("compute.*", Reset(), times=1))
    with recorded(recorder):
        Compute("my-project", cloud.environ(), Clock(clock, clock.advance)).instances()
    assert [(call["status"], "Connection" in call["error"]) for call in recorder.calls[2:]] == [
        (None, True),
        (200, False),
    ]


@pytest.mark.parametrize(
    "url",
    [
        "https://oauth2.googleapis.com/token",
        "https://sts.googleapis.com/v1/token",
        "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/a:generateAccessToken",
        "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/identity?audience=s3cr3t",
        "http://127.0.0.1:99/computeMetadata/v1/project/attributes/",
        "https://us-docker.pkg.dev/v2/token?account=s3cr3t",
    ],
)
def test_no_body_of_a_token_endpoint_is_kept(url: str) -> None:
    recorder = Recorder()
    request = requests.Request("POST", url, json={"assertion": "s3cr3t"}).prepare()
    note_http(recorder, request, 200, seconds=0.1, answer={"value": "s3cr3t"})
    assert "s3cr3t" not in str(recorder.calls)
    assert recorder.calls[0]["status"] == 200
