"""Cloud Storage on loopback, through Google's own client."""

from __future__ import annotations

import io
import os

import pytest
import requests
from google.api_core.exceptions import BadRequest, NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.googlecloud import GoogleCloud


@pytest.fixture
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> storage.Bucket:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    client = storage.Client(project="my-project", credentials=AnonymousCredentials())
    return client.bucket("my-bucket")


@pytest.mark.parametrize("data", [b"", b"text\r\n--==boundary\r\n\r\n", bytes(range(256)) * 100])
def test_what_is_uploaded_comes_back(bucket: storage.Bucket, data: bytes) -> None:
    blob = bucket.blob("runs/a b/ü%2F.bin")
    blob.metadata = {"attempt": "1"}
    blob.upload_from_string(data, content_type="application/x-test")
    again = bucket.get_blob("runs/a b/ü%2F.bin")
    assert again.download_as_bytes() == data
    assert (again.size, again.content_type, again.metadata) == (len(data), "application/x-test", {"attempt": "1"})


@pytest.mark.parametrize("checksum", ["crc32c", "md5"])
def test_checksums_are_right(bucket: storage.Bucket, checksum: str) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string(os.urandom(5000), checksum=checksum)
    assert len(blob.download_as_bytes(checksum=checksum)) == 5000
    assert len(blob.download_as_bytes(start=10, end=19)) == 10


def test_a_wrong_checksum_is_refused(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    blob = bucket.blob("a")
    blob.md5_hash = "AAAAAAAAAAAAAAAAAAAAAA=="
    with pytest.raises(BadRequest, match="doesn't match calculated MD5"):
        blob.upload_from_string(b"data", checksum=None)
    assert not cloud.objects.buckets["my-bucket"]


def test_only_one_create_wins(bucket: storage.Bucket) -> None:
    bucket.blob("lock").upload_from_string(b"first", if_generation_match=0)
    with pytest.raises(PreconditionFailed, match="At least one of the pre-conditions"):
        bucket.blob("lock").upload_from_string(b"second", if_generation_match=0)
    assert bucket.blob("lock").download_as_bytes() == b"first"


def test_compare_and_swap(bucket: storage.Bucket) -> None:
    blob = bucket.blob("claim")
    blob.upload_from_string(b"1")
    generation = blob.generation
    blob.upload_from_string(b"2", if_generation_match=generation)
    assert blob.generation > generation
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"3", if_generation_match=generation)
    with pytest.raises(PreconditionFailed):
        blob.delete(if_generation_match=generation)
    blob.delete(if_generation_match=blob.generation)
    assert not blob.exists()


def test_a_large_file_is_uploaded_in_chunks(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    data = os.urandom(3 * 256 * 1024 + 17)
    blob = bucket.blob("checkpoint", chunk_size=256 * 1024)
    blob.upload_from_file(io.BytesIO(data))  # of unknown size: the client's resumable upload
    assert blob.download_as_bytes() == data
    assert [request.method for request in cloud.requests].count("PUT") == 4


def test_a_resumable_upload_keeps_its_preconditions(bucket: storage.Bucket) -> None:
    bucket.blob("part").upload_from_string(b"there")
    blob = bucket.blob("part", chunk_size=256 * 1024)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_file(io.BytesIO(b"x" * 300_000), if_generation_match=0)
    assert bucket.blob("part").download_as_bytes() == b"there"


def test_lists_have_prefixes_and_pages(bucket: storage.Bucket) -> None:
    for name in ("b", "a/2", "a/1", "a/c/3", "ab"):
        bucket.blob(name).upload_from_string(b"")
    assert [blob.name for blob in bucket.list_blobs(page_size=2)] == ["a/1", "a/2", "a/c/3", "ab", "b"]
    assert [blob.name for blob in bucket.list_blobs(prefix="a/")] == ["a/1", "a/2", "a/c/3"]
    folder = bucket.list_blobs(prefix="a/", delimiter="/")
    assert [blob.name for blob in folder] == ["a/1", "a/2"]
    assert folder.prefixes == {"a/c/"}


def test_what_is_not_there(bucket: storage.Bucket) -> None:
    assert bucket.get_blob("none") is None
    assert bucket.exists()
    with pytest.raises(NotFound):
        bucket.blob("none").download_as_bytes()
    with pytest.raises(NotFound, match="bucket does not exist"):
        bucket.client.bucket("other").blob("a").upload_from_string(b"")


def test_media_upload(cloud: GoogleCloud, bucket: storage.Bucket) -> None:
    url = f"{cloud.url}/upload/storage/v1/b/my-bucket/o?uploadType=media&name=a%2Fb"
    answer = requests.post(url, data=b"raw", headers={"Content-Type": "text/plain"}, timeout=5)
    assert answer.json()["size"] == "3"
    assert bucket.blob("a/b").download_as_bytes() == b"raw"


def test_an_unknown_parameter_is_refused(cloud: GoogleCloud) -> None:
    answer = requests.get(f"{cloud.url}/storage/v1/b/my-bucket/o?matchGlob=**", timeout=5)
    assert answer.status_code == 400
    assert "matchGlob" in answer.json()["error"]["message"]
