"""Combinations of fields that can't work."""

from __future__ import annotations

import pytest

from launcher.spec.checks import CHECKS, check
from launcher.spec.models import JobSpec, Machine, Run, Vertex
from tests.spec.helpers import SMALL, lines, problems, spec

DIGEST = "sha256:" + "0" * 64
RESERVED = "reservation:projects/p/zones/us-central1-a/reservations/r"


@pytest.mark.parametrize(
    ("machine", "more", "line"),
    [
        ("{type: []}", "", "machine.type: is an empty list"),
        ("{type: [l4, h100, l4]}", "", "machine.type[2]: 'l4' is listed 2 times"),
        ("{type: [l4, ''], gpus: 1}", "", "machine.type[1]: a name is missing"),
        ("{type: [l4, 4]}", "", "machine.type[1]: 4 is a number, not text"),
        ("{type: {a: b}}", "", "machine.type: is a section, not text"),
        ("{type: [l4, t4], accelerator: t4}", "", "machine.accelerator: cannot be combined with several"),
        (
            "{type: [l4, t4]}",
            "vertex: {persistent_resource: mine}",
            "machine.type: cannot be several types with vertex.pers",
        ),
        (
            "{type: [l4, t4]}",
            "provisioning: reservation:projects/p/zones/us-central1-a/reservations/r",
            "machine.type: cannot be several types with a reservation",
        ),
    ],
)
def test_several_machine_types(machine: str, more: str, line: str) -> None:
    (problem,) = lines(f"name: a\nmachine: {machine}\n{more}\n")
    assert problem.startswith((f"s.yaml:2: {line}", f"s.yaml:3: {line}"))
    assert spec("name: a\nmachine: {type: [l4, h100]}\n").machine.types == ("l4", "h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run: {module: a, command: [b]}",
            "run.command: cannot be combined with run.module",
        ),
        ("run: {command: [a], launcher: python}", "run.launcher: has no effect on run.command, which is started once"),
        (
            "run: {script: a.py, config: {steps: 1}}",
            "run.config: is read only by the built-in trainer (run.module:",
        ),
        ("run: {module: my.train, config: {steps: 1}}", "run.config: is read only by the built-in trainer"),
        ("run: {config: {step: 1}}", "unknown setting run.config.step"),
        ("run: {hang_after: 60}", "run.hang_after: applies only to scripts and commands"),
        ("notify: {webhook: 'http://example.com/x'}", "notify.webhook: http:// would send the run's data"),
        ("notify: {webhook: 'https://a.b/c', on: [failed, failed]}", "notify.on[1]: 'failed' is listed 2 times"),
        ("notify: {webhook: 'https://a.b/c', on: [cost>80%]}", "notify.on[0]: cost>80% needs limits.usd"),
        (
            "notify: {webhook: 'https://a.b/c', on: [cost>80%, cost>90%]}\nlimits: {usd: 9}",
            "notify.on[1]: a second share of the cost",
        ),
        (
            f"notify: {{webhook: 'https://a.b/c'}}\nimage: {{uri: a.b/c@{DIGEST}}}\nrun: {{node: none}}",
            "notify: is sent by launch's node, and run.node is none",
        ),
        ("run: {loggers: [wandb]}", "run.loggers: applies only to scripts and commands"),
        ("run: {script: a.py, loggers: [wandb, mlflow, wandb]}", "run.loggers[2]: 'wandb' is listed 2 times"),
        ("run: {config: {precision: bf-16}}", "run.config.precision: invalid value 'bf-16' | did you mean bf16?"),
        (
            "run: {config: {optimizer: {name: adam}}}",
            "run.config.optimizer.name: invalid value 'adam' | did you mean adamw?",
        ),
        ("run: {config: {checkpoint: of}}", "run.config.checkpoint: invalid value 'of' | did you mean off?"),
        ("run: {config: {compile: yes}}", "run.config.compile: invalid value 'yes' | must be one of auto, true,"),
        ("run: {config: {loggers: [wanb]}}", "run.config.loggers[0]: unknown logger 'wanb' | did you mean wandb?"),
        ("run: {metrics: {tensorboard: tb}}", "run.metrics: applies only to scripts and commands"),
        ("run: {script: a.py, metrics: {}}", "run.metrics: is empty"),
        ("run: {script: a.py, metrics: {regex: 'step ('}}", "run.metrics.regex: step ( is not a regular expression"),
        ("run: {script: a.py, metrics: {regex: '(?P<loss>.)'}}", "run.metrics.regex: (?P<loss>.) has no group"),
        ("run: {script: a.py, metrics: {regex: '(?P<step>.)'}}", "run.metrics.regex: (?P<step>.) has no named group"),
        ("run: {script: a.py, metrics: {regex: '(?P<step>.)(?P<time>.)'}}", "run.metrics.regex: the group name time"),
        ("run: {resume_glob: '*.pt', resume_args: [a]}", "run.resume_args: applies only to scripts and commands"),
        ("run: {script: a.py, resume_args: [a]}", "run.resume_args: needs run.resume_glob"),
        ("run: {script: a.py, resume_glob: '*.pt'}", "run.resume_glob: needs run.resume_args"),
        (
            "run: {script: a.py, resume_glob: '*.pt', resume_args: [--epoch, '{epoch}']}",
            "run.resume_args[1]: unknown placeholder {epoch} | use {step} or {path}",
        ),
        (
            "run: {script: a.py, resume_glob: 'a_{step}_{step}', resume_args: [a]}",
            "run.resume_glob: {step} occurs twice",
        ),
        ("run:\n  module: launch_train\n  config:\n    optimizer: {lr: -1}", "run.config.optimizer.lr: "),
        (f"image: {{uri: a.b/c@{DIGEST}, code: .}}", "image.code: cannot be combined with image.uri"),
        (f"image: {{uri: a.b/c@{DIGEST}, wheel: cu130}}", "image.wheel: cannot be combined with image.uri"),
        (f"image: {{uri: a.b/c@{DIGEST}, setup: ['true']}}", "image.setup: cannot be combined with image.uri |"),
        ("image: {setup: [apt update, ' ']}", "image.setup[1]: ' ' is invalid | use a line for a shell: text without"),
        ("image: {setup: [3]}", "image.setup[0]: 3 is a number, not text | use a line for a shell"),
        ('image: {setup: ["a\\nb"]}', "image.setup[0]: 'a\\nb' contains an invisible character, such as a line break"),
        (f"image: {{setup: [pip install x --token hf_{'a1' * 17}]}}", "image.setup[0]: 'pip …' contains a secret,"),
        (
            "image: {repository: eu.gcr.io/p/x}",
            "image.repository: eu.gcr.io (Container Registry) is read-only since",
        ),
        ("provisioning: []", "provisioning: is an empty list"),
        ("regions: [us-east4, us-east5, us-east4]", "regions[2]: 'us-east4' is listed 2 times"),
        ("zones: [us-east4-a]\nregions: [us-east5]", "zones[0]: us-east4-a is in none of the regions (us-east5) |"),
        (
            f"zones: [us-central1-b]\nprovisioning: ['{RESERVED}']",
            "provisioning[0]: the reservation is in us-central1-a, ",
        ),
        (
            f"regions: [us-east5]\nprovisioning: '{RESERVED}'",
            "provisioning[0]: the reservation is in us-central1-a, whose region is",
        ),
        ("vm: {dense_reservation: true}", "vm.dense_reservation: no reservation is set"),
        (
            "provisioning: 'reservation:projects/p/zones/x/reservations/r'",
            "provisioning[0]: invalid zone 'x'",
        ),
        ("vertex: {reduction_server: {replicas: 1}}", "vertex.reduction_server: needs two or more nodes, and"),
        ("vertex: {experiment_run: a}", "vertex.experiment_run: needs vertex.experiment"),
        (
            "vertex: {persistent_resource: a}\nprovisioning: spot",
            "vertex.persistent_resource: cannot be combined with provisioning spot",
        ),
        (
            "vertex: {nfs: [{server: a, path: /a, mount_point: m}, {server: b, path: /b, mount_point: m}]}",
            "vertex.nfs[1]:",
        ),
        (
            "identity: {network: n, psc: {network_attachment: a}}",
            "identity.psc: cannot be combined with identity.network",
        ),
        (
            "identity: {reserved_ip_ranges: [a]}",
            "identity.reserved_ip_ranges: needs identity.network",
        ),
        ("mounts: [{read_only: true}]", "mounts[0]: names nothing to mount"),
        ("mounts: [{nfs: '10.0.0.2:/a'}]", "mounts[0].path: required, but missing"),
        ("mounts: [{nfs: '10.0.0.2:/a', bucket: b-1}]", "mounts[0].nfs: cannot be combined with bucket"),
        ("mounts: [{disk: zones/us-east4-a/disks/d}]", "mounts[0].path: required, but missing"),
        ("mounts: [{bucket: b-1, new_disk_type: pd-ssd}]", "mounts[0].new_disk_type: needs new_disk_gb"),
        ("mounts: [{bucket: b-1, volume_handle: v}]", "mounts[0].volume_handle: needs lustre"),
        ("mounts: [{new_disk_gb: 10, path: /a, read_only: true}]", "mounts[0].read_only: a new disk is empty"),
        ("mounts: [{bucket: b-1, path: /usr/lib}]", "mounts[0].path: /usr/lib is a folder of the image"),
        ("mounts: [{bucket: b-1, path: /workspace}]", "mounts[0].path: /workspace is a folder of the image"),
        ("mounts: [{bucket: b-1}, {bucket: b-2, path: /gcs/b-1}]", "mounts[1]: '/gcs/b-1' is listed 2 times"),
        (
            "vm: {image: projects/p/global/images/i, image_family: f}",
            "vm.image: cannot be combined with vm.image_family",
        ),
        (
            "labels: {launch-run: x}",
            "labels.launch-run: the prefix launch- is reserved for launch's own",
        ),
        ("output: s3://b/x", "output: unsupported location 's3://b/x'"),
        ("output: file:/a", "output: unsupported location 'file:/a'"),
        ("output: ''", "output: unsupported location ''"),
        ("output: gs://B", "output: invalid bucket name in 'gs://B'"),
        ("env: {RANK: 1}", "env.RANK: is set by launch, torchrun or the platform"),
        ("env: {LAUNCH_X: 1}", "env.LAUNCH_X: is set by launch, torchrun or the platform"),
        (
            "secrets: {AIP_X: projects/p/secrets/s/versions/1}",
            "secrets.AIP_X: is set by launch, torchrun or the platform",
        ),
        (
            "env: {A: b}\nsecrets: {A: projects/p/secrets/s/versions/1}",
            "env.A: is set in both env and secrets",
        ),
        ("env: {HF_TOKEN: hf_abcdefghijklmnopqrst}", "env.HF_TOKEN: 'hf_a…' looks like a secret, and others can read"),
    ],
)
def test_a_combination_that_is_refused(text: str, message: str) -> None:
    found = [line.partition(": ")[2] for line in lines(SMALL + text)]
    assert [line[: len(message)] for line in found] == [message]
    assert all(problem.fix for problem in problems(SMALL + text))


