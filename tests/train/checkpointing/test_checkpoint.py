"""The format of a checkpoint: nothing damaged is ever taken for whole."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train import checkpoint, runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import multipart_writer, resume_loader, retention
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.checkpointing.multipart_writer import CancelledError
from launch_train.checkpointing.partition import assign_to_ranks, join, split
from launch_train.common.errors import UsageError
from launch_train.common.storage import LocalFolder
from launch_train.common.storage.bucket import checksum

STATE = {
    "model": {"w": torch.arange(3000.0), "b": torch.ones(7, dtype=torch.bfloat16)},
    "optimizer": {
        "state": {0: {"exp_avg": torch.zeros(3000), "step": torch.tensor(4.0)}},
        "param_groups": [{"lr": 0.1}],
    },
    "loop": {"step": 5, "eval_loss": None, "pairs": [(1, 2)]},
}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart_writer, "PART_BYTES", 4096)


def write(
    storage: LocalFolder, state: Any = STATE, *, step: int = 5, start: str = "0001-0000", world: int = 2
) -> Manifest:
    """A checkpoint as the ranks of a run would write it."""
    tensors, rest = split(state)
    shards = []
    for rank, paths in enumerate(assign_to_ranks(tensors, world, ())):
        content = {"tensors": {path: tensors[path] for path in paths}, "own": {"rank": rank}}
        content |= {"rest": rest} if rank == 0 else {}
        folder = runfolder.checkpoint_folder(step, start)
        written = multipart_writer.write_shard(
            storage, folder, rank, content, deadline=time.monotonic() + 60, cancelled=threading.Event()
        )
        shards.append(written)
    manifest = Manifest(step, start, tuple(shards), {"config": {"seed": 1}})
    manifests.commit(storage, manifest)
    return manifest


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    manifest = write(storage)
    state = checkpoint.load(str(tmp_path))
    assert state.pop("ranks") == [{"rank": 0}, {"rank": 1}]
    assert same(state, STATE)
    assert all(len(shard) > 1 for shard in manifest.shards)
    assert all(part.bytes == 4096 for shard in manifest.shards for part in shard[:-1])


def test_the_newest_step_and_start_comes_first(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    for step, start in ((7, "0001-0000"), (7, "0001-0003"), (9, "0001-0001"), (3, "0002-0000")):
        write(storage, {"loop": {"step": step, "start": start}}, step=step, start=start)
    names = manifests.manifest_names(storage)
    assert [name.split("/")[1:3] for name in names] == [
        ["step-00000009", "0001-0001"],
        ["step-00000007", "0001-0003"],
        ["step-00000007", "0001-0000"],
        ["step-00000003", "0002-0000"],
    ]
    assert checkpoint.load(str(tmp_path), 7)["loop"]["start"] == "0001-0003"
    with pytest.raises(CheckpointError, match="no usable checkpoint of step 8: none exists"):
        checkpoint.load(str(tmp_path), 8)


@pytest.mark.slow
def test_no_flipped_bit_is_accepted(tmp_path: Path) -> None:
    """A thousand flips, anywhere: in the parts, or in the manifest itself."""
    write(LocalFolder(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    rng = random.Random(0)
    for path in [*rng.choices(files, sizes, k=800), *rng.choices([f for f in files if f.suffix == ".json"], k=200)]:
        before = path.read_bytes()
        data = bytearray(before)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert not usable(tmp_path), path
        path.write_bytes(before)
    assert usable(tmp_path)


def usable(folder: Path) -> bool:
    try:
        checkpoint.load(str(folder))
    except CheckpointError:
        return False
    return True


def _truncate(folder: Path, other: Path) -> Iterator[None]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        before = path.read_bytes()
        for size in (0, 1, len(before) // 2, len(before) - 1):
            path.write_bytes(before[:size])
            yield
        path.write_bytes(before)


def _lengthen(folder: Path, other: Path) -> Iterator[None]:
    for path in sorted(folder.rglob("*.part")):
        before = path.read_bytes()
        path.write_bytes(before + b"x")
        yield
        path.write_bytes(before)


def _remove(folder: Path, other: Path) -> Iterator[None]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        before = path.read_bytes()
        path.unlink()
        yield
        path.write_bytes(before)


def _swap(folder: Path, other: Path) -> Iterator[None]:
    """Two parts of one shard, and two shards, in each other's place; parts of another checkpoint; its manifest."""
    parts = sorted(folder.rglob("*.part"))
    for one, two in zip(parts, [*parts[1:], parts[0]], strict=True):
        a, b = one.read_bytes(), two.read_bytes()
        if a != b:
            one.write_bytes(b)
            two.write_bytes(a)
            yield
            one.write_bytes(a)
            two.write_bytes(b)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        before, foreign = path.read_bytes(), (other / path.relative_to(folder)).read_bytes()
        if before != foreign:
            path.write_bytes(foreign)
            yield
            path.write_bytes(before)


