"""Google's own client, pointed at the loopback cloud."""

from __future__ import annotations

from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform_v1, compute_v1, storage

from tests.googlecloud import GoogleCloud


def storage_client() -> storage.Client:
    """A client of the cloud that STORAGE_EMULATOR_HOST names.

    Without its look at each bucket, in a thread of its own: that would meet faults planned for others, and goes on for
    two minutes after its cloud has gone, drawing random numbers in the middle of other tests.
    """
    client = storage.Client(project="my-project", credentials=AnonymousCredentials())
    client._bucket_metadata_cache = None
    return client


@pytest.fixture
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> storage.Bucket:
    """The bucket my-bucket, as the SDK sees it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return storage_client().bucket("my-bucket")


@pytest.fixture
def client(cloud: GoogleCloud) -> aiplatform_v1.JobServiceClient:
    """Vertex AI's own client, by REST."""
    options = ClientOptions(api_endpoint=cloud.url)
    return aiplatform_v1.JobServiceClient(credentials=AnonymousCredentials(), transport="rest", client_options=options)


class Clients:
    """Compute Engine's own clients, by REST; each asks by itself, and no operation is waited for unasked."""

    def __init__(self, cloud: GoogleCloud) -> None:
        self._options = {
            "credentials": AnonymousCredentials(),
            "client_options": ClientOptions(api_endpoint=cloud.url),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(compute_v1, f"{name}Client")(**self._options)


@pytest.fixture
def compute(cloud: GoogleCloud) -> Clients:
    """`compute.Instances`, `compute.ZoneOperations` …: a client of the loopback cloud."""
    return Clients(cloud)
