"""Files -> JobSpec: the fields one by one, all problems at once, overrides, and the file itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.errors import SpecError
from launcher.spec.models import JobSpec
from launcher.spec.reader import Override, parse_set, read, read_text
from tests.spec.helpers import SMALL, lines, problems, spec, whats

FULL = """\
name: gpt2-124m
machine: {type: h100, gpus: 2, nodes: 2, boot_disk_gb: 200, boot_disk_type: pd-ssd}
provisioning: [flex-start, spot]
regions: [us-central1, us-east5]
zones: [us-central1-a]
image: {repository: us-docker.pkg.dev/my-project/launch, code: ., requirements: requirements.txt}
run:
  module: launch_train
  args: [--lr, 1e-4, 017, true, 1:30, "x y"]
  config: {steps: 20, optimizer: {lr: 1e-4}}
  launcher: torchrun
env: {LR: 1e-4, PORT: 8080, FLAG: True, TEXT: no, EMPTY: ""}
secrets: {HF_TOKEN: projects/p/secrets/hf/versions/latest}
output: gs://my-bucket/runs
limits: {hours: 12, usd: 250.5, restarts: 3, wait: 6h}
identity:
  service_account: trainer@my-project.iam.gserviceaccount.com
  psc: {network_attachment: att, dns_peering: [{domain: a.b., target_project: p, target_network: n}]}
