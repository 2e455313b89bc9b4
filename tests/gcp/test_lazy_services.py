"""Google's client packages import only the services that are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

USED = """
import sys
import launcher.gcp
from google.cloud import aiplatform_v1, compute_v1
assert aiplatform_v1.JobServiceClient.__module__ == "google.cloud.aiplatform_v1.services.job_service.client"
assert compute_v1.InstancesClient.__module__ == "google.cloud.compute_v1.services.instances.client"
from google.cloud.aiplatform_v1 import CustomJob
assert not hasattr(compute_v1, "__wrapped__") and not hasattr(aiplatform_v1, "__wrapped__")
from google.cloud.compute_v1 import ZoneOperationsClient
assert compute_v1.Instance(name="a").name == "a" and aiplatform_v1.JobState.JOB_STATE_QUEUED == 1
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport
names = {name.split(".")[4] for name in sys.modules if name.startswith("google.cloud.") and ".services." in name}
print(*sorted(names))
"""

WHOLE = """
import sys
import launcher.gcp
from google.cloud import compute_v1
from google.cloud.compute_v1 import *
assert compute_v1.__all__ and AcceleratorTypesClient is compute_v1.AcceleratorTypesClient
print(*(hasattr(compute_v1, name) for name in ("__version__", "nothing", "NothingClient", "compute")))
from google.cloud.aiplatform_v1 import JobServiceAsyncClient
try:
    from google.cloud.aiplatform_v1 import Nothing
except ImportError as error:
    print(error)
"""

THREADS = """
import threading
import launcher.gcp
from google.cloud import compute_v1
begun = threading.Event()
errors = []
def ask():
    begun.set()
    while whole.is_alive():
        try:
            compute_v1.DisksClient, compute_v1.__all__
        except AttributeError as error:
            errors.append(error)
whole = threading.Thread(target=lambda: (begun.wait(), compute_v1.__version__))
asking = threading.Thread(target=ask)
whole.start(), asking.start(), whole.join(), asking.join()
print(len(errors))
"""


def printed(code: str) -> list[str]:
    """Return the lines that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_only_the_services_in_use_are_imported() -> None:
    assert printed(USED) == ["instances job_service zone_operations"]


@pytest.mark.slow
def test_every_other_name_is_that_of_the_whole_package() -> None:
    flags, error = printed(WHOLE)
    assert flags == "True False False False"
    assert error.startswith("cannot import name 'Nothing' from 'google.cloud.aiplatform_v1'")


@pytest.mark.slow
def test_a_thread_that_asks_while_the_whole_package_is_imported_gets_its_answer() -> None:
    assert printed(THREADS) == ["0"]
