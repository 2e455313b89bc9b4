"""Measure the time from an edit to a digest in the registry, with launch and with docker build and push.

    python -m benchmarks.containers [hash] [edit] [cold --prune] [--runs N] [--write]

`hash` has no requirements. The others need the docker command. Without --spec they start a Docker engine and a registry
as the end-to-end tests do (root; tests/e2e/engine.py), for a Python project in a src layout with CPU PyTorch; --spec
names a spec whose image.repository is a registry on this machine, and the engine is that of DOCKER_HOST. The engine's
case is the simplest possible: a Dockerfile of three lines on top of the dependency image. The compared variants
alternate, and medians are compared.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.machine import described
from benchmarks.result import parser_of, save_result, today

ROOT = Path(__file__).parent.parent
LAUNCH = Path(sys.executable).with_name("launch")
FILES = 10_000
SIZES = range(2_000, 20_000)
"""Bytes of a file of Python."""
DOCKERFILE = """\
FROM {base}
COPY launch_train /opt/launch/launch_train
COPY --chown=1000:1000 code /workspace
"""
SPEC = """\
machine: {{type: l4}}
image: {{repository: "{registry}/bench", base: "{base}", torch: "{torch}", wheel: cpu, requirements: pyproject.toml}}
run: {{module: project.__main__}}
"""
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "project"
version = "1"
dependencies = ["einops"]
"""


def hashing(runs: int) -> list[str]:
    """Measure listing and hashing a code folder with ignore rules, with its files in the page cache.

    Its files are pieces of this repository's Python.
    """
    from launcher.inputs import code_files

    source = b"".join(path.read_bytes() for path in sorted((ROOT / "launcher").rglob("*.py")))
    random = Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".gitignore").write_text("*.log\n*.pyc\n/data/\nbuild/\n!keep.log\n")
        for number in range(FILES):
            path = folder / f"part{number // 100}" / f"module{number}.py"
            path.parent.mkdir(exist_ok=True)
            begin = random.randrange(len(source) - SIZES.stop)
            path.write_bytes(source[begin : begin + random.choice(SIZES)])
        seconds = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            found = code_files.collect_code(folder)
            code_files.check_size(found, 500)
            content = code_files.without_secrets(found).content
            seconds.append(time.perf_counter() - began)
    return [
        f"| {content.files:,} files, {content.size / 1e6:.0f} MB, {runs} runs | s |",
        "|---|---:|",
        f"| listed, hashed and searched for secrets, median | {median(seconds[1:]):.2f} |",
        f"| least to most | {min(seconds[1:]):.2f} to {max(seconds[1:]):.2f} |",
    ]


@contextmanager
def own_spec() -> Iterator[Path]:
    """Start an engine and a registry, and yield the spec of a project, this repository's `launcher` by another name."""
    from tests.e2e.engine import require, running, wheel

    require()
    with running() as containers, tempfile.TemporaryDirectory() as name:
        os.environ |= containers.environ
        spec = Path(name, "job.yaml")
        spec.write_text(SPEC.format(registry=containers.registry, base=containers.pinned, torch=wheel()))
        spec.with_name("pyproject.toml").write_text(PROJECT)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "launcher", spec.with_name("src") / "project", ignore=ignored)
        yield spec


