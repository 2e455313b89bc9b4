"""Combinations of fields that can't work."""

from __future__ import annotations

import pytest

from launcher.spec.checks import CHECKS, check
from launcher.spec.models import JobSpec, Machine, Run
from launcher.spec.services import Vertex
from tests.spec.helpers import SMALL, lines, spec

DIGEST = "sha256:" + "0" * 64
RESERVED = "reservation:projects/p/zones/us-central1-a/reservations/r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run: {module: a, command: [b]}",
            "run.command: can't go with run.module | keep one of run.module, run.script",
        ),
        ("run: {command: [a], launcher: python}", "run.launcher: a command is always started once a node, as it is | "),
        (
            "run: {script: a.py, config: {steps: 1}}",
            "run.config: only the built-in trainer (run.module: launch_train) reads it",
        ),
        (
            "run: {module: my.train, config: {steps: 1}}",
            "run.config: only the built-in trainer (run.module: launch_train) re",
        ),
        ("run: {config: {step: 1}}", "run.config.step: "),
        ("run: {hang_after: 60}", "run.hang_after: is for scripts and commands | use run.config.hang_after"),
        ("run:\n  module: train\n  config:\n    optimizer: {lr: -1}", "run.config.optimizer.lr: "),
        (f"image: {{uri: a.b/c@{DIGEST}, code: .}}", "image.code: can't go with image.uri | remove it: an image of yo"),
        (f"image: {{uri: a.b/c@{DIGEST}, wheel: cu130}}", "image.wheel: can't go with image.uri | remove it: an imag"),
        (
            "image: {repository: eu.gcr.io/p/x}",
            "image.repository: eu.gcr.io: Container Registry takes no writes since 2025-03-18 | Artifact Registry: "
            "europe-docker.pkg.dev/p/launch",
        ),
        ("provisioning: []", "provisioning: is an empty list | name at least one, or remove the line"),
        ("regions: [us-east4, us-east5, us-east4]", "regions[2]: 'us-east4' is given 2 times | name each once"),
        (
            "zones: [us-east4-a]\nregions: [us-east5]",
            "zones[0]: us-east4-a is in none of the regions (us-east5) | add us",
        ),
        (
            f"zones: [us-central1-b]\nprovisioning: ['{RESERVED}']",
            "provisioning[0]: the reservation is in us-central1-a, ",
        ),
        (
            f"regions: [us-east5]\nprovisioning: '{RESERVED}'",
            "provisioning[0]: the reservation is in us-central1-a, which r",
        ),
        (
            "provisioning: 'reservation:projects/p/zones/x/reservations/r'",
            "provisioning[0]: 'x' is no zone | reservation:pr",
        ),
        (
            "vertex: {reduction_server: {replicas: 1}}",
            "vertex.reduction_server: has nothing to do with machine.nodes: 1",
        ),
        ("vertex: {experiment_run: a}", "vertex.experiment_run: is a run of no experiment | name the experiment in"),
        (
            "vertex: {persistent_resource: a}\nprovisioning: spot",
            "vertex.persistent_resource: can't go with provisionin",
        ),
        (
            "vertex: {nfs: [{server: a, path: /a, mount_point: m}, {server: b, path: /b, mount_point: m}]}",
            "vertex.nfs[1]:",
        ),
        (
            "identity: {network: n, psc: {network_attachment: a}}",
            "identity.psc: can't go with identity.network | keep on",
        ),
        (
            "identity: {reserved_ip_ranges: [a]}",
            "identity.reserved_ip_ranges: goes with identity.network alone | name th",
        ),
        (
            "vm: {image: projects/p/global/images/i, image_family: f}",
            "vm.image: can't go with vm.image_family | keep one of the two",
        ),
        (
            "labels: {launch-run: x}",
            "labels.launch-run: launch itself sets the labels that start with launch- | name it",
        ),
        ("output: s3://b/x", "output: 's3://b/x' can't be written to | gs://BUCKET/PATH, or a local folder"),
        ("output: file:/a", "output: 'file:/a' can't be written to | gs://BUCKET/PATH, or a local folder"),
        ("output: ''", "output: '' can't be written to | gs://BUCKET/PATH, or a local folder"),
        ("output: gs://B", "output: 'gs://B' names no bucket | gs://BUCKET/PATH"),
        ("env: {RANK: 1}", "env.RANK: is set by launch, torchrun or the platform | name it otherwise"),
        ("env: {LAUNCH_X: 1}", "env.LAUNCH_X: is set by launch, torchrun or the platform | name it otherwise"),
        (
            "secrets: {AIP_X: projects/p/secrets/s/versions/1}",
            "secrets.AIP_X: is set by launch, torchrun or the platform",
        ),
        (
            "env: {A: b}\nsecrets: {A: projects/p/secrets/s/versions/1}",
            "env.A: stands in env and in secrets | keep one",
        ),
        (
            "env: {HF_TOKEN: hf_abcdefghijklmnopqrst}",
            "env.HF_TOKEN: 'hf_a…' looks like a secret, and env can be read by",
        ),
    ],
)
def test_a_combination_that_is_refused(text: str, message: str) -> None:
    found = [line.partition(": ")[2] for line in lines(SMALL + text)]
    assert [line[: len(message)] for line in found] == [message]


