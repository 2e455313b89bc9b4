"""One blob's way in, through what breaks on it."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from launcher.images.registry import Registry, RegistryError
from launcher.images.registry.transport import BLOCK
from launcher.testing.clock import FakeClock
from tests.images.registry.helpers import MIB, REPOSITORY, client, opens, send, some
from tests.registry import CutOff, Fault, LoseResponse, OciRegistry, Refuse, Reset, Torn, digest
from tests.registry.faults import Effect

LARGE = some(10 * MIB)


def stored(registry: OciRegistry, data: bytes) -> bool:
    """Whether the repository has exactly these bytes."""
    return registry.store.blob(REPOSITORY, digest(data)) == data


@pytest.mark.parametrize("size", [0, 1, 10 * MIB])
def test_a_blob_takes_two_requests(made: Registry, registry: OciRegistry, size: int) -> None:
    data = some(size)
    assert send(made, data) == [0, size]
    assert stored(registry, data)
    assert registry.steps == ["upload.begin", "upload.finish"]
    assert registry.requests[1].headers["content-length"] == str(size)
    assert made.sent == registry.received == size


def test_a_blob_is_never_whole_in_memory(made: Registry) -> None:
    asked: list[int] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    made.upload(REPOSITORY, digest(LARGE), len(LARGE), lambda: Watched(LARGE))
    assert 0 <= min(asked) <= max(asked) <= BLOCK


@pytest.mark.parametrize("effect", [Reset(), CutOff(MIB + 5), Refuse(503), Refuse(429, retry_after=3)], ids=repr)
@pytest.mark.parametrize("step", ["upload.begin", "upload.finish"])
def test_a_broken_upload_starts_from_scratch(
    made: Registry, registry: OciRegistry, time: FakeClock, step: str, effect: Effect
) -> None:
    fault = registry.faults.add(Fault(step, effect, times=2))
    assert send(made, LARGE) == [0, 0, 0, len(LARGE)]
    assert stored(registry, LARGE)
    assert registry.faults.used[fault] == 2
    assert registry.steps.count("upload.begin") == 3
    assert time.waited == ([3.0, 3.0] if effect == Refuse(429, retry_after=3) else [0.5, 1.0])


def test_a_lost_answer_costs_no_byte(made: Registry, registry: OciRegistry) -> None:
    registry.faults.add(Fault("upload.finish", LoseResponse()))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert made.sent == registry.received == len(LARGE)
    assert registry.steps[-1] == "blob.head", "the last answer was lost, and the blob there"


def test_a_forgotten_upload_starts_from_scratch(made: Registry, registry: OciRegistry) -> None:
    registry.faults.add(Fault("upload.finish", Refuse(404, "BLOB_UPLOAD_UNKNOWN")))
    send(made, LARGE)
    assert stored(registry, LARGE)
    assert registry.steps.count("upload.begin") == 2


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
def test_damage_on_the_way_is_sent_again(made: Registry, registry: OciRegistry, data: bytes) -> None:
    registry.faults.add(Fault("upload.finish", Torn()))
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


def test_five_tries_are_enough(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    registry.faults.add(Fault("upload.finish", CutOff(5), times=None))
    with pytest.raises(RegistryError, match=rf"send {digest(LARGE)}: .* \(tried 5 times\)"):
        send(made, LARGE)
    assert time.waited == [0.5, 1.0, 2.0, 4.0]


def test_two_send_the_same_at_once(made: Registry, registry: OciRegistry, time: FakeClock) -> None:
    with client(registry, time) as other:
        threads = [threading.Thread(target=send, args=(sender, LARGE)) for sender in (made, other, made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stored(registry, LARGE)
    assert made.sent == 2 * len(LARGE), "no byte of two threads is lost from the count"
    assert not registry.api.uploads