class Job:
    """A copy of a spec's folder to edit, and both ways to build its image."""

    def __init__(self, spec: Path, folder: Path) -> None:
        self.folder = shutil.copytree(spec.parent, folder / "job")
        self.spec = self.folder / spec.name
        self._count = 0
        image = self.launch("push")
        self.base: str = image["dependencies"]
        self.repository: str = image["image"].rpartition("/")[0]
        self.context = folder / "context"
        shutil.copytree(
            ROOT / "train" / "launch_train", self.context / "launch_train", ignore=shutil.ignore_patterns("__pycache__")
        )
        (self.context / "Dockerfile").write_text(DOCKERFILE.format(base=self.base))

    def edit(self) -> None:
        """Change one file of the code."""
        self._count += 1
        edited = self.folder / "edited.py"
        edited.write_text(f"number = {self._count}\ntime = {time.time_ns()}\n")

    def launch(self, command: str) -> dict[str, Any]:
        """Run `launch COMMAND SPEC` and return its JSON output."""
        ran = subprocess.run(
            [LAUNCH, command, self.spec, "-o", "json"], capture_output=True, text=True, check=False, cwd=self.folder
        )
        if ran.returncode:
            raise SystemExit(ran.stderr)
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    def docker(self) -> None:
        """Build and push the image with docker, without launch."""
        shutil.rmtree(self.context / "code", ignore_errors=True)
        shutil.copytree(self.folder, self.context / "code")
        name = f"{self.repository}/by-docker:{self._count}"
        for words in (["build", "--quiet", "--tag", name, str(self.context)], ["push", "--quiet", name]):
            subprocess.run(["docker", *words], check=True, capture_output=True)

    def forget(self) -> None:
        """Delete all images of the engine, as on a new machine."""
        subprocess.run(["docker", "image", "prune", "--all", "--force"], check=True, capture_output=True)

    def compressed(self) -> int:
        """Return the size in bytes of the code's files, each compressed: a lower bound of the upload."""
        return sum(len(gzip.compress(path.read_bytes())) for path in self.folder.rglob("*") if path.is_file())


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def edit(spec: Path, runs: int) -> list[str]:
    """Measure the time from an edit of one file to a new digest in the registry, and the time without an edit."""
    seconds: dict[str, list[float]] = {"launch push, appended": [], "docker build && docker push": [], "nothing": []}
    sent = []
    with tempfile.TemporaryDirectory() as name:
        job = Job(spec, Path(name))
        for number in range(runs + 1):
            job.edit()
            began = time.perf_counter()
            appended = job.launch("push")
            took = time.perf_counter() - began
            nothing, docker = _seconds(lambda: job.launch("push")), _seconds(job.docker)
            if number:
                sent.append(appended["sent"])
                for key, value in zip(seconds, (took, docker, nothing), strict=True):
                    seconds[key].append(value)
        least = job.compressed()
    names = {"nothing": "launch push, nothing edited"}
    return [
        f"| {runs} rounds in turns | s, median | least to most |",
        "|---|---:|---:|",
        *(
            f"| {names.get(key, key)} | {median(of):.2f} | {min(of):.2f} to {max(of):.2f} |"
            for key, of in seconds.items()
        ),
        "",
        f"The code: {appended['code']['files']:,} files, {appended['code']['bytes']:,} bytes. Sent by launch: "
        f"{median(sent):,.0f} bytes (median), code, config and manifest; the code's files compressed one by one have "
        f"{least:,}.",
    ]


def cold(spec: Path, runs: int) -> list[str]:
    """Measure an edit when the engine has neither image nor base, and must pull the base that launch only mounts."""
    seconds: dict[str, list[float]] = {"launch": [], "docker": []}
    with tempfile.TemporaryDirectory() as name:
        job = Job(spec, Path(name))
        for _ in range(runs):
            job.edit()
            seconds["launch"].append(_seconds(lambda: job.launch("push")))
            job.forget()
            seconds["docker"].append(_seconds(job.docker))
        pulled = _layer_bytes(job.base)
    return [
        f"| {runs} rounds in turns, nothing on the machine | s, median | pulled |",
        "|---|---:|---:|",
        f"| launch push, appended | {median(seconds['launch']):.2f} | 0 |",
        f"| docker build && docker push | {median(seconds['docker']):.2f} | {pulled / 1e6:,.0f} MB |",
    ]


def _layer_bytes(reference: str) -> int:
    """Return the total size in bytes of an image's compressed layers."""
    from launcher.images.registry import Registry, parse

    parsed = parse(reference)
    with Registry(parsed.host, os.environ) as registry:
        manifest = registry.manifest(parsed.repository, parsed.tag or "")
    return sum(one["size"] for one in manifest.body["layers"]) if manifest else 0


TITLES = {"hash": "Listing and hashing", "edit": "An edit", "cold": "An edit on a new machine"}


def main() -> None:
    """Measure and print; with --write, save the tables in benchmarks/results/."""
    parser = parser_of("containers", __doc__)
    parser.add_argument("what", nargs="*", help=f"{', '.join(TITLES)}; left out: all")
    parser.add_argument("--spec", type=Path, help="a spec whose image.repository is a registry on this machine")
    parser.add_argument("--prune", action="store_true", help="`cold` may remove all images from the engine")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    if unknown := set(options.what) - set(TITLES):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    if "cold" in (options.what or TITLES) and options.spec and not options.prune:
        parser.error("cold removes all images from the engine of DOCKER_HOST: say --prune if it may")
    text = f"# Containers, {today()}\n\n{described('docker', 'requests')}.\n"
    is_own = options.what != ["hash"] and options.spec is None
    with own_spec() if is_own else nullcontext(options.spec and options.spec.resolve()) as spec:
        tables = {
            "hash": lambda: hashing(options.runs),
            "edit": lambda: edit(spec, options.runs),
            "cold": lambda: cold(spec, max(1, options.runs // 2)),
        }
        for what in options.what or TITLES:
            text += "\n".join(["", f"## {TITLES[what]}", "", *tables[what](), ""])
            print(text, flush=True)
    if options.write:
        save_result("containers", text)


if __name__ == "__main__":
    main()
