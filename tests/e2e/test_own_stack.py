"""Images with another PyTorch than the recipe's own, built by a real engine.

The wheels are tiny and made here: a release of PyTorch in two builds, torchvision in two builds, and what needs them.
They lie in the base image, where pip finds them besides its indexes.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import math
import os
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import docker
import pytest

from launcher.images.docker_engine import Engine
from launcher.images.registry import Registry, parse
from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.googlecloud.images.cloud_build import Outcome
from tests.e2e.engine import Running
from tests.e2e.running import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow(turn=3)]

CANARY = "canary-7f30e1c4"
SPEC = """\
name: mine
machine: {{type: l4, gpus: 1}}
image: {{repository: "{repository}", base: "{base}", requirements: {requirements}{more}}}
run: {{script: mine.py}}
"""
PIP_CONF = "[global]\nfind-links = /wheels\nretries = 0\ntimeout = 5\n"
"""PyTorch's own indexes can't be reached from everywhere; pip then uses what it finds elsewhere."""


def wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = (), text: str = "") -> Path:
    """A wheel of one module, which has a version."""
    folder.mkdir(exist_ok=True)
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    file = folder / f"{package}-{version}-py3-none-any.whl"
    needs_lines = "".join(f"Requires-Dist: {one}\n" for one in needs)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}/__init__.py", f"__version__ = {version!r}\n{text}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs_lines}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "wheels"
    for version in ("2.9.1+cu126", "2.9.1+cu128", "2.15.0"):
        wheel(folder, "torch", version)
    for version, torch in (("0.24.1", "2.9.1"), ("0.24.1+cu128", "2.9.1"), ("0.29.9", "2.15.0")):
        wheel(folder, "torchvision", version, (f"torch=={torch}",))
    wheel(folder, "needs-torch", "1.0", ("torch",))
    return folder


@pytest.fixture(scope="module")
def api(containers: Running) -> Iterator[Any]:
    client = docker.APIClient(containers.engine, version="auto", timeout=600)
    yield client
    client.close()


def layered(containers: Running, api: Any, name: str, dockerfile: str, folder: Path) -> str:
    """Build an image on the tests' base; return its digest reference in the registry."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, "wheels")
        for file, text in (("Dockerfile", f"FROM {containers.base}\n{dockerfile}"), ("pip.conf", PIP_CONF)):
            info = tarfile.TarInfo(file)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    archive.seek(0)
    tag = f"{containers.registry}/{name}:1"
    events = list(api.build(fileobj=archive, custom_context=True, tag=tag, decode=True, rm=True))
    assert not any("error" in event for event in events), events[-3:]
    engine = Engine.connect(containers.environ)
    digest = engine.push(tag)
    engine.api.close()
    return f"{containers.registry}/{name}@{digest}"


@pytest.fixture(scope="module")
def base(containers: Running, api: Any, wheels: Path) -> str:
    return layered(containers, api, "withwheels", "COPY wheels /wheels\nCOPY pip.conf /etc/pip.conf\n", wheels)


