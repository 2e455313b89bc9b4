"""Text as tokens, and with tokens hidden."""

from __future__ import annotations

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch_train.common.config import parse
from launch_train.common.errors import UnfitError, UsageError
from launch_train.data import open_data
from launch_train.data import tokenize as made
from launch_train.data.masked_lm import Masked, MaskingRule, bits, hide
from launch_train.data.sample_order import MASK, share
from launch_train.data.source import IGNORED
from launch_train.data.synthetic import SyntheticTokens
from launch_train.data.text import Text
from launch_train.data.token_file import count
from launch_train.data.tokenizers import Tokenizer, open_tokenizer
from launch_train.distributed.process_group import Ranks
from tests.train.data.corpora import byte_corpus, token_corpus

CPU = torch.device("cpu")


def packed(name: str, content: bytes) -> bytes:
    """Compress by the name's suffix. Zstandard in two frames, as pzstd and appending write it."""
    if name.endswith(".zst"):
        zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
        half = len(content) // 2
        return bytes(zstd.compress(content[:half]) + zstd.compress(content[half:]))
    return gzip.compress(content, mtime=0) if name.endswith(".gz") else content


WORDS = ["to be or not to be", "that is the question", "whether 'tis nobler in the mind", "to suffer"] * 8


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE, trained here."""
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Trained(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "[MASK]"], show_progress=False
    )
    made.train_from_iterator(WORDS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def decode(path: Path, ids: Any) -> str:
    from tokenizers import Tokenizer as Trained

    text: str = Trained.from_file(str(path)).decode([int(one) for one in ids], skip_special_tokens=False)
    return text


def test_text_becomes_tokens_and_comes_back(tmp_path: Path, tokenizer_file: Path, cache: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not\r\nto be")
    (tmp_path / "text" / "b.txt").write_text("the question")
    corpus = token_corpus(str(tmp_path / "text"), open_tokenizer(str(tokenizer_file)), cache)
    assert (
        decode(tokenizer_file, corpus.shards[0].tokens())
        == "to be or not\r\nto be<|endoftext|>the question<|endoftext|>"
    )
    assert (corpus.files, corpus.bytes, corpus.shards[0].dtype, corpus.unit) == (2, 31, "uint16", "token")
    assert corpus.vocab_size == 300 or corpus.vocab_size > 258
    assert count(corpus.parts()[1]) == corpus.length // 10
    assert 0 < corpus.unigram_entropy < 10
    assert corpus.mask == 1


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".ZST"])
def test_jsonl_has_a_document_a_line(tmp_path: Path, tokenizer_file: Path, cache: Path, suffix: str) -> None:
    content = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("to be\nor", "", "not")) + "\n"
    path = tmp_path / f"docs.jsonl{suffix}"
    path.write_bytes(packed(suffix.lower(), content.encode()))
    corpus = token_corpus(str(path), open_tokenizer(str(tokenizer_file)), cache)
    assert decode(tokenizer_file, corpus.shards[0].tokens()) == "to be\nor<|endoftext|>not<|endoftext|>"


def test_it_is_made_once_and_again_for_what_has_changed(tmp_path: Path, tokenizer_file: Path, cache: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be")
    asked = list[int]()
    real = open_tokenizer(str(tokenizer_file))

    def encode(texts: list[str]) -> list[list[int]]:
        asked.append(len(texts))
        return real.encode(texts)

    counted = real._replace(encode=encode)
    first = token_corpus(str(tmp_path / "text"), counted, cache)
    assert token_corpus(str(tmp_path / "text"), counted, cache) == first
    assert asked == [1]
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".tokens"]
    first.shards[0].path.write_bytes(first.shards[0].path.read_bytes()[:-2])  # cut short: it isn't taken
    assert token_corpus(str(tmp_path / "text"), counted, cache) == first
    (tmp_path / "text").write_text("to be or not to bo")
    assert token_corpus(str(tmp_path / "text"), counted, cache).shards != first.shards
    assert asked == [1, 1, 1]
    other = counted._replace(digest="another", end=None)
    assert token_corpus(str(tmp_path / "text"), other, cache).shards != first.shards


CHARACTERS = Tokenizer(
    "characters",
    "c",
    1 << 20,
    None,
    None,
    lambda texts: [[ord(one) for one in t] for t in texts],
    lambda tokens: "".join(map(chr, tokens)),
)


@given(
    text=st.text(st.sampled_from("ab \n\r\té"), max_size=60),
    size=st.integers(1, 9),
)
def test_cutting_a_document_loses_nothing_and_cuts_between_lines(text: str, size: int) -> None:
    import io

    before, made.PIECE = made.PIECE, size
    try:
        pieces = list(made._cut(io.StringIO(text, newline="")))
    finally:
        made.PIECE = before
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(text)
    for one, following in pairwise(pieces):
        between = one.text.endswith("\n") and not following.text[0].isspace()
        assert between or len(one.text) >= 16 * size - 1


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text").write_text("é\U0001f600" * 400)
    corpus = token_corpus(str(tmp_path / "text"), CHARACTERS, cache)
    assert (corpus.shards[0].dtype, corpus.shards[0].path.stat().st_size, corpus.mask) == ("uint32", 3200, 1 << 20)
    inputs, targets = Text(corpus, 4, 1, 2, CPU).train(1, slice(0, 2))
    assert inputs.dtype == targets.dtype == torch.int64
    assert set(inputs.flatten().tolist()) == {0xE9, 0x1F600}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"abc\xff\xfe" * 10, "is not UTF-8"),
        ("a.txt.gz", b"not packed", "can't be unpacked"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-8], "can't be unpacked"),
        ("a.txt.zst", b"", "a.txt.zst can't be unpacked"),
        ("a.txt.zst", b"not packed", "a.txt.zst can't be unpacked"),
        ("a.jsonl.zst", bytes.fromhex("28b52ffd2003190000") + b'{"', "a.jsonl.zst can't be unpacked"),
    ],
)
def test_text_that_is_none_is_refused(tmp_path: Path, cache: Path, name: str, content: bytes, words: str) -> None:
    packed(name, b"")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        token_corpus(str(tmp_path / name), CHARACTERS, cache)


PREPARED: dict[str, Any] = {
    "bytes": byte_corpus,
    "tokens": lambda data, cache: token_corpus(data, CHARACTERS, cache),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.JSONL", "a.ndjson"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_records_are_texts_for_bytes_too(tmp_path: Path, cache: Path, name: str, start: bytes) -> None:
    content = start + b'{"id": 1, "text": "to be\\nor"}\n\n{"text": ""}\r\n{"text": "n\\u00f6t"}'
    (tmp_path / name).write_bytes(packed(name, content))
    corpus = byte_corpus(str(tmp_path / name), cache, "mine")
    assert corpus.shards[0].path.read_bytes() == "to be\nor\nnöt\n".encode()
    assert (corpus.bytes, corpus.name, corpus.unit) == (14, "mine", "byte")


def test_records_beside_plain_text(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "b.jsonl.txt").write_text("{two}\n")
    (folder / "c.json").write_text("[3]\n")
    assert byte_corpus(str(folder), cache).shards[0].path.read_bytes() == b"one\n{two}\n[3]\n"


def test_several_files_by_a_pattern_or_a_folder(tmp_path: Path, cache: Path) -> None:
    for number, name in enumerate(("a.jsonl.gz", "b.jsonl.zst", "sub/c.jsonl", "d.txt.zst")):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        content = f"text {number}" if name.startswith("d") else json.dumps({"text": f"text {number}"})
        (tmp_path / "texts" / name).write_bytes(packed(name, content.encode()))

    def read(path: str) -> bytes:
        return byte_corpus(str(tmp_path / path), cache).shards[0].path.read_bytes()

    assert read("texts") == b"text 0\ntext 1\ntext 3text 2\n"
    assert read("texts/*.jsonl*") == b"text 0\ntext 1\n"
    assert read("texts/**/*.jsonl*") == b"text 0\ntext 1\ntext 2\n"
    assert read("texts/s*") == b"text 2\n"
    with pytest.raises(UsageError, match=r"\*\.csv does not exist on this machine"):
        read("texts/*.csv")


def test_the_package_for_zst_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"need the package backports\.zstd .*pip install .*image\.requirements"):
        byte_corpus(str(tmp_path / "a.jsonl.zst"), cache)


@pytest.mark.parametrize("prepared", PREPARED.values(), ids=PREPARED)
@pytest.mark.parametrize("within", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b"plain words", "not JSON"),
        (b'{"content": "x", "id": 3}', 'not a JSON object with "text", it has content, id'),
        (b'{"text": 3}', '"text" is not a string'),
        (b'["text"]', 'not a JSON object with "text"'),
        (b"null", 'not a JSON object with "text"'),
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        ('{"text": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"text": "\\ud800"}', "unpaired surrogate"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_record_is_refused_with_its_line(
    tmp_path: Path, cache: Path, prepared: Any, within: bool, line: bytes, words: str
) -> None:
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(UsageError) as error:
        prepared(str(path.parent if within else path), cache)
    assert str(error.value).startswith(f"data: {path}:3: {words}")


@pytest.mark.parametrize("prepared", PREPARED.values(), ids=PREPARED)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_file_of_plain_json_is_no_text(tmp_path: Path, cache: Path, prepared: Any, name: str) -> None:
    (tmp_path / name).write_bytes(b'[{"text": "x"}]')
    with pytest.raises(UsageError, match=r"a\.json.* is JSON; .*> a\.jsonl"):
        prepared(str(tmp_path / name), cache)


def test_a_run_with_a_tokenizer(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "text").write_text(" ".join(WORDS) * 5)
    data = {"path": str(tmp_path / "text"), "tokenizer": str(tokenizer_file)}
    source = open_data(parse({"data": data, "model": {"vocab_size": 320, "block_size": 16}}), Ranks())
    assert source.facts["data_unit"] == "token"
    assert source.facts["tokenizer"] == "tokenizer.json"
    assert source.facts["data_tokens"] > 10 * source.facts["data_held_out_tokens"] - 10
    inputs, targets = source.held_out(0, 1, slice(0, 24))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with pytest.raises(UsageError, match=r"has \d+ tokens; block_size 10000 needs 100010"):
        open_data(parse({"data": data, "model": {"vocab_size": 320, "block_size": 10000}}), Ranks())


@pytest.mark.parametrize("tokenized", [False, True])
def test_separate_validation_text(tmp_path: Path, tokenizer_file: Path, tokenized: bool) -> None:
    (tmp_path / "a.txt").write_text("a" * 300)
    (tmp_path / "b.txt").write_text("b" * 100)
    data = {"train": str(tmp_path / "a.txt"), "val": str(tmp_path / "b.txt")}
    data |= {"tokenizer": str(tokenizer_file)} if tokenized else {}
    settings = {"data": data, "model": {"block_size": 16, "vocab_size": 320}}
    source = open_data(parse(settings), Ranks())
    other = [open_data(parse({**settings, "data": data | {"val": data[key]}}), Ranks()) for key in ("train", "val")]
    trained = {int(one) for step in range(20) for one in source.train(step, slice(0, 24))[0].flatten()}
    held_out = set(source.held_out(0, 1, slice(0, 24))[0].flatten().tolist())
    assert not trained & held_out
    assert source.facts["data"] == f"{data['train']}, val: {data['val']}"
    assert source.facts["data_files"] == 2
    assert len({one.facts["data_sha256"] for one in (source, *other)}) == 2  # the latter is the same
    assert source.unigram_entropy is not None
    assert source.unigram_entropy > 4  # training never saw a b
    (tmp_path / "b.txt").write_text("b" * 15)
    with pytest.raises(UsageError, match=r"longest validation file has 1[56] (byte|token)s; block_size 16 needs 17"):
        open_data(parse(settings), Ranks())


def test_tokenizers_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"tiktoken has no gpt7, only .*gpt2"):
        open_tokenizer("tiktoken:gpt7")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(UnfitError, match=r"tiktoken's table of p50k_base is unavailable .*TIKTOKEN_CACHE_DIR"):
        open_tokenizer("tiktoken:p50k_base")


def test_an_encoding_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One made here, as the real tables must be downloaded."""
    import tiktoken
    from tiktoken import registry

    ranks = {bytes([one]): one for one in range(256)} | {b"to": 256}
    monkeypatch.setitem(
        registry.ENCODINGS,
        "gpt2",
        tiktoken.Encoding("gpt2", pat_str=r"\w+|\s|.", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}),
    )
    tokenizer = open_tokenizer("tiktoken:gpt2")
    assert tokenizer.encode(["to be", "o"]) == [[256, 32, 98, 101], [111]]
    assert tokenizer.decode([256, 32, 98, 101]) == "to be"
    assert tokenizer.decode([256, 9999, 0xE2, 0x82, 0xAC]) == "to\ufffd€", "a gap in the vocabulary"
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.mask, tokenizer.dtype) == (258, 257, None, "uint16")


