"""Create, find (by label) and delete the selftest's buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.gcp.api import Service, explain

SERVICE: Final = Service("storage", "Cloud Storage", "roles/storage.admin")
SECONDS: Final = {"timeout": 30.0, "retry": None}


def create(name: str, project: str, region: str, labels: Mapping[str, str]) -> None:
    """Create a bucket without soft delete. Raises LaunchError."""
    with launch_errors(project):
        client = opened()
        bucket = client.bucket(name)
        bucket.labels = dict(labels)
        bucket.iam_configuration.uniform_bucket_level_access_enabled = True
        bucket.soft_delete_policy.retention_duration_seconds = 0
        client.create_bucket(bucket, project=project, location=region, **SECONDS)


def labelled(project: str, prefix: str, label: str) -> list[str]:
    """Return the names of a project's buckets that begin with `prefix` and have `label`. Raises LaunchError."""
    with launch_errors(project):
        buckets = opened().list_buckets(project=project, prefix=prefix, **SECONDS)
        return [
            str(bucket.name) for bucket in buckets if label in bucket.labels and str(bucket.name).startswith(prefix)
        ]


def delete(project: str, name: str) -> None:
    """Delete a bucket with all objects in it. Raises LaunchError."""
    with launch_errors(project):
        client = opened()
        for blob in client.list_blobs(name, **SECONDS):
            blob.delete(**SECONDS)
        client.bucket(name).delete(**SECONDS)


def opened() -> Any:
    """Return Google's client."""
    from launch_train.common.storage.client import open_client

    return open_client()


@contextmanager
def launch_errors(project: str) -> Iterator[None]:
    """Raise the client's errors as LaunchError."""
    from launch_train.common.storage import OutputError

    try:
        yield
    except OutputError as error:
        raise LaunchError(str(error)) from error
    except Exception as error:
        if (explained := explain(error, SERVICE, project)) is None:
            raise
        raise explained from error