@pytest.mark.parametrize(
    "text",
    [
        "run: {script: a.py, args: [x], launcher: python}",
        "run: {module: train, config: {steps: 1}}",
        "run: {module: my.train}",
        f"image: {{uri: a.b/c@{DIGEST}}}",
        "regions: any\nzones: [us-east4-a]",
        f"regions: [us-central1]\nzones: [us-central1-a]\nprovisioning: ['{RESERVED}', standard]",
        "regions: [us-central1]\nzones: [us-central1-ai1a]",
        f"regions: [us-central1]\nprovisioning: ['{RESERVED.replace('central1-a', 'central1-ai1a')}']",
        "vertex: {persistent_resource: a}\nprovisioning: standard",
        "vertex: {experiment: e, experiment_run: r}",
        "vertex: {nfs: [{server: a, path: /a, mount_point: m}], lustre: [{instance_ip: 10.0.0.1, volume_handle: v, "
        "filesystem: f, mount_point: m}]}",
        "identity: {network: n, reserved_ip_ranges: [a]}",
        "output: runs/a",
        "output: /data/runs",
        "output: gs://my-bucket",
        "env: {RANKS: 1, TOKENIZERS_PARALLELISM: false, MAX_TOKENS: 4096, KEY_DIM: 64}",
        "labels: {launcher: a}",
    ],
)
def test_a_combination_that_is_taken(text: str) -> None:
    spec(SMALL + text)


def test_the_reduction_server_wants_several_nodes_and_no_flex_start() -> None:
    text = "name: a\nmachine: {type: t4, nodes: 2}\nvertex: {reduction_server: {replicas: 2}}\n"
    assert spec(text + "provisioning: spot\n").vertex.reduction_server is not None
    assert lines(text + "provisioning: [spot, flex-start]\n") == [
        "s.yaml:3: vertex.reduction_server: can't go with provisioning flex-start | remove it, or flex-start: "
        "Flex-start wants the same machine in all pools"
    ]


def test_the_trainers_own_findings_stand_at_their_lines() -> None:
    found = lines(SMALL + "run:\n  config:\n    steps: 10\n    optimizer:\n      lr: -1\n      nmae: sgd\n")
    assert [line.split(" ")[0] + line.split(" ")[1] for line in found] == [
        "s.yaml:7:run.config.optimizer.lr:",
        "s.yaml:8:run.config.optimizer.nmae:",
    ]


def test_a_check_passes_over_fields_that_are_wrong_by_themselves() -> None:
    bad = JobSpec(
        name="a", machine=Machine(type="t4"), vertex=Vertex(experiment_run="r"), run=Run(module="a", script="b")
    )
    assert [finding.at for finding in check(bad)] == [("run", "script"), ("vertex", "experiment_run")]
    assert [finding.at for finding in check(bad, [("vertex",)])] == [("run", "script")]
    assert [finding.at for finding in check(bad, [("run", "script")])] == [("vertex", "experiment_run")]


def test_a_check_reads_fields_that_there_are() -> None:
    job = JobSpec(name="a", machine=Machine(type="t4"))
    for rule in CHECKS:
        for path in rule.reads:
            value: object = job
            for step in path:
                value = getattr(value, str(step))
