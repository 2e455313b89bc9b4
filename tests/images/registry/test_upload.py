"""One blob's way in, through what breaks on it."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from launcher.images.registry import Registry, RegistryError
from launcher.images.registry.transport import BLOCK
from launcher.testing.clock import FakeClock
from launcher.testing.registry import (
    AlterHeader,
    CutOff,
    Fault,
    ForgetUpload,
    LoseResponse,
    OciRegistry,
    Refuse,
    Reset,
    Torn,
    digest,
)
from tests.images.registry.helpers import MIB, REPOSITORY, client, opens, send, some

LARGE = some(10 * MIB)
"""Three pieces of 4 MiB, the last one smaller."""
PIECES = ["upload.begin", *["upload.chunk"] * 3, "upload.finish"]


def stored(registry: OciRegistry, data: bytes) -> bool:
    """Whether the repository has exactly these bytes."""
    return registry.store.blob(REPOSITORY, digest(data)) == data


@pytest.mark.parametrize("size", [0, 1, 2, 8 * MIB])
def test_a_small_blob_takes_two_requests(made: Registry, registry: OciRegistry, size: int) -> None:
    data = some(size)
    assert send(made, data) == [0, size]
    assert stored(registry, data)
    assert registry.steps == ["upload.begin", "upload.finish"]
    assert made.sent == registry.received == size


def test_a_large_blob_is_sent_in_chunks(made: Registry, registry: OciRegistry) -> None:
    assert send(made, LARGE) == [0, 4 * MIB, 8 * MIB, 10 * MIB, 10 * MIB]
    assert stored(registry, LARGE)
    assert registry.steps == PIECES
    assert [request.headers.get("content-range") for request in registry.requests[1:4]] == [
        f"0-{4 * MIB - 1}",
        f"{4 * MIB}-{8 * MIB - 1}",
        f"{8 * MIB}-{10 * MIB - 1}",
    ]
    assert made.sent == registry.received == len(LARGE)


def test_a_blob_can_be_sent_in_one_request(registry: OciRegistry, time: FakeClock) -> None:
    with client(registry, time, chunk=None) as made:
        send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.steps == ["upload.begin", "upload.finish"]
    assert registry.requests[1].headers["content-length"] == str(len(LARGE))


def test_googles_registries_take_no_pieces() -> None:
    with Registry("us-docker.pkg.dev", {}, chunk=MIB) as made, Registry("ghcr.io", {}, chunk=MIB) as other:
        assert (made.chunk, other.chunk) == (None, MIB)


def test_a_registry_that_takes_no_pieces_gets_it_whole(time: FakeClock) -> None:
    with OciRegistry(pieces=False) as registry, client(registry, time) as made:
        send(made, LARGE)
        assert stored(registry, LARGE)
        assert registry.steps == [*PIECES[:2], "blob.head", "upload.begin", "upload.finish"]


def test_a_blob_is_never_whole_in_memory(made: Registry) -> None:
    asked: list[int] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    made.upload(REPOSITORY, digest(LARGE), len(LARGE), lambda: Watched(LARGE))
    assert 0 <= min(asked) <= max(asked) <= BLOCK


def test_a_piece_that_is_cut_off_goes_on_at_its_byte(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    cut = registry.faults.add(Fault("upload.chunk", CutOff(MIB + 5), after=1))
    assert send(made, LARGE) == [0, 4 * MIB, 5 * MIB + 5, 9 * MIB + 5, 10 * MIB, 10 * MIB]
    assert stored(registry, LARGE)
    assert registry.faults.used[cut] == 1
    assert registry.received == len(LARGE), "no byte arrived twice"
    assert registry.steps[2:5] == ["upload.chunk", "blob.head", "upload.status"]
    assert time.waited == [0.5]


def test_an_upload_cut_off_after_one_byte_starts_from_scratch(made: Registry, registry: OciRegistry) -> None:
    """Both are "0-0": such an upload is restarted rather than continued one byte too early."""
    registry.faults.add(Fault("upload.chunk", CutOff(1)))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.steps[:4] == ["upload.begin", "upload.chunk", "blob.head", "upload.status"]
    assert registry.steps[4:] == PIECES


def test_a_lost_broken_upload_starts_from_scratch(time: FakeClock) -> None:
    """As Docker's registry 2.8, in which a broken piece makes the upload's own address invalid."""
    with OciRegistry(resumes=False) as registry, client(registry, time) as made:
        registry.faults.add(Fault("upload.chunk", CutOff(5), after=1))
        assert send(made, LARGE) == [0, 4 * MIB, 0, 4 * MIB, 8 * MIB, 10 * MIB, 10 * MIB]
        assert stored(registry, LARGE)


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("effect", [Reset(), Refuse(503), Refuse(429, retry_after=3)], ids=repr)
def test_a_piece_that_never_came_is_sent_again(time: FakeClock, effect: Reset | Refuse, resumes: bool) -> None:
    with OciRegistry(resumes=resumes) as registry, client(registry, time) as made:
        registry.faults.add(Fault("upload.chunk", effect, after=1, times=2))
        assert send(made, LARGE)[-1] == len(LARGE)
        assert stored(registry, LARGE)
        assert registry.steps.count("upload.begin") == 1
        assert time.waited == ([3.0, 3.0] if effect == Refuse(429, retry_after=3) else [0.5, 1.0])


def test_a_lost_answer_costs_no_byte(made: Registry, registry: OciRegistry) -> None:
    registry.faults.add(Fault("upload.chunk", LoseResponse(), after=1))
    registry.faults.add(Fault("upload.finish", LoseResponse()))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert made.sent == registry.received == len(LARGE)
    assert registry.steps[-1] == "blob.head", "the last answer was lost, and the blob there"


@pytest.mark.parametrize("step", ["upload.chunk", "upload.finish", "upload.status"])
def test_a_forgotten_upload_starts_from_scratch(made: Registry, registry: OciRegistry, step: str) -> None:
    if step == "upload.status":
        registry.faults.add(Fault("upload.chunk", Reset(), after=1))
    fault = registry.faults.add(Fault(step, ForgetUpload()))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.faults.used[fault] == 1
    assert registry.steps.count("upload.begin") == 2


def test_a_piece_at_the_wrong_byte_asks_how_far_it_is(made: Registry, registry: OciRegistry) -> None:
    registry.faults.add(Fault("upload.chunk", Refuse(416, "BLOB_UPLOAD_INVALID"), after=1))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.steps == [*PIECES[:3], "blob.head", "upload.status", *PIECES[2:]]
    assert registry.received == len(LARGE) + 4 * MIB, "the fault read its piece"


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
def test_damage_on_the_way_is_sent_again(made: Registry, registry: OciRegistry, data: bytes) -> None:
    step = "upload.chunk" if data is LARGE else "upload.finish"
    registry.faults.add(Fault(step, Torn()))
    send(made, data)
    assert stored(registry, data)
    assert made.sent == 2 * len(data)


def test_bytes_that_are_not_what_their_digest_says(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    with pytest.raises(RegistryError, match=rf"send {digest(b'what it was')}: HTTP 400 DIGEST_INVALID"):
        made.upload(REPOSITORY, digest(b"what it was"), 5, opens(b"other"))
    assert len(time.waited) == 1, "once it may have been damaged, twice it was not"


def test_a_file_that_becomes_shorter_ends_it(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    with pytest.raises(RegistryError, match="become shorter"):
        made.upload(REPOSITORY, digest(b"long"), 1000, opens(b"short"))
    assert not time.waited


def test_a_file_that_cant_be_read_ends_it(made: Registry, time: FakeClock, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"a layer's file can't be read: .*No such file"):
        made.upload(REPOSITORY, digest(b"x"), 1, (tmp_path / "gone").open)  # type: ignore[arg-type]  # the file does not exist

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(RegistryError, match="Input/output error"):
        made.upload(REPOSITORY, digest(b"x"), 1, lambda: Broken(b"x"))
    assert not time.waited, "a broken disk is no broken connection"


@pytest.mark.parametrize("claim", ["0-4194303", "0-99999999"], ids=["nothing new", "more than was sent"])
def test_a_registry_that_counts_wrongly_is_asked_again(made: Registry, registry: OciRegistry, claim: str) -> None:
    registry.faults.add(Fault("upload.chunk", AlterHeader("Range", claim), after=1))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.steps == [*PIECES[:3], "blob.head", "upload.status", *PIECES[3:]]


def test_five_tries_without_a_new_byte_are_enough(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    registry.faults.add(Fault("upload.chunk", CutOff(0), after=1, times=None))
    with pytest.raises(RegistryError, match=rf"send {digest(LARGE)}: .* \(tried 5 times\)"):
        send(made, LARGE)
    assert time.waited == [0.5, 1.0, 2.0, 4.0]


def test_tries_with_new_bytes_are_not_counted(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    registry.faults.add(Fault("upload.chunk", CutOff(MIB), times=8))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert time.waited == [0.5] * 8


def test_an_upload_that_always_loses_all_has_an_end(time: FakeClock) -> None:
    with OciRegistry(resumes=False) as registry, client(registry, time) as made:
        registry.faults.add(Fault("upload.finish", ForgetUpload(), times=None))
        with pytest.raises(RegistryError, match=r"BLOB_UPLOAD_UNKNOWN.* \(tried 5 times\)"):
            send(made, LARGE)
        assert registry.steps.count("upload.begin") == 5


def test_two_send_the_same_at_once(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    with client(registry, time) as other:
        threads = [threading.Thread(target=send, args=(one, LARGE)) for one in (made, other, made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stored(registry, LARGE)
    assert made.sent == 2 * len(LARGE), "no byte of two threads is lost from the count"
    assert not registry.api.uploads
