"""Which differences between two recordings are named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.selftest.comparison import differences

JOB = {"name": "projects/1/customJobs/2", "state": "JOB_STATE_QUEUED", "labels": {"a": "b"}, "pools": [{"count": "1"}]}


def call(answer: Any, status: int = 200, operation: str = "GET /jobs/*") -> dict[str, Any]:
    return {"operation": operation, "status": status, "answer": answer}


@pytest.mark.parametrize(
    ("google", "told"),
    [
        ({}, []),
        ({"name": "projects/9/customJobs/7"}, []),
        ({"labels": {"other": "label"}}, []),
        ({"error": {"code": 8, "message": "x"}}, ["missing field error"]),
        ({"pools": [{"count": "1", "size": 1}]}, ["missing field pools[].size"]),
        ({"pools": [{"count": 1}]}, ["pools[].count is number, not string"]),
        ({"pools": {"count": "1"}}, ["pools is object, not list"]),
        ({"pools": []}, []),
        ({"state": "STATE_UNKNOWN"}, ["state has other values: STATE_UNKNOWN"]),
    ],
    ids=str,
)
def test_a_field(google: dict[str, Any], told: list[str]) -> None:
    found = [*differences([call({**JOB, **google})], [call(JOB)])]
    assert found == [f"GET /jobs/* 200: {one}" for one in told]


def test_a_list_that_is_empty_is_not_written() -> None:
    assert [*differences([call({})], [call({"jobs": [{"name": "a"}]})])] == []
    assert [*differences([call({"jobs": [{"name": "a"}]})], [call({})])] == ["GET /jobs/* 200: missing field jobs"]
