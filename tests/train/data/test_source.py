from __future__ import annotations

import math
import os
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.data import open_data
from launch_train.data.sample_order import HELD_OUT, ORDER, TRAIN, draw, order, share
from launch_train.data.source import Source
from launch_train.data.synthetic import SyntheticImages, SyntheticTokens
from launch_train.data.text import STDLIB_CAP, Text, stdlib_files
from launch_train.data.token_file import unigram_entropy
from launch_train.distributed.process_group import Ranks
from tests.train.data.corpora import byte_corpus

CPU = torch.device("cpu")
TEXT = b"To be, or not to be: that is the question. " * 50


@pytest.fixture
def corpus(tmp_path: Path) -> Text:
    (tmp_path / "text").write_bytes(TEXT)
    return Text(byte_corpus(str(tmp_path / "text"), tmp_path), 16, 7, 8, CPU)


def sources(corpus: Text) -> list[Source]:
    return [corpus, SyntheticTokens(100, 16, 7, 8, CPU), SyntheticImages(10, 32, 7, 8, CPU)]


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    assert (draw(1, TRAIN, 5, 100, 1000) == draw(1, TRAIN, 5, 100, 1000)).all()
    others = [draw(2, TRAIN, 5, 100, 1000), draw(1, HELD_OUT, 5, 100, 1000), draw(1, TRAIN, 6, 100, 1000)]
    assert all((draw(1, TRAIN, 5, 100, 1000) != other).any() for other in others)
    assert set(draw(2**63 - 1, 0, 1, 1000, 4).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(corpus: Text, world: int) -> None:
    for source in sources(corpus):
        whole = source.train(3, share(8, 0, 1))
        parts = [source.train(3, share(8, rank, world)) for rank in range(world)]
        for one, many in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(many))


def test_steps_differ_and_held_out_batches_are_the_same_each_time(corpus: Text) -> None:
    everything = slice(0, 8)
    for source in sources(corpus):
        assert not torch.equal(source.train(1, everything)[0], source.train(2, everything)[0])
        assert torch.equal(source.held_out(1, 3, everything)[0], source.held_out(1, 3, everything)[0])
        assert not torch.equal(source.held_out(0, 3, everything)[0], source.held_out(1, 3, everything)[0])


def test_targets_are_the_inputs_one_byte_on(corpus: Text) -> None:
    inputs, targets = corpus.train(1, slice(0, 8))
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(bytes(row) in TEXT for row in inputs.tolist())


def test_training_never_sees_what_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 900 + b"b" * 100)
    source = Text(byte_corpus(str(tmp_path / "text"), tmp_path), 9, 7, 1000, CPU)
    _, targets = source.train(1, slice(0, 1000))
    inputs, held_out = source.held_out(0, 1, slice(0, 1000))
    assert set(targets.flatten().tolist()) == {ord("a")}
    assert set(inputs.flatten().tolist()) == set(held_out.flatten().tolist()) == {ord("b")}
    assert source.facts["data_held_out_bytes"] == 100


def test_held_out_windows_reach_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(900) + bytes(range(1, 101)))
    source = Text(byte_corpus(str(tmp_path / "text"), tmp_path), 9, 7, 10, CPU)
    batches = [source.held_out(index, 4, slice(0, 10)) for index in range(4)]
    assert batches[0][0][0, 0] == 1
    assert batches[3][1][9, 8] == 100


def test_unigram_entropy_of_known_texts() -> None:
    even, one = np.full(256, 10**6), np.zeros(256, np.int64)
    one[65] = 10**9
    assert unigram_entropy(even, even) == pytest.approx(math.log(256), abs=1e-6)
    assert unigram_entropy(one, one) == pytest.approx(0, abs=1e-6)
    assert unigram_entropy(one, even) > 20  # bytes that training never saw


def test_a_folder_is_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_bytes(b"second ")
    (folder / "a.py").write_bytes("först ".encode())
    (folder / "c.md").write_bytes(b"third")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "latin1").write_bytes(b"\xe9t\xe9")
    (folder / ".hidden").write_bytes(b"hidden")
    (folder / "b" / ".git").mkdir()
    (folder / "b" / ".git" / "config").write_bytes(b"hidden too")
    corpus = byte_corpus(str(folder), tmp_path / "cache")
    assert corpus.shards[0].path.read_bytes() == "först second third".encode()
    assert corpus.files == 3
    assert corpus.shards[0].path.name == f"{corpus.sha256}.bin"


def test_a_long_file_whose_first_block_ends_within_a_character_is_text(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "long").write_bytes(b"x" + "é".encode() * 5000)
    assert byte_corpus(str(tmp_path / "folder"), tmp_path / "cache").bytes == 10001


def test_preparing_again_gives_the_same_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(TEXT)
    first, second = (byte_corpus(str(tmp_path / "folder"), tmp_path / "cache") for _ in range(2))
    assert first == second
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.shards[0].path.name]


def test_python_stdlib_is_megabytes_of_source_without_tests(tmp_path: Path) -> None:
    corpus = byte_corpus("python-stdlib", tmp_path)
    assert 3_000_000 < corpus.bytes <= STDLIB_CAP
    assert 2 < corpus.unigram_entropy < 4  # nats per byte; English text and code have about 3.2
    names = {path.parent.name for path in stdlib_files(Path(math.__spec__.origin or "").parent)}
    assert not {"test", "tests", "site-packages"} & names


def test_python_stdlib_does_not_walk_the_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a run waits for the walk, and torch alone has 13,000 files."""
    for name in ("os.py", "json/decoder.py", "site-packages/torch/nn/linear.py", "json/tests/test_decode.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    scandir, walked = os.scandir, list[str]()

    def recorded(folder: str) -> Any:
        walked.append(os.path.relpath(folder, tmp_path))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", recorded)
    assert {path.name for path in stdlib_files(tmp_path)} == {"os.py", "decoder.py"}
    assert sorted(walked) == [".", "json"]


def test_just_enough_text_is_enough(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 650)
    source = open_data(parse({"data": str(tmp_path / "data")}), Ranks())
    inputs, targets = source.held_out(0, 1, slice(0, 24))
    assert inputs.shape == targets.shape == (24, 64)
    (tmp_path / "data").write_bytes(b"x" * 649)
    with pytest.raises(UsageError, match="has 649 bytes; block_size 64 needs 650"):
        open_data(parse({"data": str(tmp_path / "data")}), Ranks())


def test_synthetic_tokens_can_be_learnt_and_fill_the_vocabulary() -> None:
    inputs, targets = SyntheticTokens(10, 8, 1, 1000, CPU).train(1, slice(0, 1000))
    strides = (targets - inputs) % 10
    assert (strides == strides[:, :1]).all()
    assert set(strides.flatten().tolist()) == {1, 2, 3, 4}
    assert set(inputs.flatten().tolist()) == set(range(10))


def test_synthetic_images_have_torchvisions_shape() -> None:
    images, labels = SyntheticImages(10, 32, 1, 64, CPU).train(1, slice(0, 64))
    assert (images.shape, images.dtype) == ((64, 3, 32, 32), torch.float32)
    assert (labels.dtype, set(labels.tolist())) == (torch.int64, set(range(10)))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = [order(seed, ORDER, epoch, 100).tolist() for seed, epoch in ((7, 0), (7, 1), (7, 2), (8, 0))]
    assert all(sorted(one) == list(range(100)) for one in orders)
    assert all(one != other for one, other in combinations(orders, 2))
