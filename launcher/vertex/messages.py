"""Vertex AI's CustomJob between Google's protobuf type and our data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.errors import LaunchError
from launcher.jobs.job import Failure, Job

NAME = re.compile(r"projects/[^/]+/locations/(?P<region>[^/]+)/customJobs/\d+")
ASKED = ("display_name", "job_spec", "labels", "encryption_spec")
"""The fields of a CustomJob that say what was asked for."""


def region_of(name: str) -> str:
    """The region in a job's resource name. Raises LaunchError."""
    if found := NAME.fullmatch(name):
        return found["region"]
    raise LaunchError(f"{name} is no custom job's name", "projects/PROJECT/locations/REGION/customJobs/NUMBER")


def message_of(body: Mapping[str, Any]) -> Any:
    """A plan's request as Google's type, whole: a field or value that the installed client doesn't know is an error."""
    from google.cloud.aiplatform_v1 import CustomJob
    from google.protobuf import json_format

    try:
        return CustomJob.wrap(json_format.ParseDict(dict(body), CustomJob.pb()()))
    except json_format.ParseError as error:
        raise LaunchError(
            f"the installed google-cloud-aiplatform doesn't know all of the request: {error}",
            "pip install --upgrade google-cloud-aiplatform",
        ) from error


def job_of(made: Any) -> Job:
    """A CustomJob as data."""
    from google.protobuf import json_format

    message = type(made).pb(made)
    asked = type(message)()
    asked.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        if field.name not in ASKED:
            asked.ClearField(field.name)
    return Job(
        name=message.name,
        region=(found["region"] if (found := NAME.fullmatch(message.name)) else ""),
        state=state_of(message),
        created=seconds(message.create_time),
        started=seconds(message.start_time) if message.HasField("start_time") else None,
        ended=seconds(message.end_time) if message.HasField("end_time") else None,
        error=Failure(code=message.error.code, message=message.error.message) if message.HasField("error") else None,
        labels=dict(message.labels),
        request=json_format.MessageToDict(asked),
    )


def state_of(message: Any) -> str:
    """QUEUED, RUNNING, …; one that the installed client doesn't know by its number."""
    known = message.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(message.state)
    return known.name.removeprefix("JOB_STATE_") if known else f"STATE {message.state}"


def seconds(timestamp: Any) -> float:
    """A protobuf Timestamp as Unix seconds."""
    return float(timestamp.seconds + timestamp.nanos / 1e9)