@pytest.fixture(scope="module")
def base_with_torch(containers: Running, api: Any, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As NVIDIA's: a PyTorch of its own, with a version that no index has, in a prefix of its own."""
    folder = tmp_path_factory.mktemp("vendor") / "wheels"
    shutil.copytree(wheels, folder)
    wheel(folder, "vendor-numpy", "1.0")
    wheel(folder, "torch", "2.9.0a0+145a3a7.nv25.10", text="from torch_native import KERNELS\n")
    wheel(folder, "torch-native", "1.0", text="KERNELS = 'vendor'\n")
    steps = (
        "COPY wheels /wheels\nCOPY pip.conf /etc/pip.conf\n"
        "RUN python3 -m venv /opt/vendor && /opt/vendor/bin/pip install --no-index --no-deps --find-links /wheels "
        "torch==2.9.0a0+145a3a7.nv25.10 torch-native vendor-numpy\nENV PATH=/opt/vendor/bin:$PATH\n"
    )
    return layered(containers, api, "vendor", steps, folder)


def job(
    folder: Path, containers: Running, base: str, requirements: str, more: str = "", name: str = "requirements.txt"
) -> Path:
    """A folder with a spec, a script and requirements."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text("import torch\nprint(torch.__version__)\n")
    (folder / name).write_text(requirements)
    spec = folder / "job.yaml"
    values = {"repository": f"{containers.registry}/own", "base": base, "requirements": name, "more": more}
    spec.write_text(SPEC.format(**values))
    return spec


def pushed(spec: Path, containers: Running, env: dict[str, str] | None = None, *words: str) -> dict[str, Any]:
    path = f"/usr/bin:{containers.environ['PATH']}"  # Debian's docker command, which has BuildKit without a plugin
    env = {**containers.environ, "PATH": path, **(env or {})}
    ran = run("push", spec, *words, "-o", "json", cwd=spec.parent, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def in_image(api: Any, reference: str, code: str) -> str:
    """Run Python in the image as its own user; return what it prints."""
    name, _, digest = reference.partition("@")
    api.pull(f"{name}@{digest}")
    made = api.create_container(reference, entrypoint=["python", "-c", code])["Id"]
    try:
        api.start(made)
        status = api.wait(made)["StatusCode"]
        output = str(api.logs(made).decode())
        assert status == 0, output
        return output
    finally:
        api.remove_container(made, force=True)


SHOW = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
NODE = (
    "import launch_train.node.__main__, launch_train.metrics; "
    "import google.cloud.storage, google_crc32c, psutil, pynvml, numpy; print('node', launch_train.__file__)"
)


def test_the_bases_own_torch_is_used_and_never_replaced(
    containers: Running, api: Any, base_with_torch: str, tmp_path: Path
) -> None:
    spec = job(tmp_path / "job", containers, base_with_torch, "needs-torch\n", ", torch: base")
    found = pushed(spec, containers)
    assert found["wheel"] == "base"
    assert in_image(api, found["reference"], "import torch; print(torch.__version__, torch.KERNELS)").split() == [
        "2.9.0a0+145a3a7.nv25.10",
        "vendor",
    ]
    assert "/opt/vendor/" in in_image(api, found["reference"], "import torch; print(torch.__file__)")
    assert in_image(api, found["reference"], NODE).split()[0] == "node"
    assert in_image(api, found["reference"], "import needs_torch; print(needs_torch.__version__)").split() == ["1.0"]


def test_hashes_of_every_package_are_checked(
    containers: Running, api: Any, base: str, wheels: Path, tmp_path: Path
) -> None:
    def line(name: str, version: str) -> str:
        file = wheels / f"{name}-{version}-py3-none-any.whl"
        return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"

    text = line("torch", "2.9.1+cu128") + line("torchvision", "0.24.1+cu128")
    found = pushed(job(tmp_path / "job", containers, base, text), containers)
    assert in_image(api, found["reference"], SHOW).split() == ["2.9.1+cu128", "0.24.1+cu128"]
    wrong = job(tmp_path / "wrong", containers, base, text.replace("sha256:", "sha256:00", 1).replace("00", "0", 1))
    ran = run("push", wrong, cwd=wrong.parent, env=containers.environ)
    assert ran.returncode == 1
    assert "HASH" in ran.stderr.upper()


def job_with_setup(folder: Path, containers: Running, base: str) -> Path:
    """A job whose setup has a Debian package, a Python package that would bring a newer PyTorch, and a line in quotes;
    all run as root."""
    spec = job(folder, containers, base, "torch==2.9.1+cu128\n")
    lines = [
        "apt-get install -y --no-install-recommends tini",
        "pip install --upgrade --upgrade-strategy eager needs-torch",
        """printf '%s\\n' "$(id -u)" '<<a  b' \\$HOME >note.txt""",
    ]
    text = spec.read_text().replace("requirements.txt", f"requirements.txt, setup: {json.dumps(lines)}")
    spec.write_text(text.replace("{script: mine.py}", "{script: mine.py, launcher: python}"))
    (spec.parent / "mine.py").write_text("import shutil\nprint(open('note.txt').read(), shutil.which('tini'))\n")
    return spec


def assert_has_setup(api: Any, image: str) -> None:
    """Assert that an image has what the lines of `job_with_setup` do, and still its own PyTorch."""
    show = "import needs_torch, torch; print(torch.__version__)"
    assert in_image(api, image, show).split() == ["2.9.1+cu128"]
    assert in_image(api, image, "import shutil; print(shutil.which('tini'))").strip() == "/usr/bin/tini"
    assert in_image(api, image, "print(open('note.txt').read())") == "0\n<<a  b\n$HOME\n\n"


def test_setup_lines_are_in_the_image_which_keeps_its_torch(
    containers: Running, api: Any, base: str, tmp_path: Path
) -> None:
    spec, env = job_with_setup(tmp_path / "job", containers, base), {**containers.environ}
    local = run("local", spec, "--docker", "--output", str(tmp_path / "runs"), cwd=spec.parent, env=env)
    assert local.returncode == 0, local.stdout + local.stderr
    assert "/usr/bin/tini" in local.stdout + local.stderr
    assert_has_setup(api, pushed(spec, containers)["reference"])
    spec.write_text(spec.read_text().replace("needs-torch", "no-such-package"))
    failed = run("push", spec, cwd=spec.parent, env=env)
    assert failed.returncode == 1
    assert "no-such-package" in failed.stderr


class BuildsByEngine:
    """A Cloud Build that runs the steps of a request: it unpacks the source, starts each step's program in it with the
    arguments of the request, and pushes the images. `gcr.io/cloud-builders/docker` is the docker command, here without
    BuildKit, which a request would have to ask for."""

    def __init__(self, cloud: GoogleCloud, containers: Running, folder: Path) -> None:
        self.cloud, self.folder = cloud, folder
        self.env = {**containers.environ, "DOCKER_BUILDKIT": "0"}

    def __call__(self, message: Any, source: bytes | None) -> Outcome:
        threading.Thread(target=self.build, args=(message, source), daemon=True).start()
        return Outcome((), math.inf)

    def build(self, message: Any, source: bytes | None) -> None:
        """Run the build to its end, and record that."""
        workspace, log, status = self.folder / message.id, "", "SUCCESS"
        with tarfile.open(fileobj=io.BytesIO(source or b"")) as tar:
            tar.extractall(workspace, filter="data")
        assert {step.name for step in message.steps} == {"gcr.io/cloud-builders/docker"}
        commands = [[argument.replace("$$", "$") for argument in step.args] for step in message.steps]
        for words in (*commands, *(["push", "--quiet", image] for image in message.images)):
            ran = subprocess.run(
                ["docker", *words], cwd=workspace, env=self.env, capture_output=True, text=True, check=False
            )
            log += ran.stdout + ran.stderr
            if ran.returncode:
                status = "FAILURE"
                break
        submitted = self.cloud.builds.builds[message.id]
        seconds = self.cloud.builds.clock() - submitted.created
        self.cloud.builds.builds[message.id] = replace(submitted, outcome=Outcome(((0.0, log),), seconds, status))


def test_cloud_build_gets_all_that_it_needs_to_run_the_setup_lines(
    containers: Running, api: Any, base: str, tmp_path: Path
) -> None:
    spec = job_with_setup(tmp_path / "job", containers, base)
    spec.write_text(spec.read_text().replace("/own", "/cloud"))  # else the image exists already
    cloud_build = ("--builder", "cloud-build")
    with GoogleCloud(buckets=("my-project-launch",)) as cloud:
        cloud.builds.play = BuildsByEngine(cloud, containers, tmp_path)
        env = {**cloud.environ(), "DOCKER_HOST": "unix:///no/engine"}
        found = pushed(spec, containers, env, *cloud_build)
        assert len(cloud.builds.builds) == 1
        spec.write_text(spec.read_text().replace("needs-torch", "no-such-package"))
        failed = run("push", spec, *cloud_build, cwd=spec.parent, env={**containers.environ, **env})
    assert_has_setup(api, found["reference"])
    assert found["how"] == "appended"
    assert failed.returncode == 1
    assert "ended as FAILURE in step dependencies" in failed.stderr
    assert "no-such-package" in failed.stderr


class PrivateIndex(http.server.SimpleHTTPRequestHandler):
    """A package index that wants a password."""

    def do_GET(self) -> None:
        wanted = base64.b64encode(f"me:{CANARY}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {wanted}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="packages"')
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path, handler: Any) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(
        ("0.0.0.0", 0), partial(handler, directory=str(folder))
    )  # for the bridge's address
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def gateway(api: Any) -> str:
    """The address of this machine in the containers' network."""
    return str(api.inspect_network("bridge")["IPAM"]["Config"][0]["Gateway"])


def test_torch_from_requirements_a_private_index_and_a_repository(
    containers: Running, api: Any, base: str, tmp_path: Path
) -> None:
    """PyTorch's build and what follows it; no password in any layer or the history, and no git in the image."""
    wheel(tmp_path / "index", "secret-sauce", "1.0")
    repository(tmp_path)
    with (
        serving(tmp_path / "index", PrivateIndex) as port,
        serving(tmp_path / "served", http.server.SimpleHTTPRequestHandler) as git,
    ):
        text = (
            f"--find-links http://me:${{INDEX_TOKEN}}@{gateway(api)}:{port}/\n--trusted-host {gateway(api)}\n"
            "secret-sauce\ntorch==2.9.1+cu128\ntorchvision\nneeds-torch\n"
            f"from-git @ git+http://{gateway(api)}:{git}/x.git\n"
        )
        spec = job(tmp_path / "job", containers, base, text, ", build_secrets: [INDEX_TOKEN]")
        unset = run("push", spec, cwd=spec.parent, env=containers.environ)
        assert unset.returncode == 2
        assert "image.build_secrets" in unset.stderr
        found = pushed(spec, containers, {"INDEX_TOKEN": CANARY})
    assert found["wheel"] == "cu128"
    image = found["reference"]
    assert in_image(api, image, SHOW).split() == ["2.9.1+cu128", "0.24.1+cu128"]
    assert in_image(api, image, NODE).split() == ["node", "/opt/launch/launch_train/__init__.py"]
    assert in_image(api, image, "import from_git, secret_sauce; print(from_git.here)").strip() == "from git"
    assert in_image(api, image, "import shutil; print(shutil.which('git'))").strip() == "None"
    assert not [one for one in api.history(image) if CANARY in json.dumps(one)]
    needles = (CANARY.encode(), base64.b64encode(f"me:{CANARY}".encode()))
    assert not any(needle in content for content in contents(image) for needle in needles)
    (spec.parent / "mine.py").write_text("print(2)\n")
    after = pushed(spec, containers)
    assert (after["how"], after["dependencies"]) == ("appended", found["dependencies"])


def repository(folder: Path) -> None:
    """A git repository with a package, as files that any web server can serve."""
    source = folder / "source"
    (source / "from_git").mkdir(parents=True)
    (source / "from_git" / "__init__.py").write_text("here = 'from git'\n")
    (source / "pyproject.toml").write_text("[project]\nname = 'from-git'\nversion = '1'\n")
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", *words], cwd=source, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", source, folder / "served" / "x.git"], check=True)
    subprocess.run(["git", "update-server-info"], cwd=folder / "served" / "x.git", check=True)


