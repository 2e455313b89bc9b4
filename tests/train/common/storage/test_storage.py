from __future__ import annotations

import os
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder, MemoryFolder, Storage, create_variant, open_storage

if TYPE_CHECKING:
    from launcher.testing.googlecloud import FakeClock, GoogleCloud
    from launcher.testing.googlecloud.wire import Request, Response


OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"


@pytest.fixture(params=["local", "memory", "emulator", "override"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """The same tests for all kinds; the bucket is on loopback, behind Google's own client, named in both ways."""
    if request.param == "memory":
        return MemoryFolder()
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


def test_when_it_was_written_is_told_by_who_stores_it(storage: Storage, clock: FakeClock) -> None:
    storage.write("a/b", b"1")
    first = storage.written("a/b")
    if storage.url.startswith("gs://"):
        assert first == clock()
        clock.advance(5)
        storage.write("a/b", b"2")
        assert storage.written("a/b") == first + 5
    else:
        assert abs(first - time.time()) < 60
    with pytest.raises(FileNotFoundError):
        storage.written("a/c")


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


def test_a_version_is_that_of_the_content(storage: Storage) -> None:
    first = storage.write("a", b"1", create=True)
    assert storage.read_version("a") == (b"1", first)
    second = storage.write("a", b"2")
    assert storage.read_version("a") == (b"2", second)
    assert first != second
    with pytest.raises(FileNotFoundError):
        storage.read_version("b")


def test_a_swap_needs_the_version_that_is_there(storage: Storage) -> None:
    first = storage.swap("a", b"1", "")
    with pytest.raises(FileExistsError):
        storage.swap("a", b"2", "")
    second = storage.swap("a", b"2", first)
    with pytest.raises(FileExistsError):
        storage.swap("a", b"3", first)
    assert storage.read_version("a") == (b"2", second)
    with pytest.raises(FileExistsError):
        storage.swap("not-there", b"1", first)
    assert storage.list() == ["a"]


def test_of_eight_that_swap_one_wins_each_version(storage: Storage) -> None:
    """Each adds 1 until it has won five times: no addition is lost."""
    storage.write("count", b"0 first", create=True)

    def add(worker: int) -> None:
        won = 0
        while won < 5:
            data, version = storage.read_version("count")
            try:
                storage.swap("count", f"{int(data.split()[0]) + 1} {worker}-{won}".encode(), version)
                won += 1
            except FileExistsError:
                continue

    side_by_side([partial(add, worker) for worker in range(8)])
    assert storage.read("count").split()[0] == b"40"


def test_of_eight_that_create_one_wins(storage: Storage) -> None:
    won, start = list[int](), threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        with suppress(FileExistsError):
            storage.write("lock", str(number).encode(), create=True)
            won.append(number)

    side_by_side([partial(create, number) for number in range(8)])
    assert [str(number).encode() for number in won] == [storage.read("lock")]


def side_by_side(works: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


PART = 33 << 20
"""More than one chunk of a resumable upload."""


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "floats"])
def test_large_buffers_of_all_kinds_come_back(storage: Storage, kind: Any) -> None:
    data = os.urandom(1 << 20) * 33
    buffer = memoryview(array("d", data)) if kind == "floats" else kind(data)
    storage.write("part", buffer)
    assert storage.read("part") == data


def test_eight_threads_write_parts_at_once(storage: Storage) -> None:
    parts = {f"p/{number}": bytes([number]) * (9 << 20) for number in range(8)}
    side_by_side([partial(lambda name, data: (storage.write(name, data), None)[1], *item) for item in parts.items()])
    assert storage.list("p/") == sorted(parts)
    assert all(storage.read(name) == data for name, data in parts.items())


def test_within_is_the_same_folder(storage: Storage) -> None:
    storage.within(30).write("a", b"1")
    assert (storage.read("a"), storage.within(5).url) == (b"1", storage.url)


def test_what_must_not_be_lost_gets_a_free_name(storage: Storage) -> None:
    for data in (b"first", b"second", b"first", b"third", b"third"):
        create_variant(storage, "metrics/0001-000003.jsonl", data)
    stored = {name: storage.read(name) for name in storage.list()}
    assert stored == {
        "metrics/0001-000003.jsonl": b"first",
        "metrics/0001-000003-1.jsonl": b"second",
        "metrics/0001-000003-2.jsonl": b"third",
    }


def test_a_local_file_is_copied_whole(storage: Storage, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "big").write_bytes(data)
    storage.write_file("logs/big", tmp_path / "big")
    assert storage.read("logs/big") == data


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b", "a\\b"])
def test_a_name_can_not_leave_the_folder(storage: Storage, name: str) -> None:
    for use in (lambda: storage.write(name, b""), lambda: storage.read(name)):
        with pytest.raises(ValueError, match="is not a valid name"):
            use()


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with pytest.raises(OutputError, match="nothing can't be read"):
        folder.write_file("a/b", tmp_path / "nothing")
    folder.write("a/c", b"", create=True)
    with pytest.raises(FileExistsError):
        folder.write("a/c", b"", create=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["c"]


def test_folders_that_are_left_empty_go(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "run")
    folder.write("c/s/1", b"")
    folder.write("c/s/2", b"")
    folder.delete("c/s/1")
    assert (tmp_path / "run/c/s").is_dir()
    folder.delete("c/s/2")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_is_written_though_its_empty_folder_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a delete, between the making of the folder and that of the file."""
    touch, gone = Path.touch, list[Path]()

    def beaten(path: Path, *, exist_ok: bool) -> None:
        if not gone:
            gone.append(path.parent)
            LocalFolder(tmp_path).delete("a/b/other")
            assert not path.parent.exists()
        touch(path, exist_ok=exist_ok)

    monkeypatch.setattr(Path, "touch", beaten)
    LocalFolder(tmp_path).write("a/b/c", b"1")
    assert (gone, LocalFolder(tmp_path).read("a/b/c")) == ([tmp_path / "a/b"], b"1")


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
    with pytest.raises(OutputError, match="use gs://BUCKET/PATH or a local folder"):
        open_storage("s3://bucket/path")


def test_a_bucket_that_is_not_there_is_named(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    storage = open_storage("gs://no-such-bucket/x")
    uses: list[Callable[[], object]] = [
        lambda: storage.write("a", b""),
        lambda: storage.write("a", b"x" * (9 << 20)),
        lambda: storage.read("a"),
        storage.list,
        lambda: storage.delete("a"),
        lambda: storage.swap("a", b"", ""),
    ]
    create = "gcloud storage buckets create gs://no-such-bucket --location="
    for use in uses:
        with pytest.raises(
            OutputError, match=f"gs://no-such-bucket/x.*: bucket no-such-bucket does not exist: {create}"
        ):
            use()
    assert storage.soft_delete_days() == 0


class Asked(NamedTuple):
    """As whom a request was sent: its Authorization header, if it had one."""

    authorization: str | None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, cloud: GoogleCloud) -> Iterator[list[Asked]]:
    """What each request to the cloud showed of who asks; Cloud Storage is named by gcloud's variable."""
    seen: list[Asked] = []
    serve = cloud.serve

    def watched(request: Request) -> Response:
        seen.append(Asked(request.headers.get("authorization")))
        return serve(request)

    monkeypatch.setenv(OVERRIDE, f"{cloud.url}/storage/v1/")
    monkeypatch.setattr(cloud, "serve", watched)
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


@pytest.mark.parametrize(("path", "why"), [("/proc", "Is a directory"), ("/nothing", "No such file or directory")])
def test_a_file_that_can_not_be_read_is_an_output_error(storage: Storage, path: str, why: str) -> None:
    with pytest.raises(OutputError, match=f"{path} can't be read: {why}"):
        storage.write_file("a", Path(path))
    assert storage.list() == []


def test_what_can_not_be_read_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="can't be read: Is a directory"):
        LocalFolder(tmp_path).read("folder")
