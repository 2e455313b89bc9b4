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


def test_what_is_written_is_read(cloud: GoogleCloud) -> None:
    own = {"insertId": "1", "timestamp": "2023-11-14T22:13:20.500Z", "severity": "ERROR", "labels": {"a": "own"}}
    answer = put(cloud, {**own, "jsonPayload": {"message": ""}}, {"textPayload": "b"}, labels={"a": "all", "b-c": "d"})
    assert (answer.status_code, answer.json()) == (200, {})
    first, second = [entry.shown for entry in cloud.logs.entries]
    assert first["labels"] == {"a": "own", "b-c": "d"}
    assert (first["jsonPayload"], first["severity"], first["timestamp"]) == ({"message": ""}, "ERROR", own["timestamp"])
    assert (second["labels"]["a"], second["severity"], second["resource"]) == ("all", "DEFAULT", WRITE["resource"])
    body = {"resourceNames": ["projects/my-project"], "filter": 'labels."b-c"="d" AND resource.labels.instance_id="7"'}
    found = requests.post(f"{cloud.url}/v2/entries:list", json=body, timeout=10).json()
    assert [entry.get("insertId") for entry in found["entries"]] == [second["insertId"], "1"]
    bare = requests.post(f"{cloud.url}/v2/entries:list", json=body | {"filter": 'labels.b-c="d"'}, timeout=10)
    assert bare.status_code == 400


def test_a_request_that_comes_again_doubles_nothing(cloud: GoogleCloud) -> None:
    for stamp in ("2023-11-14T22:13:20Z", "2023-11-14T22:13:20Z", "2023-11-14T22:13:21Z"):
        put(cloud, {"insertId": "1", "timestamp": stamp, "textPayload": "a"})
    assert len(cloud.logs.entries) == 2


def test_who_may_not_write(cloud: GoogleCloud) -> None:
    denied = (403, "Permission 'logging.logEntries.create' denied on resource (or it may not exist).")
    assert refused(put(cloud, {"textPayload": "a"}, logName="projects/other/logs/x")) == denied
    cloud.logs.closed = True
    assert refused(put(cloud, {"textPayload": "a"}, partialSuccess=True)) == denied
    assert cloud.logs.entries == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"textPayload": "x" * 300_000}, "Log entry with size 293.0K exceeds maximum size of 256.0K"),
        ({"textPayload": "x", "resource": {"type": "gce"}}, "Invalid resource: 'gce' with []"),
        ({"textPayload": "x", "timestamp": "2023-11-16T22:13:20Z"}, "Log entry timestamp is more than 1 day"),
        ({"textPayload": "x", "severity": "LOUD"}, "Invalid value at 'request.entries[0].severity'"),
        ({"text": "x"}, 'Invalid JSON payload received. Unknown name "text"'),
    ],
)
def test_entries_that_are_refused(cloud: GoogleCloud, entry: dict[str, Any], message: str) -> None:
    code, words = refused(put(cloud, entry, {"textPayload": "good"}))
    assert (code, words[: len(message)]) == (400, message)
    assert cloud.logs.entries == []
    put(cloud, entry, {"textPayload": "good"}, partialSuccess=True)
    assert len(cloud.logs.entries) == (0 if words.startswith("Invalid value") or "JSON" in words else 1)
