"""Google's own client, pointed at the loopback cloud."""

from __future__ import annotations

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.googlecloud import GoogleCloud


@pytest.fixture
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> storage.Bucket:
    """The bucket my-bucket, as the SDK sees it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    client = storage.Client(project="my-project", credentials=AnonymousCredentials())
    client._bucket_metadata_cache = None  # else it reads the bucket in a thread of its own, and meets planned faults
    return client.bucket("my-bucket")