@pytest.mark.parametrize("harm", [_truncate, _lengthen, _remove, _swap])
def test_no_harm_is_accepted(tmp_path: Path, harm: Callable[[Path, Path], Iterator[None]]) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    write(LocalFolder(folder))
    write(LocalFolder(other), {**STATE, "loop": {"step": 5, "other": True}})
    count = 0
    for _ in harm(folder, other):
        assert not usable(folder)
        count += 1
    assert count > 3
    assert usable(folder)


def test_a_manifest_of_another_step_is_not_taken(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    write(storage, step=5)
    shutil.copytree(tmp_path / "checkpoints/step-00000005", tmp_path / "checkpoints/step-00000006")
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        manifests.read(storage, runfolder.manifest(6, "0001-0000"))


FOREIGN: dict[str, Any] = {
    "a list": [1, 2],
    "no rest": {"tensors": {}, "own": {}},
    "no own": {"tensors": {}, "rest": {}},
    "own of another kind": {"tensors": {}, "rest": {}, "own": 5},
    "tensors of another kind": {"tensors": {"a": 1}, "rest": {}, "own": {}},
    "parts of another kind": {"tensors": {"a": torch.ones(2)}, "parts": {"a": 1}, "rest": {}, "own": {}},
    "a tensor that is missing": {"tensors": {}, "rest": {"a": {"$tensor": "a"}}, "own": {}},
    "half a tensor": {
        "tensors": {"a": torch.ones(2)},
        "parts": {"a": {"at": [0], "of": [4]}},
        "rest": {"a": {"$tensor": "a"}},
        "own": {},
    },
    "an array of another kind": {"tensors": {}, "rest": {"a": {"$array": {"what": 1}}}, "own": {}},
    "bytes of another kind": {"tensors": {}, "rest": {}, "own": {"a": {"$bytes": 1}}},
}


@pytest.mark.parametrize(
    "content",
    [*FOREIGN.values(), b"", b"no zip at all", b"PK\x03\x04", b"\x80\x02cos\nsystem\n."],
    ids=[*FOREIGN, "empty", "text", "a zip's head", "a pickle"],
)
def test_a_state_of_another_kind_is_one_line(tmp_path: Path, content: Any) -> None:
    """As torch saves it, or as bytes."""
    is_bytes = isinstance(content, bytes)
    foreign(tmp_path, lambda file: Path(file).write_bytes(content) if is_bytes else torch.save(content, file))
    assert "step-00000005/0001-0000" in refused(tmp_path)


def test_an_older_one_is_read_in_its_place(tmp_path: Path) -> None:
    write(LocalFolder(tmp_path), step=4)
    foreign(tmp_path, lambda file: torch.save(FOREIGN["half a tensor"], file))
    assert same({**checkpoint.load(str(tmp_path)), "ranks": 0}, {**STATE, "ranks": 0})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"format": 1},
        {"format": 1, "step": 5, "start": "0001-0000", "shards": 3, "about": {}},
        {"format": 1, "step": 5, "start": "0001-0000", "shards": [[{"name": "a"}]], "about": {}},
        {"format": 1, "step": 5, "start": "0001-0000", "shards": [], "about": {}},
        {"format": 1, "step": "five", "start": None, "shards": [], "about": {}},
    ],
)
def test_a_manifest_of_another_kind_is_one_line(tmp_path: Path, data: dict[str, Any]) -> None:
    """One whose digest is right: that is easily computed."""
    text = json.dumps({**data, "sha256": manifests._digest(data)}).encode()
    LocalFolder(tmp_path).write(runfolder.manifest(5, "0001-0000"), text)
    assert "step-00000005/0001-0000" in refused(tmp_path)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "model" / "checkpoints").mkdir(parents=True)
    (tmp_path / "model" / "checkpoints" / "model.safetensors").write_text("text")
    for name in ("nowhere", "empty", "file", "model"):
        assert name in refused(tmp_path / name)