# --- Hidden tokens --------------------------------------------------------------------------------------------------


def masked(batch_size: int = 8, share: float = 0.15) -> Masked:
    return Masked(SyntheticTokens(100, 30, 7, batch_size, CPU), share, 7, batch_size, CPU)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_what_is_hidden_does_not_depend_on_the_ranks(world: int) -> None:
    source = masked()
    whole = source.train(3, share(8, 0, 1))
    parts = [source.train(3, share(8, rank, world)) for rank in range(world)]
    for one, many in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(many))
    assert torch.equal(source.held_out(1, 2, slice(0, 8))[0], source.held_out(1, 2, slice(0, 8))[0])
    assert not torch.equal(source.train(3, slice(0, 8))[1], source.train(4, slice(0, 8))[1])


def test_so_many_are_hidden_and_so_many_of_them_replaced() -> None:
    source = masked(4000)
    inputs, targets = source.train(1, slice(0, 4000))
    plain, _ = SyntheticTokens(100, 30, 7, 4000, CPU).train(1, slice(0, 4000))
    hidden = targets != IGNORED
    assert torch.equal(inputs[~hidden], plain[~hidden])
    assert torch.equal(targets[hidden], plain[hidden])
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert hidden.any(dim=1).all()
    shown = inputs[hidden]
    assert (shown == 100).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (shown == targets[hidden]).float().mean().item() == pytest.approx(0.1 + 0.1 / 100, abs=0.01)
    assert set(shown.tolist()) == set(range(101))
    assert (source.vocab_size, source.facts["masked"]) == (101, 0.15)


