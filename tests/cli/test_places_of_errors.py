"""An error that a spec causes names the line of the spec, or the flag, that set the value."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture import location, sources, syntax_tree
from tests.command import ROOT, launch

HEAD = "name: a\nmachine:\n  type: l4\n  gpus: 1\nregions: [us-central1]\n"


def where(tmp_path: Path, text: str, *argv: str, target: str = "vertex") -> str:
    """What stands before the text of the error: a line of job.yaml, or a flag."""
    (tmp_path / "job.yaml").write_text(text)
    ran = launch(target, "job.yaml", "--dry-run", *argv, cwd=tmp_path)
    assert (ran.code, ran.out) == (2, ""), ran.shown
    return ran.err.removeprefix("error: ").partition(": ")[0]


@pytest.mark.parametrize(
    ("target", "text", "line"),
    [
        ("vertex", HEAD.replace("gpus: 1", "gpus: 3"), 4),
        ("vertex", HEAD.replace("l4", "l5"), 3),
        ("local", HEAD.replace("l4", "l5"), 3),
        ("vertex", HEAD.replace("l4", "tpu"), 3),
        ("vertex", HEAD.replace("l4", "a100"), 3),
        ("vertex", HEAD + "limits:\n  wait_total: 30s\n", 7),
        ("vertex", HEAD.replace("l4", "n1-standard-8"), 3),
        ("vertex", HEAD.replace("[us-central1]", "\n  - us-central1\n  - us-centrall1"), 7),
        ("vertex", HEAD.replace("[us-central1]", "[mars-north1]"), 5),
        ("vm", HEAD + "zones: [us-central1-a, us-central1-z]\n", 6),
        ("vertex", HEAD + "limits:\n  hours: 10\n  usd: 1\n", 8),
        ("vertex", HEAD + "output: /tmp/x\n", 6),
        ("vertex", HEAD + "env:\n  A: a\n  B: ''\n", 8),
        ("vertex", HEAD + "secrets:\n  A: projects/p/secrets/s/versions/1\n", 6),
        ("vertex", HEAD + "identity: {network: default}\n", 6),
        ("vertex", HEAD + "vertex:\n  tensorboard: projects/p/locations/us-central1/tensorboards/1\n", 7),
        ("vertex", HEAD + "identity:\n  kms_key: projects/p/locations/us-east1/keyRings/r/cryptoKeys/k\n", 7),
        ("vertex", HEAD + "image:\n  wheel: cpu\n", 7),
        ("vertex", HEAD.replace("l4", "t4") + "run:\n  config:\n    precision: bf16\n", 8),
        ("vertex", HEAD.replace("gpus: 1", "gpus: 2") + "run:\n  config:\n    batch_size: 3\n", 8),
        ("vertex", HEAD + "run:\n  script: none.py\n", 7),
        ("vertex", HEAD + "run:\n  config:\n    data: none.txt\n", 8),
        ("vertex", HEAD + "run:\n  config:\n    model: mine:build\n", 8),
        ("vertex", HEAD + "image:\n  requirements: none.txt\n", 7),
        ("vertex", HEAD + "image:\n  code: none\n", 7),
        ("vertex", HEAD + "image:\n  torch: none.whl\n", 7),
        ("vm", HEAD + "vm:\n  idle_stop: 10s\n", 7),
        ("vm", HEAD + "vm:\n  lease: 40h\n", 7),
        ("vertex", HEAD + "mounts:\n- bucket: b-b\n- bucket: b-b\n  path: /data\n", 9),
        ("vertex", HEAD + "mounts:\n- path: /data\n  nfs: 10.0.0.2:/a\n", 7),
        ("vertex", HEAD + "mounts:\n- path: /mnt/nfs/a\n  nfs: 10.0.0.2:/a\n", 8),
        ("vertex", HEAD + "mounts:\n- path: /a\n  disk: zones/us-central1-a/disks/d\n", 8),
        ("vertex", HEAD + "vertex:\n  nfs:\n  - {server: 10.0.0.2, path: /a, mount_point: a}\n", 7),
    ],
)
def test_the_line_of_the_spec(tmp_path: Path, target: str, text: str, line: int) -> None:
    assert where(tmp_path, text, target=target) == f"job.yaml:{line}"


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--gpus", "3"), "--gpus"),
        (("--type", "l5"), "--type"),
        (("--region", "us-centrall1"), "--region"),
        (("--zone", "us-centrall1-a"), "--zone"),
        (("--usd", "0.01"), "--usd"),
        (("--output", "/tmp/x"), "--output"),
        (("--set", "machine.gpus=3"), "--set machine.gpus"),
        (("--set", "run={script: none.py}"), "--set run"),
        (("--nodes", "3", "--type", "l5"), "--type"),
    ],
)
def test_the_flag(tmp_path: Path, argv: tuple[str, ...], flag: str) -> None:
    assert where(tmp_path, HEAD, *argv) == flag


def test_a_flag_of_the_spec_leaves_the_lines_of_the_rest(tmp_path: Path) -> None:
    assert where(tmp_path, HEAD.replace("gpus: 1", "gpus: 3"), "--nodes", "2", "--hours", "3") == "job.yaml:4"


def test_build_and_push_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HEAD.replace("gpus: 1", "gpus: 3"))
    for command in ("build", "push"):
        ran = launch(command, "job.yaml", cwd=tmp_path)
        assert (ran.code, ran.err.split(": ")[1]) == (2, "job.yaml:4")


NOT_OF_THE_SPEC = {
    "--run-id": "a flag that is in no spec",
    "no region is set": "nothing set it: the hint lists the regions",
    "map(str, problems)": "a cap: each problem names its line in launch.yaml",
}


def test_each_refusal_of_plan_and_catalog_names_its_field() -> None:
    unnamed = [
        location(ROOT, file, node)
        for file in sources(ROOT / "launcher", "plan", "catalog")
        for node in ast.walk(syntax_tree(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("PlanRefused", "CatalogError")
        and all(keyword.arg != "field" for keyword in node.keywords)
        and not any(words in ast.unparse(node) for words in NOT_OF_THE_SPEC)
    ]
    assert not unnamed