labels: {team: vision}
vertex: {web_access: true, nfs: [{server: 10.0.0.2, path: /a, mount_point: a}]}
vm: {external_ip: false, on_stop: delete}
"""


def test_a_full_spec() -> None:
    job = spec(FULL)
    assert (job.machine.gpus, job.machine.nodes, job.provisioning) == (2, 2, ("flex-start", "spot"))
    assert job.run.config == {"steps": 20, "optimizer": {"lr": 0.0001}}
    assert type(job.limits.hours) is float
    assert job.identity.psc is not None
    assert job.identity.psc.dns_peering[0].domain == "a.b."
    assert job.vertex.nfs[0].mount_point == "a"


def test_text_for_programs_is_taken_as_written() -> None:
    job = spec(FULL)
    assert job.run.args == ("--lr", "1e-4", "017", "true", "1:30", "x y")
    assert job.env == {"LR": "1e-4", "PORT": "8080", "FLAG": "True", "TEXT": "no", "EMPTY": ""}
    assert spec(SMALL + "run: {command: [sleep, 010]}").run.command == ("sleep", "010")


def test_one_value_stands_for_a_list_of_it_where_the_order_is_tried() -> None:
    job = spec(SMALL + "provisioning: spot\nregions: us-central1\nzones: us-central1-a\n")
    assert (job.provisioning, job.regions, job.zones) == (("spot",), ("us-central1",), ("us-central1-a",))
    assert spec(SMALL + "regions: any\n").regions == "any"
    assert lines("name: a\nmachine: l4\nrun: t.py\n") == [
        "s.yaml:2: machine: 'l4' is text, not a section | use machine: {type: l4}",
        "s.yaml:3: run: 't.py' is text, not a section | use run: {script: t.py}",
    ]
    assert lines(SMALL + "run: {args: --x}\n") == [
        "s.yaml:3: run.args: '--x' is text, not a list | use a list: command-line arguments of the program"
    ]


def test_no_value_is_a_value_left_out_only_where_the_default_is_none() -> None:
    assert spec(SMALL + "provisioning: ~\noutput:\n").output is None
    assert lines(SMALL + "limits:\n") == ["s.yaml:3: limits: has no value | use a section; or remove the line"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: GPT2", "s.yaml:3: name: 'GPT2' is invalid"),
        ("name: |\n  a\n", "s.yaml:3: name: 'a\\n' contains an invisible character, such as a line"),
        ("name: 3", "s.yaml:3: name: 3 is a number, not text"),
        ("output: 3", 's.yaml:3: output: 3 is a number, not text | to make it text, put it in quotes: "3"'),
        ("output: [a]", "s.yaml:3: output: is a list, not text"),
        ("gpus: 2", "s.yaml:3: unknown setting gpus | `gpus` belongs under `machine`"),
        ("gpu: 2", "s.yaml:3: unknown setting gpu | `gpus` belongs under `machine`"),
        ("regoins: [a]", "s.yaml:3: unknown setting regoins | did you mean regions?"),
        ("mount_point: a", "s.yaml:3: unknown setting mount_point | `mount_point` belongs under `vertex.nfs` or under"),
        ("run: {name: a}", "s.yaml:3: unknown setting run.name | `name` belongs at the top level"),
        ("limits: {zzz: 1}", "s.yaml:3: unknown setting limits.zzz | `limits` has: hours, usd, price, restarts, wait"),
        ("limits: {usd: .nan}", "s.yaml:3: limits.usd: .nan is out of range"),
        ("limits: {hours: .inf}", "s.yaml:3: limits.hours: .inf is out of range"),
        ("limits: {hours: -1}", "s.yaml:3: limits.hours: -1 is out of range | use a number from 0.05 to 168"),
        ("limits: {restarts: 1.0}", "s.yaml:3: limits.restarts: 1.0 is a number, not a whole number"),
        ("limits: {restarts: true}", "s.yaml:3: limits.restarts: true is a boolean, not a whole number"),
        ("limits: {wait: 6}", "s.yaml:3: limits.wait: 6 is a number, not text"),
        ("limits: {wait: soon}", "s.yaml:3: limits.wait: 'soon' is invalid | use a duration: 90s, 30m"),
        ("limits: [1]", "s.yaml:3: limits: is a list, not a section"),
        ("vertex: {web_access: yes}", "s.yaml:3: vertex.web_access: 'yes' is text, not true or false"),
        ("vm: {on_stop: delet}", "s.yaml:3: vm.on_stop: 'delet' is invalid | did you mean delete?"),
        ("run: {preflight: bnech}", "s.yaml:3: run.preflight: 'bnech' is invalid | did you mean bench?"),
        ("notify: {webhook: 'https://a.b/c', on: [prempted]}", "s.yaml:3: notify.on[0]: 'prempted' is invalid | did"),
        ("notify: {webhook: 'https://a.b/c', on: [cost]}", "s.yaml:3: notify.on[0]: 'cost' is invalid | use"),
        ("provisioning: flexstart", "s.yaml:3: provisioning: 'flexstart' is invalid | did you mean flex-start?"),
        ("regions: anny", "s.yaml:3: regions: 'anny' is invalid | did you mean any?"),
        ("vm: {on_stop: halt}", "s.yaml:3: vm.on_stop: 'halt' is invalid | use one of stop, delete"),
        ("run: {command: []}", "s.yaml:3: run.command: is an empty list"),
        ("run: {args: [~]}", "s.yaml:3: run.args[0]: has no value"),
        ("env: {A: [1]}", "s.yaml:3: env.A: is a list, not text"),
        ("env: {A B: 1}", "s.yaml:3: env.A B: '…' is invalid"),
        ("labels: {v: 1}", "s.yaml:3: labels.v: 1 is a number, not text"),
        ("provisioning: [spot, cheap]", "s.yaml:3: provisioning[1]: 'cheap' is invalid"),
        ("vertex:\n  nfs:\n  - {server: a, mount_point: a}\n", "s.yaml:5: vertex.nfs[0].path: required, but missing"),
        ("run: {config: {a: [.nan]}}", "s.yaml:3: run.config.a[0]: invalid number .nan"),
        (
            "run: {config: {a: -9223372036854775809}}",
            "s.yaml:3: run.config.a: -9223372036854775809 is out of range",
        ),
        ("run: {config: {a: 99999999999999999999}}", "s.yaml:3: run.config.a: 99999999999999999999 is out of range"),
        ("secrets: {A: hf_abcdefghijklmnop}", "s.yaml:3: secrets.A: '…' is invalid"),
    ],
)
def test_invalid_settings_are_reported(text: str, message: str) -> None:
    start = "machine: {type: h100}\n\n" if text.startswith("name") else SMALL
    assert [line[: len(message)] for line in lines(start + text)] == [message]
    assert all(problem.fix for problem in problems(start + text))


def test_required_settings() -> None:
    assert lines("name: a\n") == ["s.yaml:1: machine: required, but missing | add a section with type"]
    assert lines("name: a\nmachine: {gpus: 2}\n")[0].startswith(
        "s.yaml:2: machine.type: required, but missing | add text: a GPU (h100"
    )
    assert whats(problems("name: a\nmachin: {type: h100}\n")) == ["unknown setting machin"]


def test_the_default_name_is_that_of_the_file(tmp_path: Path) -> None:
    for file, name in (("Own_job.v2.yaml", "own-job-v2"), ("train.yml", "train")):
        (tmp_path / file).write_text("machine: {type: h100}\n")
        assert read(tmp_path / file).name == name
    assert read(tmp_path / "train.yml", [Override("name", "other", "--name")]).name == "other"
    (tmp_path / "1.yaml").write_text("machine: {type: h100}\n")
    with pytest.raises(SpecError, match=r"1.yaml: name: '1' is invalid\n.*starting with a letter"):
        read(tmp_path / "1.yaml")
    assert lines("machine: {type: h100}\n")[0].startswith("s.yaml:1: name: required, but missing"), "there is no file"


def test_a_file_that_holds_no_section() -> None:
    assert lines("- a\n") == ["s.yaml:1: the spec: is a list, not a section | use a section with name and machine"]
    assert lines("just text\n") == [
        "s.yaml:1: the spec: 'just text' is text, not a section | use a section with name and machine"
    ]


def test_a_long_value_is_shown_shortened_and_never_matched() -> None:
    (line,) = lines("machine: {type: l4}\nname: " + "a" * 65_536)
    assert line.startswith("s.yaml:2: name: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…' is too long (65,536 characters")
    (line,) = lines(SMALL + "x" * 65_536 + ": 1")
    assert len(line) < 300


def test_fields_and_combinations_are_complained_about_together_in_the_order_of_lines() -> None:
    found = problems(
        "name: A\nmachine: {type: h100, nodes: two}\nzones: [us-east5-a]\nregions: [us-central1]\n"
        "run: {module: a, script: b}\noutput: s3://x\nvertex: {reduction_server: {replicas: 1}}\n"
    )
    assert [f"{one.where}: {one.what}" for one in found] == [
        "s.yaml:1: name: 'A' is invalid",
        "s.yaml:2: machine.nodes: 'two' is text, not a whole number",
        "s.yaml:3: zones[0]: us-east5-a is in none of the regions (us-central1)",
        "s.yaml:5: run.script: cannot be combined with run.module",
        "s.yaml:6: output: unsupported location 's3://x'",
    ]


def test_too_many_variables() -> None:
    text = "env: {" + ", ".join(f"V{number}: x" for number in range(81)) + "}"
    assert lines(SMALL + text) == ["s.yaml:3: env: has 81 entries | use 80 or fewer"]


def test_many_problems_are_counted() -> None:
    text = SMALL + "".join(f"k{i}: 1\n" for i in range(80))
    assert len(problems(text)) == 80
    with pytest.raises(SpecError) as raised:
        read_text(text.encode(), "s.yaml")
    message = raised.value.problem.splitlines()
    assert len(message) <= 40
    assert message[-1] == f"… and {80 - sum('s.yaml:' in line for line in message)} more problems"


# --- Overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("limits.usd=5", "limits.usd", 5),
        ("run.config.optimizer.lr=1e-4", "run.config.optimizer.lr", 1e-4),
        ("regions=[us-central1, us-east4]", "regions", ["us-central1", "us-east4"]),
        ("env={A: b}", "env", {"A": "b"}),
        ("env.A=b=c", "env.A", "b=c"),
        ("output=~", "output", None),
    ],
)
def test_set_is_yaml(text: str, path: str, value: Any) -> None:
    override = parse_set(text)
    assert (override.path, override.value, override.where) == (path, value, f"--set {path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits.usd", "--set limits.usd: expected SETTING=VALUE"),
        ("=5", "--set …: expected SETTING=VALUE"),
        ("a..b=5", "--set a..b…: expected SETTING=VALUE"),
        ("env.HF_TOKEN hf_abcdefghijklmnopqrst", "--set env.HF_TOKEN…: expected SETTING=VALUE"),
        ("env.DB_PASSWORD:hunter2", "--set env.DB_PASSWORD…: expected SETTING=VALUE"),
        ("=hunter2", "--set …: expected SETTING=VALUE"),
        ("hf_abcdefghijklmnopqrst", "--set 'hf_a…': expected SETTING=VALUE"),
        ("a=", "--set a: the value is missing"),
        ("a=[1", "--set a: the list opened with '['"),
        ("a=*b", "--set a: unsupported alias *b"),
        ("a={b: 1, b: 2}", "--set a: duplicate setting b"),
        ("a=\udcff", "--set a: invalid UTF-8"),
    ],
)
def test_a_bad_set(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_set(text)
    assert str(caught.value).startswith(message)


def test_overrides_replace_and_create() -> None:
    job = spec(
        FULL,
        Override("machine.gpus", 8, "--gpus"),
        "limits.usd=5",
        "regions=[us-central1]",
        "run.config.model.n_layer=2",
        "env.LR=3e-4",
        "vertex.experiment=e",
        "vm={image: projects/p/global/images/i}",
    )
    assert (job.machine.gpus, job.limits.usd, job.limits.hours, job.regions) == (8, 5.0, 12.0, ("us-central1",))
    assert job.run.config["model"] == {"n_layer": 2}
    assert job.env["LR"] == "3e-4"
    assert (job.vm.image, job.vm.on_stop, job.vertex.experiment) == ("projects/p/global/images/i", None, "e")


def test_a_section_without_a_value_is_filled() -> None:
    assert spec(SMALL + "limits:\n", "limits.usd=5").limits.usd == 5


def test_the_later_override_is_on_top_and_mends_what_the_file_has_wrong() -> None:
    job = spec("name: A\n", "name=b", Override("machine.type", "l4", "--type"), Override("name", "c", "--name"))
    assert (job.name, job.machine.type) == ("c", "l4")


def test_an_override_with_another_value_than_it_was_written_with() -> None:
    assert spec(SMALL, replace(parse_set("env.A=1e-4"), value=2)).env == {"A": "2"}


def test_a_bad_override_names_its_flag() -> None:
    assert lines(FULL, Override("machine.gpus", 0, "--gpus"), "limits.usd=free", "machine.gpu=1", "name.x=1") == [
        "--set name.x: cannot set x: name is text (s.yaml:1), not a section | set name as a whole",
        "--gpus: machine.gpus: 0 is out of range | use a whole number from 1 to 16: GPUs per node; default: all of the "
        "machine type's",
        "--set machine.gpu: unknown setting machine.gpu | did you mean gpus?",
        "--set limits.usd: limits.usd: 'free' is text, not a number | use a number above 0: maximum cost in USD: a run "
        "that could cost more is not started",
    ]
    assert lines(SMALL + "zones: [us-east5-a]\n", Override("regions", ["us-central1"], "--region"))[0].startswith(
        "s.yaml:3: zones[0]: us-east5-a is in none of the regions"
    )


# --- The file -------------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read(path)
    return str(caught.value)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    assert read(tmp_path / "a.yaml") == spec(SMALL)
    (tmp_path / "a.yaml").write_text("name: A\n")
    assert refusal(tmp_path / "a.yaml").startswith(f"{tmp_path}/a.yaml:1: name: 'A' is invalid\n    use a-z, 0-9")


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    (tmp_path / "dir.yaml").mkdir()
    assert refusal(tmp_path / "quikstart") == f"{tmp_path}/quikstart: no such file\n    did you mean quickstart.yaml?"
    assert "`launch init`" in refusal(tmp_path / "zzz.yaml")
    assert f"the folder {str(tmp_path / 'no')[:39]}" in refusal(tmp_path / "no" / "a.yaml")
    assert (
        refusal(tmp_path)
        == f"{tmp_path}: is a folder, not a spec file\n    name one of its files: dir.yaml, quickstart.yaml"
    )
    assert "cannot be read: " in refusal(tmp_path / "quickstart.yaml" / "x")
    assert "cannot be read: " in refusal(Path("a\0b"))
    assert "cannot be read: " in refusal(Path("a" * 5000))


def test_a_file_name_that_is_not_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.yaml"))
    assert "\N{REPLACEMENT CHARACTER}.yaml: no such file" in refusal(path)


def test_a_file_of_another_kind_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(10**12)
    assert "larger than 256 KiB" in refusal(path)


def test_the_ready_specs_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "job_specs"
    found = [read(path) for path in sorted(folder.glob("*.yaml"))]
    assert found
    assert all(isinstance(one, JobSpec) for one in found)


def test_a_spec_in_a_newer_format_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"version: 2\n{SMALL}\nnew_setting: 1\n")
    assert refusal(path).startswith(f"{path}:1: version 2 is not supported; this launch reads up to 1\n")
    path.write_text(f"version: 1\n{SMALL}")
    assert read(path) == read_text(SMALL.encode(), "a.yaml")