def test_a_sample_always_has_something_hidden_and_never_the_end_of_a_document() -> None:
    tokens = np.array([[5, 9, 9, 9], [1, 2, 3, 9]])
    random = bits(1, MASK, 1, 0, 2, 4)
    for share_hidden, expected in ((1e-9, 1), (1.0, 3)):
        _, targets = hide(tokens, random, MaskingRule(share_hidden, 10, 10, 9))
        assert (targets != IGNORED).sum(axis=1).tolist() == [1, expected]
        assert not (targets == 9).any()


def test_bert_reads_bytes_with_a_mask_beyond_them() -> None:
    source = open_data(parse({"model": {"name": "bert"}, "data": __file__}), Ranks())
    inputs, targets = source.train(1, slice(0, 24))
    assert (inputs == 256).any()
    assert inputs.shape == targets.shape == (24, 64)
    assert source.vocab_size == 257
    synthetic = open_data(parse({"model": {"name": "bert"}, "data": "synthetic"}), Ranks())
    assert (synthetic.vocab_size, int(synthetic.train(1, slice(0, 24))[0].max())) == (320, 319)
    with pytest.raises(UsageError, match=r"bytes has 257 tokens, the mask included; the model's vocab_size, 256"):
        open_data(parse({"model": {"name": "bert", "vocab_size": 256}, "data": __file__}), Ranks())