@pytest.mark.parametrize(
    "text",
    [
        "run: {script: a.py, args: [x], launcher: python}",
        "run: {module: launch_train, config: {steps: 1}}",
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
        "mounts: [{bucket: b-1}, {bucket: b-2}, {bucket: b-1, path: /workspace/data, read_only: true}]",
        "env: {RANKS: 1, TOKENIZERS_PARALLELISM: false, MAX_TOKENS: 4096, KEY_DIM: 64}",
        "labels: {launcher: a}",
    ],
)
def test_a_combination_that_is_taken(text: str) -> None:
    spec(SMALL + text)


def test_the_reduction_server_wants_several_nodes_and_no_flex_start() -> None:
    text = "name: a\nmachine: {type: t4, nodes: 2}\nvertex: {reduction_server: {replicas: 2}}\n"
    assert spec(text + "provisioning: spot\n").vertex.reduction_server is not None
    (line,) = lines(text + "provisioning: [spot, flex-start]\n")
    assert line.startswith("s.yaml:3: vertex.reduction_server: cannot be combined with provisioning flex-start | ")


def test_the_trainers_own_findings_stand_at_their_lines() -> None:
    found = lines(SMALL + "run:\n  config:\n    steps: 10\n    optimizer:\n      lr: -1\n      nmae: sgd\n")
    assert [line.split(" ")[:2] for line in found[:1]] == [["s.yaml:7:", "run.config.optimizer.lr:"]]
    assert [line.split(" ")[:4] for line in found[1:]] == [
        ["s.yaml:8:", "unknown", "setting", "run.config.optimizer.nmae"]
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
