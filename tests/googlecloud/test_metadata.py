"""A VM's metadata server, through Google's own libraries where possible."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from google.auth import compute_engine
from google.auth.transport.requests import Request

from launcher.testing.googlecloud import FakeClock, GoogleCloud, MetadataServer
from tests.googlecloud.conftest import Clients
from tests.googlecloud.test_compute import ZONE, insert


@pytest.fixture
def server(cloud: GoogleCloud, compute: Clients, clock: FakeClock) -> Iterator[MetadataServer]:
    """The metadata server of the running VM dev."""
    insert(compute)
    clock.advance(10)
    with MetadataServer(cloud, ZONE, "dev") as running:
        yield running


def get(server: MetadataServer, path: str, method: str = "GET", **more: Any) -> requests.Response:
    url = f"http://{server.host}/computeMetadata/v1/{path}"
    headers = {"Metadata-Flavor": "Google"}
    return requests.request(method, url, timeout=10, allow_redirects=False, **{"headers": headers, **more})


def test_a_vm_knows_who_it_is(server: MetadataServer) -> None:
    answers = {
        "instance/name": "dev",
        "instance/id": server.number,
        "instance/zone": "projects/123456789012/zones/us-central1-a",
        "instance/hostname": "dev.us-central1-a.c.my-project.internal",
        "instance/preempted": "FALSE",
        "instance/maintenance-event": "NONE",
        "instance/scheduling/preemptible": "TRUE",
        "instance/attributes/enable-guest-attributes": "TRUE",
        "instance/attributes/": "enable-guest-attributes\n",
        "instance/service-accounts/default/email": "dev@my-project.iam.gserviceaccount.com",
        "project/project-id": "my-project",
        "project/numeric-project-id": "123456789012",
    }
    assert {path: get(server, path).text for path in answers} == answers
    assert get(server, "instance/name").headers["Metadata-Flavor"] == "Google"
    shown = get(server, "instance/?recursive=true").json()
    assert shown["attributes"] == {"enable-guest-attributes": "TRUE"}
    assert shown["maintenanceEvent"] == "NONE"
    assert get(server, "instance/attributes/?recursive=true").json() == {"enable-guest-attributes": "TRUE"}
    assert [get(server, path).status_code for path in ("instance/attributes/no", "instance/attributes")] == [404, 301]


def test_googles_library_gets_a_token_that_the_cloud_takes(
    server: MetadataServer, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google.auth reads the address when it is imported, so it is set directly here."""
    from google.auth.compute_engine import _metadata

    monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", server.host)
    cloud.let_in("another")
    credentials = compute_engine.Credentials()
    credentials.refresh(Request())
    assert credentials.service_account_email == "dev@my-project.iam.gserviceaccount.com"
    link = f"{cloud.url}/compute/v1/projects/my-project/zones/{ZONE}/instances/dev"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(link, method="DELETE"))
    headers = {"Authorization": f"Bearer {credentials.token}"}
    with urllib.request.urlopen(urllib.request.Request(link, method="DELETE", headers=headers)) as answer:
        assert json.load(answer)["user"] == "dev@my-project.iam.gserviceaccount.com"


@pytest.mark.parametrize("known", [True, False])
def test_who_waits_hears_of_the_end_at_once(server: MetadataServer, cloud: GoogleCloud, known: bool) -> None:
    etag = get(server, "instance/preempted").headers["ETag"]
    more = f"&last_etag={etag}" if known else ""
    heard: list[str] = []
    path = f"instance/preempted?wait_for_change=true&timeout_sec=60{more}"
    waiting = threading.Thread(target=lambda: heard.append(get(server, path).text))
    before = len(server.requests)
    waiting.start()
    while len(server.requests) == before:
        pass
    threading.Timer(0.1, lambda: cloud.compute.preempt("dev")).start()
    waiting.join(10)
    assert heard == ["TRUE"]
    assert get(server, f"instance/preempted?wait_for_change=true{more or '&last_etag=0'}").text == "TRUE"