@pytest.mark.parametrize("about", [{}, {"config": 3}, {"config": {"model": "gpt"}}])
def test_a_run_of_another_kind_is_not_resumed(tmp_path: Path, about: dict[str, Any]) -> None:
    """Its checkpoints may be whole; what it says of itself is nothing that a run of ours could be held against."""
    with pytest.raises(UsageError) as caught:
        resume_loader.require_same_run(
            about, {"config": dict.fromkeys((*resume_loader.FIXED, "data"), 1)}, "gs://b/run"
        )
    assert "gs://b/run" in str(caught.value)


def foreign(folder: Path, written: Callable[[str], object]) -> None:
    """A checkpoint of one rank whose parts and manifest agree, and which holds what `written` puts into a file."""
    storage, file = LocalFolder(folder), folder / "content"
    folder.mkdir(exist_ok=True)
    written(str(file))
    content, name = file.read_bytes(), "rank-00000-0000.part"
    file.unlink()
    storage.write(f"{runfolder.checkpoint_folder(5, '0001-0000')}/{name}", content)
    part = multipart_writer.CheckpointPart(name, len(content), checksum(content))
    manifests.commit(storage, Manifest(5, "0001-0000", ((part,),), {"config": {}}))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(str(folder))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_each_ranks_own_comes_back_as_it_was(tmp_path: Path) -> None:
    foreign(tmp_path, lambda file: torch.save({"tensors": {}, "rest": {}, "own": {"a": {"$bytes": BYTES}}}, file))
    assert checkpoint.load(str(tmp_path))["ranks"] == [{"a": b"\1\2"}]


BYTES = torch.tensor([1, 2], dtype=torch.uint8)


def test_pickled_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests say that a part is as it was written, not that its writer meant well."""
    write(LocalFolder(tmp_path), {"loop": Evil()}, world=1)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        checkpoint.load(str(tmp_path))
    assert not Evil.ran


class Evil:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Evil, "ran", True)


def test_a_checkpoint_never_changes(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    manifest = write(storage)
    with pytest.raises(FileExistsError):
        manifests.commit(storage, manifest._replace(about={}))


@pytest.mark.parametrize("most", [0, 3])
def test_where_no_thread_can_be_started_the_parts_are_sent_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Python 3.12 starts none while the interpreter ends, and a script may have begun its last save just then."""
    real, started = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if len(started) >= most:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    write(LocalFolder(tmp_path), world=1)
    monkeypatch.setattr(threading.Thread, "start", real)
    state = checkpoint.load(str(tmp_path))
    assert len(started) == most
    assert state.pop("ranks") == [{"rank": 0}]
    assert same(state, STATE)


