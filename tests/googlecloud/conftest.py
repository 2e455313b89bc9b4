"""Fixtures: Google's own clients, connected to the loopback cloud."""

from __future__ import annotations

from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform_v1, compute_v1, storage

from launcher.testing.googlecloud import GoogleCloud


def storage_client() -> storage.Client:
    """Return a client of the cloud that STORAGE_EMULATOR_HOST names.

    Its bucket lookup in a separate thread is disabled. It would trigger faults planned for other requests, and would go
    on for two minutes after the cloud is closed, drawing random numbers during other tests.
    """
    client = storage.Client(project="my-project", credentials=AnonymousCredentials())
    client._bucket_metadata_cache = None
    return client


@pytest.fixture
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> storage.Bucket:
    """Return the bucket my-bucket of the SDK."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return storage_client().bucket("my-bucket")


@pytest.fixture
def client(cloud: GoogleCloud) -> aiplatform_v1.JobServiceClient:
    """Return Vertex AI's own client, over REST."""
    options = ClientOptions(api_endpoint=cloud.url)
    return aiplatform_v1.JobServiceClient(credentials=AnonymousCredentials(), transport="rest", client_options=options)


class Clients:
    """Compute Engine's own clients, over REST. They don't wait for operations on their own."""

    def __init__(self, cloud: GoogleCloud) -> None:
        self._options = {
            "credentials": AnonymousCredentials(),
            "client_options": ClientOptions(api_endpoint=cloud.url),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(compute_v1, f"{name}Client")(**self._options)


@pytest.fixture
def compute(cloud: GoogleCloud) -> Clients:
    """Return clients of the loopback cloud: `compute.Instances`, `compute.ZoneOperations`, …."""
    return Clients(cloud)
