"""entries:write on loopback: accepted and refused entries, and the effect of a lost answer."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from launcher.testing.googlecloud import GoogleCloud

WRITE = {"logName": "projects/my-project/logs/x", "resource": {"type": "gce_instance", "labels": {"instance_id": "7"}}}


def put(cloud: GoogleCloud, *entries: dict[str, Any], **more: Any) -> requests.Response:
    body = {**WRITE, "entries": entries, **more}
    return requests.post(f"{cloud.url}/v2/entries:write", json=body, timeout=10)


def refused(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_a_request_that_comes_again_doubles_nothing(cloud: GoogleCloud) -> None:
    for stamp in ("2023-11-14T22:13:20Z", "2023-11-14T22:13:20Z", "2023-11-14T22:13:21Z"):
        put(cloud, {"insertId": "1", "timestamp": stamp, "textPayload": "a"})
    assert len(cloud.logs.entries) == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"textPayload": "x" * 300_000}, "Log entry with size 293"),
        ({"textPayload": "x", "resource": {"type": "gce"}}, "Invalid resource: 'gce' with []"),
        ({"textPayload": "x", "timestamp": "2023-11-16T22:13:20Z"}, "Log entry timestamp is more than 1 day"),
        ({"textPayload": "x", "severity": "LOUD"}, "Invalid JSON payload received. Invalid enum value"),
        ({"text": "x"}, "Invalid JSON payload received. Object contains unknown field `text`"),
    ],
)
def test_entries_that_are_refused(cloud: GoogleCloud, entry: dict[str, Any], message: str) -> None:
    code, words = refused(put(cloud, entry, {"textPayload": "good"}))
    assert (code, words[: len(message)]) == (400, message)
    assert cloud.logs.entries == []
    put(cloud, entry, {"textPayload": "good"}, partialSuccess=True)
    assert len(cloud.logs.entries) == (0 if "JSON" in words else 1)