def test_a_cancelled_save_stops_between_parts(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        multipart_writer.write_shard(
            LocalFolder(tmp_path), "checkpoints/x", 0, STATE, deadline=1e12, cancelled=cancelled
        )
    assert LocalFolder(tmp_path).list() == []


def test_tied_weights_are_written_once() -> None:
    weight = torch.ones(4, 4)
    tensors, rest = split({"a": weight, "b": {"c": weight}, "d": weight[:2], "e": torch.ones(4, 4)})
    assert set(tensors) == {"a", "d", "e"}
    back = join(tensors, rest)
    assert back["a"] is back["b"]["c"]


def test_shares_are_balanced_and_buffers_are_the_first_ranks() -> None:
    tensors = {f"model/{n}": torch.zeros(100 - n) for n in range(40)} | {"model/mean": torch.zeros(500)}
    shares = assign_to_ranks(tensors, 4, {"model/mean"})
    assert sorted(path for share in shares for path in share) == sorted(tensors)
    assert "model/mean" in shares[0]
    sizes = [sum(tensors[path].numel() for path in share if path != "model/mean") for share in shares]
    assert max(sizes) - min(sizes) <= 100
    del tensors["model/mean"]  # a rank that doesn't have it shares the rest out alike
    assert assign_to_ranks(tensors, 4, {"model/mean"})[1:] == shares[1:]


ONE, TWO = "0001-0000", "0001-0001"


LATER = "0002-0000"


def part(step: int, start: str) -> str:
    return f"{runfolder.checkpoint_folder(step, start)}/rank-00000-0000.part"


def complete(*saved: tuple[int, str]) -> list[str]:
    return [name for step, start in saved for name in (runfolder.manifest(step, start), part(step, start))]


@pytest.mark.parametrize(
    ("names", "step", "start", "last", "every", "goes"),
    [
        (complete((1, ONE), (2, ONE), (3, ONE), (4, ONE)), 9, TWO, 3, 0, [(1, ONE)]),
        (complete((1, ONE), (2, ONE), (3, ONE), (4, ONE)), 9, TWO, 1, 2, [(1, ONE), (3, ONE)]),
        (complete((3, ONE), (3, TWO)), 9, TWO, 3, 0, [(3, ONE)]),
        ([], 9, TWO, 1, 0, []),
        # What was left unfinished goes, and what a later start writes stays.
        ([part(9, ONE), part(9, TWO), part(9, LATER)], 9, TWO, 3, 0, [(9, ONE), (9, TWO)]),
        (complete((200, ONE), (300, TWO)), 200, ONE, 1, 0, []),
        # Step 300 was passed over, the run went on behind 200 and has saved 250: with one to keep, that is 250.
        (complete((200, ONE), (300, ONE), (250, TWO)), 250, TWO, 1, 0, [(200, ONE), (300, ONE)]),
        # Rank 1 writes the last checkpoint while rank 0 still removes old ones after the one before.
        ([*complete((11, ONE)), part(12, ONE)], 11, ONE, 1, 0, []),
        (complete((11, ONE), (12, ONE)), 11, ONE, 1, 0, []),
        ([*complete((11, ONE)), part(12, ONE)], 11, TWO, 1, 0, [(12, ONE)]),
    ],
)
def test_what_is_kept(
    names: list[str], step: int, start: str, last: int, every: int, goes: list[tuple[int, str]]
) -> None:
    doomed = retention.folders_to_remove([*names, runfolder.LATEST], step, start, last=last, every=every)
    assert doomed == sorted(runfolder.checkpoint_folder(*one) for one in goes)


def test_a_manifest_is_deleted_before_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in between leaves parts, never a manifest that names missing ones."""
    storage = LocalFolder(tmp_path)
    deleted: list[str] = []
    for step in (1, 2):
        write(storage, step=step)
    delete = storage.delete

    def record(name: str) -> None:
        deleted.append(name)
        delete(name)

    monkeypatch.setattr(storage, "delete", record)
    assert retention.prune(storage, 2, "0001-0000", last=1, every=0) == [runfolder.checkpoint_folder(1, "0001-0000")]
    assert deleted[0] == runfolder.manifest(1, "0001-0000")
    assert len(deleted) > 2


def test_the_manifest_says_all_in_plain_json(tmp_path: Path) -> None:
    manifest = write(LocalFolder(tmp_path))
    data = json.loads((tmp_path / runfolder.manifest(5, "0001-0000")).read_text())
    assert data["format"] == manifests.FORMAT
    assert data["about"] == {"config": {"seed": 1}}
    assert sum(part["bytes"] for shard in data["shards"] for part in shard) == manifest.bytes
