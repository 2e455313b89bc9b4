"""Files of tokens that other programs have written: nanoGPT's and llm.c's .bin files, and NumPy's .npy files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch_train.common.config import parse, problems
from launch_train.common.errors import UsageError
from launch_train.common.storage import open_storage
from launch_train.data import open_data
from launch_train.data.sample_order import share
from launch_train.data.source import Source
from launch_train.data.token_file import Shard
from launch_train.distributed.process_group import Ranks
from launcher.testing.googlecloud import GoogleCloud


def nanogpt(path: Path, tokens: Sequence[int], dtype: str = "uint16") -> Path:
    """Write as data/shakespeare/prepare.py of nanoGPT does."""
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def llmc(path: Path, tokens: Sequence[int], magic: int = 20240520, version: int = 1, promised: int = -1) -> Path:
    """Write as write_datafile in dev/data/data_common.py of llm.c does."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if promised < 0 else promised
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.array(tokens, dtype=np.uint16 if version == 1 else np.uint32).tobytes())
    return path


def saved(path: Path, tokens: Any) -> Path:
    with path.open("wb") as file:
        np.save(file, tokens)
    return path


def opened(data: Any, **model: Any) -> Source:
    config = {"data": data, "model": {"block_size": 8, "vocab_size": 50304, **model}, "batch_size": 8}
    return open_data(parse(config), Ranks())


