"""What `launch local` reads from the folder of a run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from launch_train.common.storage import LocalFolder, open_storage
from launch_train.common.storage.client import open_storage_client
from launch_train.runfolder import metrics_part
from launcher.errors import NotAuthorised
from launcher.runs.run_folder import read_results
from launcher.services.local.run_folder import opened
from launcher.testing.googlecloud import GoogleCloud


def test_a_folder_object_of_the_console_is_ignored(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cloud Storage's console shows folders by empty objects whose names end with a slash."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    storage = open_storage("gs://my-bucket/runs/r")
    storage.write(metrics_part(1, 0, 0, 0), b'{"step": 1, "loss": 0.5}\n')
    for name in ("runs/r/", "runs/r/metrics/", "runs/r/metrics/x/"):
        open_storage_client().bucket("my-bucket").blob(name).upload_from_string(b"")
    assert storage.list() == [metrics_part(1, 0, 0, 0)]
    found = read_results(storage)
    assert found
    assert [row["loss"] for row in found.rows] == [0.5]


class Together(LocalFolder):
    """Answers eight that read at once, and nobody who reads alone."""

    gate = threading.Barrier(8, timeout=10)

    def read(self, name: str) -> bytes:
        self.gate.wait()
        return super().read(name)


def test_parts_are_read_eight_at_a_time(tmp_path: Path) -> None:
    storage = Together(tmp_path)
    for part in range(16):
        storage.write(metrics_part(1, 0, 0, part), b'{"step": %d}\n' % (part + 1))
    found = read_results(storage)
    assert found
    assert [row["step"] for row in found.rows] == list(range(1, 17))


def test_a_run_without_metrics(tmp_path: Path) -> None:
    assert read_results(None) is None
    assert read_results(LocalFolder(tmp_path)) is None


def test_without_credentials_a_local_folder_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(NotAuthorised) as caught, opened("gs://my-bucket/runs/r"):
        pass
    assert "gcloud auth application-default login" in caught.value.hint
    assert "--output runs" in caught.value.hint
