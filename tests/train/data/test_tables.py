"""Parquet and Arrow files, as Hugging Face's datasets writes them. They are judged by datasets itself, where it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.common.storage import open_storage
from launch_train.data import open_data, records
from launch_train.data.source import Source
from launch_train.data.text import corpus_of_bytes, files_of
from launch_train.distributed.process_group import Ranks
from launcher.testing.googlecloud import GoogleCloud
from tests.train import trials
from tests.train.data.corpora import byte_corpus

pytestmark = pytest.mark.judges

TEXTS = ["to be or not to be", None, "", "that is the question", "né à Paris\nen 1900"] * 40


@pytest.fixture
def arrow() -> Any:
    pytest.importorskip("pyarrow.parquet")
    return sys.modules["pyarrow"]


def write(arrow: Any, path: Path, columns: dict[str, Any]) -> Path:
    """A table in several parts: Parquet, or by the name Arrow's file or streaming format."""
    table = arrow.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        arrow.parquet.write_table(table, path, row_group_size=7)
        return path
    make = arrow.ipc.new_file if "file" in path.name else arrow.ipc.new_stream
    with arrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def opened(data: Any, **model: Any) -> Source:
    return open_data(parse({"data": data, "model": {"block_size": 8, **model}, "batch_size": 8}), Ranks())


NAMES = ["a.parquet", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_a_document(arrow: Any, tmp_path: Path, cache: Path, name: str) -> None:
    path = write(arrow, tmp_path / name, {"id": list(range(len(TEXTS))), "text": TEXTS})
    assert list(records.documents(path, "text")) == [text for text in TEXTS if text]
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in TEXTS if text)
    (tmp_path / "same.jsonl").write_text(lines)
    corpus, same = byte_corpus(str(path), cache), byte_corpus(str(tmp_path / "same.jsonl"), cache)
    assert corpus.sha256 == same.sha256
    assert opened(str(path)).facts["data_unit"] == "byte"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [300, 100_000])
def test_token_lists_are_tokens(arrow: Any, tmp_path: Path, name: str, most: int) -> None:
    rows = [[number % most, (number + 1) % most] for number in range(most - 300, most)] + [[]]
    path = write(
        arrow, tmp_path / name, {"input_ids": arrow.array(rows, arrow.list_(arrow.int32())), "length": [2] * 301}
    )
    source = opened(str(path), vocab_size=100_000)
    flat = np.array([token for row in rows for token in row])
    assert source.facts["data_tokens"] == 600
    inputs, targets = source.train(1, slice(0, 8))
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        at = int(source.drawn(1)[inputs.tolist().index(row)])
        assert row == flat[at : at + 8].tolist()
        assert following == flat[at + 1 : at + 9].tolist()


def test_another_column_holds_the_text(arrow: Any, tmp_path: Path) -> None:
    write(arrow, tmp_path / "a.parquet", {"content": ["to be or not to be"] * 20, "input_ids": [[1]] * 20})
    source = opened({"path": str(tmp_path / "a.parquet"), "column": "content"})
    assert source.facts["data_bytes"] == 20 * 19
    (tmp_path / "a.jsonl").write_text('{"content": "to be or not to be"}\n' * 20)
    assert opened({"path": str(tmp_path / "a.jsonl"), "column": "content"}).facts["data_bytes"] == 20 * 19
    with pytest.raises(UsageError, match=r'a\.jsonl:1: not a JSON object with "text", it has content'):
        opened(str(tmp_path / "a.jsonl"))


def test_splits_by_their_names_and_nothing_else_of_the_folder(arrow: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a data set")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test", "validation"]}')
    for split, letter in (("train", "a"), ("test", "b"), ("validation", "c")):
        for part in range(2):
            write(arrow, tmp_path / split / f"data-0000{part}-of-00002.arrow", {"text": [letter * 50]})
    source = opened(str(tmp_path))
    trained = bytes(source.train(1, slice(0, 8))[0].flatten().tolist())
    held_out = bytes(source.held_out(0, 1, slice(0, 8))[0].flatten().tolist())
    assert set(trained) <= set(b"a\n")
    assert set(held_out) <= set(b"c\n")
    chosen = opened({"train": str(tmp_path / "train"), "val": str(tmp_path / "test")})
    assert set(chosen.held_out(0, 1, slice(0, 8))[0].flatten().tolist()) <= set(b"b\n")


@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        (
            "a.parquet",
            {"title": ["x"], "body": ["y"]},
            r"a\.parquet has the columns title, body, and no text: .*column",
        ),
        ("a.arrow", {"text": [1, 2]}, r"a\.arrow: text of row 1 is not text: '1'"),
        ("a.parquet", {"input_ids": [1, 2]}, r"input_ids is int64, not a list of tokens"),
        ("a.parquet", {"input_ids": [[1, -1]]}, r"input_ids is .* not tokens"),
        ("a.parquet", {"input_ids": [[1, None]]}, r"input_ids is .* not tokens"),
        ("a.arrow", {"input_ids": [["a"]]}, r"input_ids is .* not tokens"),
    ],
)
def test_tables_that_are_refused(arrow: Any, tmp_path: Path, name: str, columns: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        opened(str(write(arrow, tmp_path / name, columns)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [0, 4, 100, -100])
def test_truncated_tables_are_refused(arrow: Any, tmp_path: Path, name: str, kept: int) -> None:
    path = write(arrow, tmp_path / name, {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=rf"{name.replace('.', '.')} can't be read") as error:
        opened(str(path))
    assert "\n" not in str(error.value)


def test_the_package_is_named_with_the_line_to_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"need the package pyarrow .*add the line pyarrow to .*image\.requirements"):
        opened(str(tmp_path))


def test_tables_in_a_bucket_and_a_resume(
    arrow: Any, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    storage = open_storage("gs://my-bucket")
    for number in range(3):
        path = write(arrow, tmp_path / f"{number}.parquet", {"text": [f"{number} is text number {number}"] * 50})
        storage.write(f"set/train-{number}.parquet", path.read_bytes())
    data = "gs://my-bucket/set/*.parquet"
    trials.train(tmp_path / "whole", data=data)
    trials.preempted(tmp_path / "run", 11, data=data)
    trials.train(tmp_path / "run", generation=1, data=data)
    assert trials.losses(tmp_path / "run") == trials.losses(tmp_path / "whole")
    assert trials.differences(tmp_path / "run", tmp_path / "whole") == set()


def test_what_datasets_itself_saves(arrow: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset(datasets.table.InMemoryTable(arrow.table({"text": TEXTS})), fingerprint="0123456789abcdef")
    made.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": made, "validation": made}).save_to_disk(tmp_path / "both")
    made.to_parquet(tmp_path / "a.parquet")
    reference = byte_corpus(str(tmp_path / "a.parquet"), cache)
    assert byte_corpus(str(tmp_path / "one"), cache).sha256 == reference.sha256
    theirs = "".join(f"{text}\n" for text in datasets.load_from_disk(tmp_path / "one")["text"] if text)
    assert reference.shards[0].path.read_text() == theirs
    files = files_of(str(tmp_path / "both" / "train"))
    assert corpus_of_bytes(files, cache, "train").sha256 == reference.sha256
    assert opened(str(tmp_path / "both")).facts["data_files"] == 2
