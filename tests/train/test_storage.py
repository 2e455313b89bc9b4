from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from train.errors import OutputError
from train.storage import LocalFolder, Storage, open_storage

if TYPE_CHECKING:
    from tests.googlecloud import GoogleCloud
    from tests.googlecloud.wire import Request, Response


OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"


@pytest.fixture(params=["local", "emulator", "override"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """The same tests for both kinds; the bucket is on loopback, behind Google's own client, named in both ways."""
    if request.param == "local":
        return open_storage(str(tmp_path / "runs" / "r-1"))
    cloud: GoogleCloud = request.getfixturevalue("cloud")
    if request.param == "emulator":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    else:
        monkeypatch.setenv(OVERRIDE, f"{cloud.url}/storage/v1/")
    return open_storage("gs://my-bucket/runs/r-1")


def test_what_is_written_comes_back(storage: Storage) -> None:
    storage.write("a/b.bin", b"\0\xff" * 1000)
    assert storage.read("a/b.bin") == b"\0\xff" * 1000
    storage.write("a/b.bin", b"")
    assert storage.read("a/b.bin") == b""


def test_create_never_replaces(storage: Storage) -> None:
    storage.write("a/b", b"first", create=True)
    with pytest.raises(FileExistsError):
        storage.write("a/b", b"second", create=True)
    assert storage.read("a/b") == b"first"
    storage.write("a/b", b"third")
    assert storage.read("a/b") == b"third"


def test_a_name_that_is_not_there(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    assert storage.list() == []


def test_names_are_listed_by_prefix_and_sorted(storage: Storage) -> None:
    for name in ("m/2", "m/10", "c/x/y", "top"):
        storage.write(name, b"")
    assert storage.list() == ["c/x/y", "m/10", "m/2", "top"]
    assert storage.list("m/") == ["m/10", "m/2"]
    assert storage.list("m/1") == ["m/10"]


def test_what_is_deleted_is_gone_and_may_be_gone_already(storage: Storage) -> None:
    storage.write("a/b", b"1")
    storage.delete("a/b")
    storage.delete("a/b")
    assert storage.list() == []
    storage.write("a/b", b"2", create=True)


def test_a_local_file_is_copied_whole(storage: Storage, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "big").write_bytes(data)
    storage.write_file("logs/big", tmp_path / "big")
    assert storage.read("logs/big") == data


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b", "a\\b"])
def test_a_name_can_not_leave_the_folder(storage: Storage, name: str) -> None:
    for use in (lambda: storage.write(name, b""), lambda: storage.read(name)):
        with pytest.raises(ValueError, match="is no name"):
            use()


def test_of_many_that_create_one_wins(tmp_path: Path) -> None:
    folder, won, start = LocalFolder(tmp_path), list[int](), threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        try:
            folder.write("lock", str(number).encode(), create=True)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [folder.read("lock")]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with pytest.raises(OutputError, match="can't be written"):
        folder.write_file("a/b", tmp_path / "nothing")
    folder.write("a/c", b"", create=True)
    with pytest.raises(FileExistsError):
        folder.write("a/c", b"", create=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["c"]


def test_half_written_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-x").write_bytes(b"half")
    assert LocalFolder(tmp_path).list() == []


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        LocalFolder(tmp_path).write("a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_folder_that_can_not_be_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for create in (True, False):
        with pytest.raises(OutputError, match="can't be written"):
            LocalFolder(tmp_path / "file").write("a", b"", create=create)
        with pytest.raises(OutputError, match="can't be written"):
            LocalFolder(tmp_path).write("file/a", b"", create=create)


def test_another_kind_of_address_is_refused() -> None:
    with pytest.raises(OutputError, match="neither gs://"):
        open_storage("s3://bucket/path")


def test_a_bucket_that_is_not_there_is_named(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    with pytest.raises((OutputError, FileNotFoundError), match="gs://no-such-bucket/x"):
        open_storage("gs://no-such-bucket/x").write("a", b"")


class Asked(NamedTuple):
    """As whom a request was sent: its Authorization header, if it had one."""

    authorization: str | None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, cloud: GoogleCloud) -> Iterator[list[Asked]]:
    """What each request to the cloud showed of who asks; Cloud Storage is named by gcloud's variable."""
    seen: list[Asked] = []
    serve = cloud._serve

    def watched(request: Request) -> Response:
        seen.append(Asked(request.headers.get("authorization")))
        return serve(request)

    monkeypatch.setenv(OVERRIDE, f"{cloud.url}/storage/v1/")
    from tests.googlecloud.server import _handler

    monkeypatch.setattr(cloud._server, "RequestHandlerClass", _handler(watched))
    yield seen
    assert seen, "nothing was asked"


def test_a_test_server_is_asked_by_nobody(asked: list[Asked]) -> None:
    open_storage("gs://my-bucket/x").write("a", b"")
    assert {one.authorization for one in asked} == {None}


def test_gclouds_token_is_shown(asked: list[Asked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "token-1")
    open_storage("gs://my-bucket/x").write("a", b"")
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN")
    (tmp_path / "token").write_text("token-2\n")
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(tmp_path / "token"))
    open_storage("gs://my-bucket/x").write("b", b"")
    assert {one.authorization for one in asked} == {"Bearer token-1", "Bearer token-2"}


def test_disabled_credentials_beat_a_token(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "token-1")
    monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "True")
    open_storage("gs://my-bucket/x").write("a", b"")
    assert {one.authorization for one in asked} == {None}


def test_a_token_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(OutputError, match=r"the access token can't be read from .*none"):
        open_storage("gs://my-bucket/x")


@pytest.mark.parametrize("endpoint", [{}, {OVERRIDE: "https://storage.example.com/storage/v1/"}])
def test_no_credentials(endpoint: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "CLOUDSDK_AUTH_ACCESS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    world = {"CLOUDSDK_CONFIG": str(tmp_path), "HOME": str(tmp_path), "NO_GCE_CHECK": "true", **endpoint}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OutputError, match="gs:// needs credentials"):
        open_storage("gs://my-bucket/x")


def test_what_can_not_be_read_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="can't be read: Is a directory"):
        LocalFolder(tmp_path).read("folder")