FORMATS: dict[str, Any] = {
    "nanogpt.bin": nanogpt,
    "llmc.bin": llmc,
    "llama3.bin": lambda path, tokens: llmc(path, tokens, 20240801, 7),
    "tokens.npy": lambda path, tokens: saved(path, np.array(tokens, np.uint16)),
    "wide.npy": lambda path, tokens: saved(path, np.array(tokens, np.int64)),
    "network-order.npy": lambda path, tokens: saved(path, np.array(tokens, ">u4")),
    "llmc-by-its-magic-number": llmc,
    "numpy-by-its-magic-number": lambda path, tokens: saved(path, np.array(tokens, np.uint32)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_same_batches(tmp_path: Path, name: str) -> None:
    tokens = [number * 7 % 50257 for number in range(2000)]
    source = opened(str(FORMATS[name](tmp_path / name, tokens)))
    reference = opened(str(nanogpt(tmp_path / "reference.bin", tokens)))
    inputs, targets = source.train(3, slice(0, 8))
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs, reference.train(3, slice(0, 8))[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs[:, 1:] - inputs[:, :-1] == 7).all()
    assert source.facts["data_tokens"] == 2000
    assert source.facts["data_held_out_tokens"] == 200
    assert source.facts["data_unit"] == "token"
    assert source.unigram_entropy is not None


def test_many_shards_are_one_order_that_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    """No window spans two shards: in each, consecutive tokens differ by one."""
    for number in range(5):
        nanogpt(tmp_path / f"part_{number}.bin", range(number * 1000, number * 1000 + 400 + number))
    source, again = opened(str(tmp_path)), opened(str(tmp_path / "part_*.bin"))
    for step in (1, 7, 1_000_000):
        whole = source.train(step, slice(0, 8))[0]
        assert torch.equal(whole, again.train(step, slice(0, 8))[0])
        assert (whole[:, 1:] - whole[:, :-1] == 1).all()
        parts = [again.train(step, share(8, rank, 4))[0] for rank in range(4)]
        assert torch.equal(whole, torch.cat(parts))
    seen = {int(token) // 1000 for step in range(50) for token in source.train(step, slice(0, 8))[0][:, 0]}
    assert seen == {0, 1, 2, 3, 4}
    assert source.facts["data_files"] == 5
    assert {int(token) // 1000 for token in source.held_out(0, 1, slice(0, 8))[0].flatten()} == {4}


def test_a_folder_of_nanogpt_trains_on_train_and_evaluates_on_val(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nanogpt(tmp_path / "train.bin", [1, 2] * 200)
    nanogpt(tmp_path / "val.bin", [3] * 100)
    (tmp_path / "input.txt").write_text("First Citizen:")
    source = opened(str(tmp_path), vocab_size=65)
    assert set(source.train(1, slice(0, 8))[0].flatten().tolist()) == {1, 2}
    assert set(source.held_out(0, 1, slice(0, 8))[0].flatten().tolist()) == {3}
    assert source.facts["data_held_out_tokens"] == 100
    assert source.facts["data_tokens"] == 500
    assert "2 of 3 files" in capsys.readouterr().out


def test_validation_shards_of_ones_choice(tmp_path: Path) -> None:
    """Names then mean nothing: all of `train` is trained on."""
    nanogpt(tmp_path / "train.bin", [1] * 100)
    nanogpt(tmp_path / "val.bin", [2] * 100)
    nanogpt(tmp_path / "other.npy.bin", [3] * 100)
    source = opened({"train": str(tmp_path / "[tv]*.bin"), "val": str(tmp_path / "o*.bin")})
    assert set(source.train(1, slice(0, 8))[0].flatten().tolist()) == {1, 2}
    assert set(source.held_out(0, 1, slice(0, 8))[0].flatten().tolist()) == {3}
    assert source.facts["data_held_out_tokens"] == 100
    (tmp_path / "a.txt").write_text("text" * 100)
    with pytest.raises(UsageError, match=r"a\.txt text: train and val must both hold text, or both tokens"):
        opened({"train": str(tmp_path / "train.bin"), "val": str(tmp_path / "a.txt")})


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": (lambda p: nanogpt(p / "a.bin", []), {}, r"a\.bin is empty: delete it"),
    "odd length": (
        lambda p: (p / "a.bin").write_bytes(b"x" * 999),
        {},
        r"999 bytes, .* not a whole .*data\.dtype",
    ),
    "uint32 as uint16": (
        lambda p: nanogpt(p / "a.bin", range(5, 1000), "uint32"),
        {},
        r"is uint32; set data\.dtype: uint32",
    ),
    "uint16 as uint32": (
        lambda p: nanogpt(p / "a.bin", [40000] * 1000),
        {"dtype": "uint32"},
        r"token 0 is 2621480000: the file isn't uint32; set data\.dtype",
    ),
    "beyond the vocabulary": (
        lambda p: nanogpt(p / "a.bin", [*range(500), 50304, *range(500)]),
        {},
        r"a\.bin: token 500 is 50304; model\.vocab_size is 50304: set it to 50305",
    ),
    "negative": (lambda p: saved(p / "a.npy", np.array([5, -100] * 500)), {}, r"a\.npy: token 1 is -100"),
    "llm.c: cut": (lambda p: llmc(p / "a.bin", [1] * 1000, promised=2000), {}, r"1,000 tokens, .* says 2,000: .*copy"),
    "llm.c: nothing": (lambda p: llmc(p / "a.bin", []), {}, r"a\.bin has no tokens"),
    "llm.c: header cut": (
        lambda p: (p / "a.bin").write_bytes(llmc(p / "b", [1]).read_bytes()[:500]),
        {},
        r"a header that is cut short",
    ),
    "llm.c: version": (
        lambda p: llmc(p / "a.bin", [1] * 1000, version=2),
        {},
        r"magic number 20240520 with version 2; supported: 20240520 version 1 and 20240801 version 7",
    ),
    "llm.c: questions": (lambda p: llmc(p / "a.bin", [1], 20240522), {}, r"multiple-choice"),
    "llm.c: type": (
        lambda p: llmc(p / "a.bin", [1] * 1000),
        {"dtype": "uint32"},
        r"is uint16 by its header, and data\.dtype is uint32: remove",
    ),
    "npy: floats": (lambda p: saved(p / "a.npy", np.ones(1000)), {}, r"holds float64, not integers"),
    "npy: two dimensions": (lambda p: saved(p / "a.npy", np.ones((2, 500), int)), {}, r"shape \(2, 500\), .*ravel"),
    "npy: nothing": (lambda p: saved(p / "a.npy", np.ones(0, int)), {}, r"a\.npy has no tokens"),
    "npy: cut": (
        lambda p: (p / "a.npy").write_bytes(saved(p / "b", np.ones(1000, "u2")).read_bytes()[:-500]),
        {},
        r"750 tokens, .* says 1,000",
    ),
    "npy: none": (
        lambda p: (p / "a.npy").write_bytes(b"x" * 1000),
        {},
        r"not a \.npy file: it starts with b'xxxxxx'",
    ),
    "npy: header": (
        lambda p: (p / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00abc"),
        {},
        r"not a readable \.npy",
    ),
    "short": (lambda p: nanogpt(p / "a.bin", range(89)), {}, r"89 tokens; block_size 8 needs 90"),
    "tokenizer": (
        lambda p: nanogpt(p / "a.bin", range(1000)),
        {"tokenizer": "tiktoken:gpt2"},
        r"holds tokens, not text: remove data\.tokenizer",
    ),
    "text": (
        lambda p: (p / "a.txt").write_text("text" * 100),
        {"dtype": "uint16"},
        r"is text: remove data\.dtype",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_files_that_are_refused(tmp_path: Path, case: str, folder: bool) -> None:
    make, settings, words = WRONG[case]
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    (tmp_path / "data" / "b").unlink(missing_ok=True)
    (path,) = (tmp_path / "data").iterdir()
    with pytest.raises(UsageError, match=words) as error:
        opened({"path": str(tmp_path / "data" if folder else path), **settings})
    assert "\n" not in str(error.value)


def test_shards_too_short_for_a_window(tmp_path: Path) -> None:
    for number in range(20):
        nanogpt(tmp_path / f"{number}.bin", range(8))
    with pytest.raises(UsageError, match=r"has 160 tokens in 20 files; block_size 8 needs 90"):
        opened(str(tmp_path))
    nanogpt(tmp_path / "train.bin", range(100))
    nanogpt(tmp_path / "val.bin", range(8))
    for number in range(20):
        (tmp_path / f"{number}.bin").unlink()
    with pytest.raises(UsageError, match=r"the longest validation file has 8 tokens; block_size 8 needs 9"):
        opened(str(tmp_path))


def test_files_are_examined_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch_train.data import token_shards

    scanned, real = list[Path](), token_shards._scanned

    def counted(shard: Shard) -> Any:
        scanned.append(shard.path)
        return real(shard)

    monkeypatch.setattr(token_shards, "_scanned", counted)
    path = nanogpt(tmp_path / "a.bin", range(1000))
    digests = {opened(str(path)).facts["data_sha256"] for _ in range(2)}
    assert (len(digests), scanned) == (1, [path])
    nanogpt(path, range(1, 1001))
    assert opened(str(path)).facts["data_sha256"] not in digests
    assert len(scanned) == 2


def test_shards_in_a_bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    storage = open_storage("gs://my-bucket")
    for name, first in (("train_1", 0), ("train_2", 1000), ("val_0", 5000)):
        content = llmc(tmp_path / name, range(first, first + 500)).read_bytes()
        storage.write(f"tokens/fineweb_{name}.bin", content)
    source = opened("gs://my-bucket/tokens")
    assert source.facts["data_files"] == 3
    assert int(source.held_out(0, 1, slice(0, 8))[0].min()) >= 5000
    one = opened("gs://my-bucket/tokens/*_train_[2-9].bin")
    assert one.facts["data_files"] == 1
    assert int(one.train(1, slice(0, 8))[0].min()) >= 1000
    assert opened("gs://my-bucket/**/*_train_*.bin").facts["data_files"] == 2
    with pytest.raises(UsageError, match=r"gs://my-bucket/tokens/\*\.npy does not exist"):
        opened("gs://my-bucket/tokens/*.npy")


def test_settings_for_tokens() -> None:
    assert not problems({"data": "shakespeare/train.bin", "model": {"vocab_size": 65}})
    assert not problems(
        {"data": {"path": "gs://bucket/tokens/*_train_*.bin", "dtype": "uint32"}, "model": {"vocab_size": 9}}
    )
    assert problems({"data": "input.txt", "model": {"vocab_size": 65}})
    assert problems({"data": {"path": "a.bin", "dtype": "float32"}})
