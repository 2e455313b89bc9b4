"""From source to a pushed image and a run in it, for real: an engine, a registry, and PyTorch inside.

One dependency image serves all tests here: making it is what takes the time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import docker
import pytest

from launcher.images.docker_engine import Engine
from launcher.images.registry import Manifest, Registry, parse
from launcher.testing.googlecloud import GoogleCloud, Pace, Runner
from tests.e2e import shapes
from tests.e2e.engine import Running
from tests.e2e.running import losses, only_run, run, started
from tests.startup.park import Park
from tests.train.script_api.test_epochs import SLOW, ranks_with_workers

pytestmark = [pytest.mark.e2e, pytest.mark.slow(turn=1)]

CANARY = "canary-58c1d09e"
SPEC = """\
name: tiny
machine: {{type: l4, gpus: 1, nodes: 2}}
env: {{OMP_NUM_THREADS: "1"}}
image: {{repository: "{repository}", base: "{base}", torch: "{torch}", wheel: cpu, code: .}}
run:
  config:
    model: {{name: gpt, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}}
    data: python-stdlib
    steps: 12
    batch_size: 8
    optimizer: {{lr: 1e-2, warmup_steps: 2}}
    eval: {{every: 6, batches: 2}}
    log_every: 4
"""


class Job(NamedTuple):
    """A folder with a spec and code, and the engine and registry that it uses."""

    spec: Path
    running: Running

    @property
    def environ(self) -> dict[str, str]:
        return {**self.running.environ, "HF_TOKEN": CANARY, "LAUNCH_CANARY": CANARY}

    def launch(self, *words: str | Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """`launch WORDS -o json`, which must end well."""
        ran = run(*words, "-o", "json", cwd=self.spec.parent, env={**self.environ, **(env or {})})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    def other(self, folder: Path, repository: str) -> Job:
        """The same content as a job of another repository."""
        shutil.copytree(self.spec.parent, folder, symlinks=True, ignore=shutil.ignore_patterns("runs*"))
        spec = folder / self.spec.name
        spec.write_text(spec.read_text().replace("/appended", f"/{repository}"))
        return Job(spec, self.running)


@pytest.fixture(scope="module")
def job(containers: Running, torch_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Code with all that a folder can hold, secrets among it."""
    folder = tmp_path_factory.mktemp("job")
    engine = Engine.connect(containers.environ)
    base = f"{parse(containers.base).name}@{engine.push(containers.base)}"
    engine.api.close()
    spec = folder / "job.yaml"
    spec.write_text(SPEC.format(repository=f"{containers.registry}/appended", base=base, torch=torch_wheel))
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "pkg" / "deep" / "m.py").write_text("x = 1\n")
    (folder / "mine.py").write_text("number = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("pkg/deep")
    (folder / "é.txt").write_text("ü")
    (folder / ".env").write_text(f"KEY={CANARY}\n")
    (folder / "key.json").write_text(json.dumps({"type": "service_account", "private_key": CANARY}))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text(CANARY)
    return Job(spec, containers)


@pytest.fixture(scope="module")
def pushed(job: Job) -> dict[str, Any]:
    """The image: its dependencies by the engine, its code appended."""
    found = job.launch("push", job.spec)
    assert found["how"] == "appended"
    return found


@pytest.fixture(scope="module")
def api(containers: Running) -> Iterator[Any]:
    client = docker.APIClient(containers.engine, version="auto", timeout=300)
    yield client
    client.close()


def manifest_of(reference: str) -> Manifest:
    where = parse(reference)
    with Registry(where.host, {}) as registry:
        found = registry.manifest(where.repository, where.digest or where.tag or "")
    assert found
    return found


def tree(api: Any, reference: str) -> dict[str, tuple[Any, ...]]:
    """All files of an image as a container has them, but for the few that the engine makes: kind, mode, owner, link,
    content."""
    name, _, digest = reference.partition("@")
    api.pull(f"{name}@{digest}" if digest else name)
    made = api.create_container(reference, ["true"])["Id"]
    try:
        archive = io.BytesIO(b"".join(api.export(made)))
    finally:
        api.remove_container(made)
    found: dict[str, tuple[Any, ...]] = {}
    with tarfile.open(fileobj=archive) as tar:
        for one in tar:
            content = tar.extractfile(one) if one.isreg() else None
            digest = hashlib.sha256(content.read()).hexdigest() if content else ""
            found[one.name] = (one.type, one.mode, one.uid, one.gid, one.linkname, digest)
    for name in (".dockerenv", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab"):
        found.pop(name, None)
    return found


def test_an_edit_is_appended_and_nothing_more(job: Job, pushed: dict[str, Any], tmp_path: Path) -> None:
    again = job.launch("push", job.spec)
    assert (again["how"], again["sent"], again["reference"]) == ("there", 0, pushed["reference"])
    edited = job.other(tmp_path / "edited", "appended")
    (edited.spec.parent / "mine.py").write_text("number = 2\n")
    after = edited.launch("push", edited.spec)
    assert (after["how"], after["dependencies"]) == ("appended", pushed["dependencies"])
    assert after["sent"] < 10_000
    old, new = manifest_of(pushed["reference"]), manifest_of(after["reference"])
    assert new.body["layers"][:-1] == old.body["layers"][:-1]
    assert new.body["layers"][-1]["digest"] != old.body["layers"][-1]["digest"]


def test_no_layer_holds_a_canary(pushed: dict[str, Any]) -> None:
    """Every byte that was pushed, layers unpacked: neither files with secrets nor this process's environment."""
    where, manifest, needle = parse(pushed["reference"]), manifest_of(pushed["reference"]), CANARY.encode()
    blobs = f"http://{where.host}/v2/{where.repository}/blobs"
    assert needle not in manifest.raw
    names: set[str] = set()
    for blob in [manifest.body["config"], *manifest.body["layers"]]:
        with urlopen(f"{blobs}/{blob['digest']}") as answer:
            if "gzip" not in blob["mediaType"]:
                assert needle not in answer.read()
                continue
            with tarfile.open(fileobj=answer, mode="r|gz") as layer:
                for one in layer:
                    names.add(one.name)
                    content = layer.extractfile(one) if one.isreg() else None
                    assert content is None or needle not in content.read(), one.name
    assert "workspace/mine.py" in names
    assert not {"workspace/.env", "workspace/key.json", "workspace/.git/config"} & names


def test_the_engines_image_holds_the_same_files(job: Job, pushed: dict[str, Any], api: Any, tmp_path: Path) -> None:
    """And both train: the same losses, to the last bit, as the same program on the same files must have."""
    whole = job.other(tmp_path / "whole", "whole")
    built = whole.launch("push", whole.spec, "--builder", "docker")
    assert (built["how"], built["pushed"]) == ("docker", True)
    assert built["image"].rpartition(":")[2] == pushed["image"].rpartition(":")[2]
    one, other = tree(api, pushed["reference"]), tree(api, built["reference"])
    assert one == other
    _, mode, *owner = one["workspace/run.sh"][:4]
    assert (mode & 0o7777, owner) == (0o775, [1000, 1000])
    assert one["workspace/link"][4] == "pkg/deep"
    assert "workspace/.env" not in one
    for number, image in enumerate((pushed["reference"], built["reference"])):
        output = tmp_path / f"runs-{number}"
        config = api.inspect_image(image)["Config"]
        assert config["Entrypoint"] == ["python", "-m", "launch_train.node"]
        assert config["User"] == "1000:1000"
        job.launch("local", job.spec, "--docker", "--output", str(output), "--image", image)
        assert len(losses(only_run(output))) == 12
    assert losses(only_run(tmp_path / "runs-0")) == losses(only_run(tmp_path / "runs-1"))


def test_a_spec_trains_in_its_own_image(job: Job, pushed: dict[str, Any], tmp_path: Path) -> None:
    """Two nodes of one process, from the spec alone; what they write belongs to whoever ran it."""
    found = job.launch("local", job.spec, "--docker", "--output", str(tmp_path))
    assert set(found["exit_codes"]) == {"workerpool0-0", "workerpool1-0"}
    assert not any(found["exit_codes"].values())
    folder = only_run(tmp_path)
    found_losses = losses(folder)
    assert len(found_losses) == 12
    assert found_losses[-1] < found_losses[0]
    assert {path.stat().st_uid for path in folder.rglob("*")} == {os.getuid()}
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["image"]["uri"] == pushed["reference"]


@pytest.mark.slow(turn=4)
@pytest.mark.parametrize("name", shapes.RUNS)
def test_a_script_gives_the_same_result_in_processes_and_in_containers(
    job: Job, pushed: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Only the code differs from the image that was pushed: no engine has to build anything."""
    (image,) = [line for line in job.spec.read_text().splitlines() if line.startswith("image:")]
    shapes.write(tmp_path / "code")
    spec = tmp_path / "code" / "job.yaml"
    spec.write_text(f"name: {name}\nmachine: {{type: l4, gpus: 2}}\n{image}\nrun: {shapes.RUNS[name]}\n")
    results: list[list[str]] = []
    for flags in ((), ("--docker",)):
        ran = run("local", spec, *flags, "--output", tmp_path / f"runs{len(results)}", cwd=tmp_path, env=job.environ)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        results.append([line for line in ran.stderr.splitlines() if shapes.RESULT in line])
    assert len(results[0]) == 1
    assert results[0] == results[1]


@pytest.mark.slow(turn=4)
def test_vertex_runs_by_its_digest_what_it_has_pushed(job: Job, pushed: dict[str, Any], tmp_path: Path) -> None:
    """One command from an edited file to two nodes that train in a bucket; the registry's digest is what is run."""
    edited = job.other(tmp_path / "vertex", "appended")
    (edited.spec.parent / "mine.py").write_text("number = 3\n")
    where = ("--region", "us-central1", "--output", "gs://my-bucket/runs")
    with GoogleCloud(runner=Runner(docker=True, environ=job.running.environ)) as cloud:
        found = edited.launch("vertex", edited.spec, *where, env=cloud.environ())
        names = [blob.name for blob in cloud.objects.listed("my-bucket")]
        logged = [entry.text for entry in cloud.logs.entries]
    assert (found["state"], found["results"]["steps"]) == ("SUCCEEDED", 12)
    assert found["image"].startswith(f"{job.running.registry}/appended/train@sha256:")
    assert found["image"] != pushed["reference"]
    assert manifest_of(found["image"]).digest == found["image"].partition("@")[2]
    assert any(name.startswith(f"runs/{found['run']}/metrics/0001-") for name in names)
    assert any(f"in containers of {found['image']}" in line for line in logged)


@pytest.mark.slow(turn=4)
def test_what_only_an_engine_can_make_stays_here_until_it_is_pushed(
    job: Job, pushed: dict[str, Any], api: Any, tmp_path: Path
) -> None:
    alone = job.other(tmp_path / "alone", "alone")
    built = alone.launch("build", alone.spec)
    assert (built["how"], built["pushed"], built["reference"]) == ("docker", False, built["image"])
    assert api.inspect_image(built["image"])["Config"]["Labels"]["org.opencontainers.image.title"] == "launch train"
    where = parse(built["image"])
    with Registry(where.host, {}) as registry:
        assert registry.head(where.repository, where.tag or "") is None
    sent = alone.launch("push", alone.spec)
    assert (sent["how"], sent["image"]) == ("appended", built["image"])
    assert manifest_of(sent["reference"]).body["layers"][-1] == manifest_of(pushed["reference"]).body["layers"][-1]


@pytest.mark.slow(turn=4)
def test_a_vm_runs_by_its_digest_what_was_pushed_and_deletes_itself(
    job: Job, pushed: dict[str, Any], tmp_path: Path
) -> None:
    """The startup script really runs, with the engine's own Docker; GPUs are what is missing."""
    where = ("--zone", "us-central1-a", "--nodes", "1", "--output", "gs://my-bucket/runs")
    with GoogleCloud() as cloud, Park(cloud, tmp_path / "vms", job.running.environ) as park:
        cloud.compute.pace = Pace(staging=0.1, running=0.2, delete=0.2, stop=0.5)
        found = job.launch("vm", job.spec, "--run", "--no-preflight", *where, env=cloud.environ())
        stored = {blob.name: blob.data for blob in cloud.objects.listed("my-bucket")}
        assert cloud.compute.names() == []
        (number,) = park.booted
    assert (found["state"], found["results"]["steps"]) == ("SUCCEEDED", 12)
    assert found["image"] == pushed["reference"]
    record = json.loads(stored[f"runs/{found['run']}/machines/{number}.json"])
    assert (record["exit"], record["reason"], record["cleanup"]) == (0, "", "")
    assert json.loads(stored[f"runs/{found['run']}/attempts/0001.claim"])["job"] == number
    assert any("launch: done" in entry.text for entry in cloud.logs.entries)


@pytest.mark.slow(turn=4)
def test_a_script_with_loader_workers_loses_no_step_when_its_vm_is_preempted(
    job: Job, pushed: dict[str, Any], tmp_path: Path
) -> None:
    """The signal goes from the VM to its container, whose first process is the node, and from there to two ranks."""
    (image,) = [line for line in job.spec.read_text().splitlines() if line.startswith("image:")]
    for name, before in (("plain", ""), ("preempted", SLOW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "work.py").write_text(ranks_with_workers(before, "num_workers=2,"))
        where = "zones: [us-central1-a, us-central1-b]\nprovisioning: spot\n"
        spec = f"name: epochs\nmachine: {{type: l4, gpus: 2}}\n{where}{image}\nrun: {{script: work.py}}\n"
        (tmp_path / name / "job.yaml").write_text(spec)
    Job(tmp_path / "plain" / "job.yaml", job.running).launch("local", "job.yaml", "--docker", "--output", "out")
    with GoogleCloud() as cloud, Park(cloud, tmp_path / "vms", job.running.environ):
        cloud.compute.pace = Pace(staging=0.1, running=0.2, delete=0.2, stop=0.5, notice=20)
        words = ("vm", "job.yaml", "--run", "--no-preflight", "--output", "gs://my-bucket/runs", "-o", "json")
        env = {**job.environ, **cloud.environ()}
        with started(*words, cwd=tmp_path / "preempted", env=env) as process:
            until = time.monotonic() + 300
            while not any(entry.text.endswith("step 20") for entry in cloud.logs.entries):
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < until, [entry.text for entry in cloud.logs.entries]
                time.sleep(0.1)
            cloud.compute.capacity.out("us-central1-a")
            cloud.compute.preempt(cloud.compute.names()[0])
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        parts = sorted((blob.name, blob.data) for blob in cloud.objects.listed("my-bucket") if "/metrics/" in blob.name)
        logged = [entry.text for entry in cloud.logs.entries]
    assert json.loads(out)["zone"] == "us-central1-b"
    assert not any("DataLoader worker" in line for line in logged)
    assert any("resumed from step" in line for line in logged)
    rows = [json.loads(line) for _, data in parts for line in data.splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == losses(only_run(tmp_path / "plain" / "out"))
