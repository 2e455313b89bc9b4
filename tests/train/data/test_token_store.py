"""Tokens in a bucket, and text that is only downloaded to be tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import launch_train.data
from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.common.storage import open_storage
from launch_train.data import gcs_cache, open_data, tokenize
from launch_train.data.source import Source
from launch_train.data.token_store import TokenStore
from launch_train.data.tokenizers import open_tokenizer
from launch_train.distributed.process_group import Ranks
from launcher.testing.googlecloud import GoogleCloud
from tests.train.data.corpora import token_corpus
from tests.train.material import tokenizer as tokenizer_json

GET, CREATE = "storage.objects.get", "storage.objects.create"


@pytest.fixture(autouse=True)
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    machine(monkeypatch, tmp_path / "one")
    storage = open_storage("gs://my-bucket")
    for number in range(6):
        lines = [json.dumps({"text": " ".join("!#$%&" * 9) + f" {number}"}) for _ in range(20)]
        storage.write(f"text/{number}.jsonl", "\n".join(lines).encode())
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(300))


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another machine: one with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def opened(tmp_path: Path, path: str = "gs://my-bucket/text", **more: Any) -> Source:
    data = {"path": path, "tokenizer": str(tmp_path / "tokenizer.json"), **more}
    return open_data(parse({"data": data, "model": {"block_size": 8, "vocab_size": 300}}), Ranks())


def read(cloud: GoogleCloud) -> list[str]:
    """The names of objects that were downloaded since the last call."""
    names = [
        request.path.partition("/o/")[2].replace("%2F", "/") for request in cloud.requests if request.method == "GET"
    ]
    cloud.requests.clear()
    return sorted({name.partition("?")[0] for name in names if name})


def stored(cloud: GoogleCloud) -> list[str]:
    return sorted(name for name in cloud.objects.buckets["my-bucket"] if name.startswith(".launch/"))


def test_a_later_machine_finds_the_tokens_and_does_not_read_the_text(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = opened(tmp_path)
    names = stored(cloud)
    assert [Path(name).suffix for name in names] == [".json", ".tokens"]
    assert not list((tmp_path / "one").rglob("*.jsonl")), "the text is not kept"
    read(cloud)
    machine(monkeypatch, tmp_path / "two")
    second = opened(tmp_path)
    assert read(cloud) == names
    assert second.facts == first.facts
    assert "tokens from gs://my-bucket/.launch/tokens/" in capsys.readouterr().out
    opened(tmp_path)
    assert read(cloud) == [], "this machine has them now"
    open_storage("gs://my-bucket").write("text/3.jsonl", b'{"text": "! ! #"}')
    assert opened(tmp_path).facts["data_sha256"] != first.facts["data_sha256"]
    assert len(stored(cloud)) == 4


def test_the_tokens_are_those_of_the_same_files_here(tmp_path: Path) -> None:
    remote = opened(tmp_path)
    here = gcs_cache.fetch("gs://my-bucket/text", tmp_path / "copy")
    assert opened(tmp_path, str(here)).facts["data_sha256"] == remote.facts["data_sha256"]


def test_of_two_machines_at_once_one_writes(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine has written everything after this one has looked."""
    real, generations = TokenStore.get, dict[str, int]()

    def late(self: TokenStore, key: str, tokens: Path) -> Any:
        found = real(self, key, tokens)
        monkeypatch.setattr(TokenStore, "get", real)
        machine(monkeypatch, tmp_path / "other")
        opened(tmp_path)
        generations.update({name: cloud.objects.buckets["my-bucket"][name].generation for name in stored(cloud)})
        return found

    monkeypatch.setattr(TokenStore, "get", late)
    opened(tmp_path)
    assert len(generations) == 2
    assert generations == {name: cloud.objects.buckets["my-bucket"][name].generation for name in stored(cloud)}


def test_a_half_written_corpus_is_completed(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path)
    about, tokens = stored(cloud)
    del cloud.objects.buckets["my-bucket"][about]
    machine(monkeypatch, tmp_path / "two")
    opened(tmp_path)
    assert stored(cloud) == [about, tokens]