def contents(reference: str) -> Iterator[bytes]:
    """All that an image consists of: manifest, config, and each file of its layers."""
    where = parse(reference)
    with Registry(where.host, {}) as registry:
        manifest = registry.manifest(where.repository, where.digest or "")
        assert manifest
        yield manifest.raw
        yield registry.blob(where.repository, manifest.body["config"]["digest"])
    for blob in manifest.body["layers"]:
        with (
            urlopen(f"http://{where.host}/v2/{where.repository}/blobs/{blob['digest']}") as answer,
            tarfile.open(fileobj=answer, mode="r|gz") as layer,
        ):
            for one in layer:
                content = layer.extractfile(one) if one.isreg() else None
                if content:
                    yield content.read()


def test_a_finished_image_gets_the_node_as_a_layer_and_runs_a_script(
    containers: Running, api: Any, base_with_torch: str, tmp_path: Path
) -> None:
    """Without an engine; the image's own PyTorch, user and entrypoint stay."""
    spec = job(tmp_path / "job", containers, base_with_torch, "")
    (spec.parent / "mine.py").write_text(
        "import launch_train.metrics, torch, google.cloud.storage\nprint('mine:', torch.__version__, torch.KERNELS)\n"
    )
    text = spec.read_text().replace(
        f'base: "{base_with_torch}", requirements: requirements.txt', f'uri: "{base_with_torch}"'
    )
    spec.write_text(text.replace("{script: mine.py}", "{script: mine.py, node: append, launcher: python}"))
    ran = run("push", spec, "-o", "json", cwd=spec.parent, env={**os.environ, "DOCKER_HOST": "unix:///no/engine"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert (found["how"], found["wheel"]) == ("appended", "base")
    env = {**containers.environ}
    local = run("local", spec, "--docker", "--output", str(tmp_path / "runs"), cwd=spec.parent, env=env)
    assert local.returncode == 0, local.stdout + local.stderr
    assert "mine: 2.9.0a0+145a3a7.nv25.10 vendor" in local.stdout + local.stderr


def test_a_users_dockerfile_makes_the_base(containers: Running, api: Any, base_with_torch: str, tmp_path: Path) -> None:
    """Several stages, files of the code, and PyTorch from its own FROM."""
    spec = job(tmp_path / "job", containers, base_with_torch, "needs-torch\n", ", torch: base")
    (spec.parent / "tool.txt").write_text("made from the context\n")
    (spec.parent / "Own.Dockerfile").write_text(
        f"FROM {base_with_torch} AS tools\nCOPY tool.txt /made/\n"
        "RUN --mount=type=tmpfs,target=/t cp /made/tool.txt /made/x\n"
        f"FROM {base_with_torch}\nCOPY --from=tools /made /made\n"
    )
    spec.write_text(spec.read_text().replace(f'base: "{base_with_torch}"', "dockerfile: Own.Dockerfile, code: ."))
    found = pushed(spec, containers)
    code = "import torch, needs_torch; print(torch.KERNELS, open('/made/x').read())"
    assert in_image(api, found["reference"], code).split() == ["vendor", "made", "from", "the", "context"]
    assert in_image(api, found["reference"], NODE).split()[0] == "node"


def test_an_images_own_entrypoint_runs_untouched(containers: Running, api: Any, wheels: Path, tmp_path: Path) -> None:
    steps = 'ENTRYPOINT ["sh", "-c", "echo own entrypoint: $0 $1 in $LAUNCH_RUN_FOLDER"]\n'
    image = layered(containers, api, "entry", steps, wheels)
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f'name: mine\nmachine: {{type: l4, gpus: 1}}\nimage: {{uri: "{image}"}}\n'
        "run: {node: none, args: [--epochs, '3']}\n"
    )
    where = ("--output", str(tmp_path / "runs"))
    ran = run("local", spec, "--docker", *where, cwd=tmp_path, env=containers.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"own entrypoint: --epochs 3 in {tmp_path}/runs/mine-" in ran.stdout + ran.stderr
    without = run("local", spec, *where, cwd=tmp_path, env=containers.environ)
    assert without.returncode == 2
    assert "--docker" in without.stderr
