"""Data sets of the Hugging Face hub: the real client, and a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from launch_train.common.config import local_paths, problems
from launcher.testing.httpserver import Head, Response
from tests.train.hub import Hub, refusal, run_with_hub

FILES = {
    "main": {"README.md": "about", "data/train-0.jsonl": "a", "data/validation-0.jsonl": "b", "extra/x.jsonl": "c"},
    "refs/convert/parquet": {"one/train-0.jsonl": "d", "two/train-0.jsonl": "e"},
}


class DataSets(Hub):
    """A hub with the data sets org/set (FILES), org/other (only a copy) and org/gated."""

    def answer(self, head: Head) -> Response:
        path = unquote(head.path).strip("/").removeprefix("api/").removeprefix("datasets/")
        kind = next((word for word in ("/revision/", "/resolve/", "/tree/") if word in path), "/revision/")
        repo, _, rest = path.partition(kind)
        if repo == "org/gated":
            return refusal("GatedRepo", 403)
        if repo not in ("org/set", "org/other"):
            return refusal("RepoNotFound")
        if kind == "/resolve/":
            commit, _, name = rest.partition("/")
            letter = FILES["main" if commit[0] == "1" else "refs/convert/parquet"][name]
            data = (json.dumps({"text": letter * 50}) + "\n").encode() * 20
            return Response(data, headers={"ETag": f'"{commit[0]}-{letter}"', "X-Repo-Commit": commit})
        revision = {"1" * 40: "main", "2" * 40: "refs/convert/parquet"}.get(rest, rest or "main")
        if revision not in FILES:
            return refusal("RevisionNotFound")
        files = {"README.md": ""} if (repo, revision) == ("org/other", "main") else FILES[revision]
        about: Any = {"id": repo, "sha": ("1" if revision == "main" else "2") * 40}
        about["siblings"] = [{"rfilename": name} for name in files]
        if kind == "/tree/":
            about = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
        return Response(json.dumps(about).encode(), headers={"Content-Type": "application/json"})


PROGRAM = """
import json, sys
from launch_train.common.config import parse
from launch_train.common.errors import TrainError
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
for path in sys.argv[1:]:
    try:
        source = open_data(parse({"data": path, "model": {"block_size": 8}}), Ranks())
        seen = sorted(set(bytes(source.train(1, slice(0, 24))[0].flatten().tolist())) - {10})
        facts = {"files": source.facts["data_files"], "data": source.facts["data"]}
        print(json.dumps({**facts, "seen": bytes(seen).decode()}))
    except TrainError as error:
        print(json.dumps({"error": str(error), "exit": int(error.exit)}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    paths = ("hf:org/set/data/*", "hf:org/set@main/extra/*.jsonl", "hf:org/other/two/*")
    wrong = ("hf:org/set/*.csv", "hf:org/set", "hf:org/other", "hf:org/gated", "hf:org/none", "hf:org/set@v9")
    with DataSets() as hub:
        lines = run_with_hub(hub.url, tmp_path_factory.mktemp("cache"), PROGRAM, *paths, *wrong)
    return dict(zip((*paths, *wrong), lines, strict=True))


@pytest.mark.slow(turn=1)
@pytest.mark.parametrize(
    ("path", "files", "seen"),
    [("hf:org/set/data/*", 2, "ab"), ("hf:org/set@main/extra/*.jsonl", 1, "c"), ("hf:org/other/two/*", 1, "e")],
)
def test_files_of_the_hub(answers: dict[str, dict[str, Any]], path: str, files: int, seen: str) -> None:
    """The last one is in the hub's own copy only. JSON Lines are not split by their names."""
    assert answers[path] == {"files": files, "seen": seen, "data": path}


@pytest.mark.slow(turn=1)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf:org/set/*.csv", "the hub has no *.csv in it"),
        ("hf:org/set", "hf:org/set has the folders data, extra: choose one, hf:org/set/data/*"),
        ("hf:org/other", "has the folders one, two: choose one"),
        ("hf:org/gated", "is gated: accept its terms at"),
        ("hf:org/none", "has no such data set, or it is private: give a token in HF_TOKEN"),
        ("hf:org/set@v9", "the data set has no such revision"),
    ],
)
def test_what_the_hub_does_not_have(answers: dict[str, dict[str, Any]], path: str, words: str) -> None:
    assert words in answers[path]["error"]
    assert answers[path]["exit"] == 2


@pytest.mark.slow
def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    (found,) = run_with_hub("http://127.0.0.1:9", tmp_path, PROGRAM, "hf:org/set")
    assert "can't be downloaded from http://127.0.0.1:9" in found["error"]
    assert found["exit"] == 70


def test_names_of_data_sets() -> None:
    for path in ("hf:org/set", "hf:org/set@main", "hf:org/set/sample/*.parquet", "hf:a-b/c.d@v1/x"):
        assert not problems({"data": path})
        assert local_paths({"data": path}) == {}
    assert problems({"data": "hf:imdb"})
    assert problems({"data": {"path": "a", "tokenizer": "hf:org/set"}})