def test_tokens_that_are_not_what_they_should_be_are_not_used(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = opened(tmp_path)
    _, tokens = stored(cloud)
    cloud.objects.put("my-bucket", tokens, b"x" * len(cloud.objects.buckets["my-bucket"][tokens].data))
    machine(monkeypatch, tmp_path / "two")
    assert opened(tmp_path).facts == first.facts
    assert "isn't what its .json describes" in capsys.readouterr().out


def test_a_reader_goes_on_with_its_own_and_says_so_once(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.objects.deny("my-bucket", CREATE)
    first = opened(tmp_path)
    said = capsys.readouterr().out
    assert said.count("tokens can't be written for other machines") == 1
    assert "storage.objects.create" in said
    assert stored(cloud) == []
    assert opened(tmp_path).facts == first.facts
    assert "can't be written" not in capsys.readouterr().out, "they are in this machine's cache"


def test_separate_validation_data_has_tokens_of_its_own(cloud: GoogleCloud, tmp_path: Path) -> None:
    source = opened(tmp_path, "gs://my-bucket/text/[0-4].jsonl", val="gs://my-bucket/text/5.jsonl")
    assert len(stored(cloud)) == 4
    assert source.facts["data_files"] == 6


def test_plain_text_is_downloaded_and_its_tokens_are_shared(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_storage("gs://my-bucket").write("plain/a.txt", b"! # $ " * 100)
    opened(tmp_path, "gs://my-bucket/plain")
    machine(monkeypatch, tmp_path / "two")
    read(cloud)
    opened(tmp_path, "gs://my-bucket/plain")
    assert read(cloud) == [*stored(cloud), "plain/a.txt"]


def test_a_whole_bucket_does_not_hold_launchs_own_objects(cloud: GoogleCloud, tmp_path: Path) -> None:
    first = opened(tmp_path, "gs://my-bucket")
    assert opened(tmp_path, "gs://my-bucket").facts == first.facts
    assert len(stored(cloud)) == 2


def node(rank: int, world: int = 4) -> Ranks:
    """Local rank 0 of a node, without its peers: what is gathered is what this node has."""
    return Ranks(rank=rank, world=world)


def prepared(tmp_path: Path, ranks: Ranks) -> Any:
    data = {"path": "gs://my-bucket/text", "tokenizer": str(tmp_path / "tokenizer.json")}
    return launch_train.data._prepare(parse({"data": data, "model": {"vocab_size": 300}}), ranks)


def test_nodes_share_the_work_of_a_large_corpus(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six files are six parts; node 2 of 4 begins at the third. What another node has done, it doesn't do again."""
    monkeypatch.setattr(tokenize, "PART_BYTES", 1)
    tokenized, real = list[str](), tokenize._write

    def write(tokens: Path, files: Any, *rest: Any) -> int:
        def noted() -> Iterator[Path]:
            for path in files.paths:
                tokenized.append(path.name)
                yield path

        return real(tokens, replace(files, paths=noted()), *rest)

    monkeypatch.setattr(tokenize, "_write", write)
    first = prepared(tmp_path, node(2))
    assert tokenized == [f"{number}.jsonl" for number in (3, 4, 5, 0, 1, 2)]
    for about in stored(cloud)[:4]:
        del cloud.objects.buckets["my-bucket"][about]
    tokenized.clear()
    machine(monkeypatch, tmp_path / "two")
    second = prepared(tmp_path, node(0))
    assert len(tokenized) == 2
    assert second.sha256 == first.sha256
    assert [shard.length for shard in second.shards] == [shard.length for shard in first.shards]
    assert (second.files, second.length, len(stored(cloud))) == (6, first.length, 12)


def test_parts_depend_on_the_files_alone_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opened(tmp_path)
    objects = gcs_cache.list_objects("gs://my-bucket/text")
    monkeypatch.setattr(tokenize, "PART_BYTES", objects[0].size + 1)
    assert [len(part) for part in tokenize.by_size(objects)] == [2, 2, 2]
    machine(monkeypatch, tmp_path / "two")
    parts = opened(tmp_path)
    assert parts.facts["data_tokens"] == whole.facts["data_tokens"]
    assert parts.facts["data_bytes"] == whole.facts["data_bytes"]
    assert parts.unigram_entropy == pytest.approx(whole.unigram_entropy)


# --- Streams --------------------------------------------------------------------------------------------------------


def streamed(tmp_path: Path) -> Iterator[Path]:
    return gcs_cache.stream("gs://my-bucket/text", gcs_cache.list_objects("gs://my-bucket/text"), tmp_path / "cache")


def test_a_stream_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    files = streamed(tmp_path)
    next(files)
    files.close()  # type: ignore[attr-defined]  # a generator
    assert list((tmp_path / "cache").iterdir()) == []


# --- Processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join("!#$%&"[: number % 6]) * 50}) + "\n" for number in range(400)))
    return path


def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "SHARED_BYTES", 0)
    monkeypatch.setattr(tokenize, "AT_ONCE_PER_PROCESS", 500)
    monkeypatch.setattr(tokenize, "SHARED_CORES", 2)
    monkeypatch.setattr(tokenize, "cores", lambda: 2)


def test_processes_give_the_same_tokens_in_the_same_order(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    alone = token_corpus(str(local), tokenizer, tmp_path / "alone")
    two_processes(monkeypatch)
    together = token_corpus(str(local), tokenizer, tmp_path / "together")
    assert (together.sha256, together.bytes) == (alone.sha256, alone.bytes)


def test_an_error_in_the_text_ends_the_processes_too(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    two_processes(monkeypatch)
    local.write_text(local.read_text() + "no JSON\n")
    with pytest.raises(UsageError, match=r"a\.jsonl:401: not JSON"):
        token_corpus(str(local), tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize(
    ("cores", "larger", "origin", "processes"),
    [(8, 0, None, [8]), (8, 1, None, []), (7, 0, None, []), (8, 0, "", [])],
    ids=["shared", "small text", "few cores", "tokenizer that other processes can't open"],
)
def test_which_texts_several_processes_encode(
    tmp_path: Path,
    local: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    larger: int,
    origin: str | None,
    processes: list[int],
) -> None:
    used = list[int]()

    def by_processes(count: int, *_: Any) -> Iterator[Any]:
        used.append(count)
        return iter(())

    monkeypatch.setattr(tokenize, "SHARED_BYTES", local.stat().st_size + larger)
    monkeypatch.setattr(tokenize, "cores", lambda: cores)
    monkeypatch.setattr(tokenize, "_by_processes", by_processes)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    token_corpus(str(local), tokenizer if origin is None else tokenizer._replace(origin=origin), tmp_path / "cache")
    assert used == processes
