"""Data in a bucket."""

from __future__ import annotations

import io
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from launch_train.common.config import parse
from launch_train.common.errors import OutputError, UnfitError, UsageError
from launch_train.common.storage import open_storage
from launch_train.common.storage.bucket import Object, Objects
from launch_train.common.storage.retry import RetryClock
from launch_train.data import gcs_cache, open_data
from launch_train.distributed.process_group import Ranks
from launcher.testing.googlecloud import Fault, GoogleCloud, Status

GET, LIST = "storage.objects.get", "storage.objects.list"
TREE = {"images/a/1.jpg": b"one", "images/a/2.jpg": b"two", "images/b/1.jpg": b"", "images-old/x": b"old"}


@pytest.fixture(autouse=True)
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage = open_storage("gs://my-bucket")
    for name, content in TREE.items():
        storage.write(name, content)
    cloud.requests.clear()


def below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(cloud: GoogleCloud) -> list[str]:
    """What for: lists, and the names of objects that were read."""
    names = [request.path.partition("/o/")[2].replace("%2F", "/") or "list" for request in cloud.requests]
    cloud.requests.clear()
    return sorted(names)


def test_a_folder_keeps_its_layout_and_costs_one_list_afterwards(cloud: GoogleCloud, tmp_path: Path) -> None:
    folder = gcs_cache.fetch("gs://my-bucket/images/", tmp_path)
    assert below(folder) == {"a/1.jpg": b"one", "a/2.jpg": b"two", "b/1.jpg": b""}
    assert asked(cloud) == ["images/a/1.jpg", "images/a/2.jpg", "list"]
    assert gcs_cache.fetch("gs://my-bucket/images", tmp_path) == folder
    assert asked(cloud) == ["list"]


def test_what_has_changed_is_read_anew_and_nothing_else(cloud: GoogleCloud, tmp_path: Path) -> None:
    first = gcs_cache.fetch("gs://my-bucket/images", tmp_path)
    open_storage("gs://my-bucket").write("images/a/2.jpg", b"another")
    open_storage("gs://my-bucket").delete("images/b/1.jpg")
    asked(cloud)
    second = gcs_cache.fetch("gs://my-bucket/images", tmp_path)
    assert below(second) == {"a/1.jpg": b"one", "a/2.jpg": b"another"}
    assert below(first)["a/2.jpg"] == b"two", "a run that reads it still has what it began with"
    assert asked(cloud) == ["images/a/2.jpg", "list"]


def test_one_object_is_a_file(cloud: GoogleCloud, tmp_path: Path) -> None:
    path = gcs_cache.fetch("gs://my-bucket/images/a/1.jpg", tmp_path)
    assert (path.name, path.read_bytes()) == ("1.jpg", b"one")
    whole = gcs_cache.fetch("gs://my-bucket", tmp_path)
    assert below(whole) == TREE


def test_a_large_object_comes_in_parts(cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch_train.common.storage.bucket.PART", 1000)
    content = os.urandom(3500)
    open_storage("gs://my-bucket").write("big", content)
    cloud.faults.add(Fault(GET, Status(503)))
    assert gcs_cache.fetch("gs://my-bucket/big", tmp_path).read_bytes() == content


def test_what_arrives_damaged_is_not_kept(cloud: GoogleCloud, tmp_path: Path) -> None:
    blob = cloud.objects.buckets["my-bucket"]["images/a/1.jpg"]
    folder = Objects("gs://my-bucket")
    (one,) = folder.objects("images/a/1.jpg")
    assert (one.size, one.version) == (3, str(blob.generation))
    with pytest.raises(OutputError, match=r"images/a/1.jpg was damaged in transit: its checksum is not AAAAAA=="):
        folder.fetch(one._replace(crc32c="AAAAAA=="), io.BytesIO())
    sink = io.BytesIO()
    folder.fetch(one, sink)
    assert sink.getvalue() == b"one"


def test_an_object_that_changes_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Objects.objects

    def late(self: Objects, prefix: str = "") -> list[Object]:
        found = real(self, prefix)
        open_storage("gs://my-bucket").write("images/a/1.jpg", b"changed")
        return found

    monkeypatch.setattr(Objects, "objects", late)
    with pytest.raises(UnfitError, match=r"^data: gs://my-bucket/images/a/1.jpg was changed or deleted while"):
        gcs_cache.fetch("gs://my-bucket/images", tmp_path)


def test_after_an_error_what_has_come_is_not_read_again(cloud: GoogleCloud, tmp_path: Path) -> None:
    fault = cloud.faults.add(Fault(GET, Status(403), name="images/a/2.jpg", times=None))
    with pytest.raises(UsageError, match=r"a/2.jpg"):
        gcs_cache.fetch("gs://my-bucket/images", tmp_path)
    assert cloud.faults.used[fault]
    cloud.faults.clear()
    asked(cloud)
    assert below(gcs_cache.fetch("gs://my-bucket/images", tmp_path))["a/1.jpg"] == b"one"
    assert asked(cloud) == ["images/a/2.jpg", "list"]
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://my-bucket/nothing", "^data: gs://my-bucket/nothing does not exist$"),
        ("gs://my-bucket/image", "does not exist"),
        ("gs://no-such-bucket/x", "^data: gs://no-such-bucket: bucket no-such-bucket does not exist"),
    ],
)
def test_what_is_not_there(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gcs_cache.fetch(url, tmp_path)


def test_who_may_not_read_is_told_so(cloud: GoogleCloud, tmp_path: Path) -> None:
    cloud.objects.deny("my-bucket", LIST)
    with pytest.raises(UsageError, match=r"^data: gs://my-bucket: .* lacks the permission storage.objects.list: "):
        gcs_cache.fetch("gs://my-bucket/images", tmp_path)


def test_a_bucket_that_does_not_answer(cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    world = RetryClock(lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(gcs_cache, "Objects", lambda url: Objects(url, world=world))
    cloud.faults.add(Fault(LIST, Status(503), times=None))
    with pytest.raises(UnfitError, match=r"^data: gs://my-bucket is unreachable, tried for 120 s"):
        gcs_cache.fetch("gs://my-bucket/images", tmp_path)


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 5, 5))
    with pytest.raises(UnfitError, match=r"^data: the disk is too small for 6.0B: 5.0B are free at"):
        gcs_cache.fetch("gs://my-bucket/images", tmp_path)


def test_a_disk_that_is_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_storage("gs://my-bucket").write("big", b"x" * (2 << 20))
    monkeypatch.setattr(gcs_cache, "ROOM", 10)
    with pytest.raises(UnfitError, match=r"can't be written: the disk is full \(.* MB of 1.0 MB are free"):
        gcs_cache.fetch("gs://my-bucket/big", small_disk)
    assert not list(small_disk.rglob(".tmp-*"))


def test_a_name_that_leads_elsewhere_is_refused(cloud: GoogleCloud, tmp_path: Path) -> None:
    cloud.objects.put("my-bucket", "odd/../../../x", b"x")
    with pytest.raises(UsageError, match=r"is not a valid file name"):
        gcs_cache.fetch("gs://my-bucket/odd", tmp_path)


def test_a_run_reads_text_from_a_bucket() -> None:
    open_storage("gs://my-bucket").write("text/a.txt", b"to be or not to be " * 200)
    source = open_data(parse({"data": "gs://my-bucket/text"}), Ranks())
    assert source.facts["data"] == "gs://my-bucket/text"
    assert source.facts["data_bytes"] == 3800
    with pytest.raises(UsageError, match=r"does not exist"):
        open_data(parse({"data": "gs://my-bucket/texts"}), Ranks())
