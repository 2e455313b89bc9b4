"""A page of commands that really run: `python -m tests.e2e.recipe` records it again.

In a block that starts with ```text, `$ launch …` is a command and what stands below it was printed, both streams as a
terminal shows them. Numbers, times and names that every run has anew don't count; the order of lines does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.testing.googlecloud import GoogleCloud, Runner
from tests.command import ROOT, WORLD
from tests.e2e.running import LAUNCH
from tests.recipes import Step
from tests.registry import OciRegistry, put_image

PAGE = ROOT / "docs" / "recipes" / "run.md"
BLOCK = re.compile(r"(?<=```text\n)\$ launch .*?(?=```)", re.DOTALL)
STEP = re.compile(r"^\$ (launch .*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
SPEC = re.compile(r"```yaml\n(# my_job\.yaml\n.*?)```", re.DOTALL)
IMAGE = "us-docker.pkg.dev/my-project/launch/train"


def recorded(text: str, outputs: Sequence[str], blocks: re.Pattern[str] = BLOCK) -> str:
    """The page with these outputs, in their order."""
    left = iter(outputs)

    def block(match: re.Match[str]) -> str:
        return STEP.sub(lambda step: f"$ {step[1]}\n{next(left)}", match[0])

    return blocks.sub(block, text)


def steps(text: str, blocks: re.Pattern[str] = BLOCK) -> list[Step]:
    """The recorded steps of a page."""
    return [Step(step[1], step[2]) for block in blocks.finditer(text) for step in STEP.finditer(block[0])]


def outputs(text: str, folder: Path) -> tuple[list[str], GoogleCloud]:
    """Run the page's commands in `folder`, one after the other, against a cloud that really runs what it is given."""
    found = []
    with world(text, folder) as (cloud, env, image):
        for line, _ in steps(text):
            found.append(printed(line, env, folder).replace(image, IMAGE))
    return found, cloud


def printed(line: str, env: Mapping[str, str], folder: Path) -> str:
    """What a command prints, both streams as a terminal shows them."""
    done = subprocess.run(
        [LAUNCH, *shlex.split(line)[1:]],
        env=dict(env),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + (f"[exit code {done.returncode}]\n" if done.returncode else "")


@contextmanager
def world(text: str, folder: Path) -> Iterator[tuple[GoogleCloud, Mapping[str, str], str]]:
    """The page's spec in `folder` and the cloud that it goes to. The image is one that is there."""
    (spec,) = SPEC.findall(text)
    with GoogleCloud(runner=Runner()) as cloud, OciRegistry() as registry:
        image = f"{registry.host}/p/train"
        pinned = f"{image}@{put_image(registry, 'p/train')}"
        (folder / "my_job.yaml").write_text(spec + f"image: {{uri: '{pinned}'}}\n")
        env = {**WORLD, **cloud.environ(), "DOCKER_CONFIG": "/nonexistent", "XDG_CACHE_HOME": cache(), "COLUMNS": "80"}
        yield cloud, env, image


def cache() -> str:
    """Where prepared data is kept between runs."""
    return str(ROOT / ".launch" / "cache")


def likeness(text: str) -> list[str]:
    """What must stay the same: the lines, without numbers and without what depends on the machine's speed."""
    text = re.sub(r"\b(my-job)-[0-9a-f]{8}", r"\1-RUN", text)
    text = re.sub(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?=\d\d:)", "", text)  # a lease that ends after midnight
    text = re.sub(r"\n {10}(?=\S)", " ", text)  # where a line is wrapped depends on its numbers
    text = re.sub(r"\b\d+ (?:min|h) (?=\d+ (?:s|min)\b)", "", text)
    text = re.sub(r"sha256:[0-9a-f]+|[0-9a-f]{16}…", "DIGEST", text)
    lines = [" ".join(re.sub(r"[\d.,:]*\d[\d.,:e-]*k?", "#", line).split()) for line in text.splitlines()]
    lines = [re.sub(r"# (?:s|min|h)\b", "# s", line) for line in lines]
    lines = [re.sub(r"(RUNNING|SUCCEEDED) # s \S+ \S+", r"\1 # s # #", line) for line in lines]  # has it begun, /total
    noise = r"\[workerpool#\] step|# step #|\[service\]|# (queued|waiting)"
    kept = [line for line in lines if not re.match(noise, line)]
    return sorted(kept, key=lambda line: line.startswith("["))  # the job's own lines come some seconds late


def record(
    page: Path, outputs: Callable[[str, Path], tuple[list[str], GoogleCloud]], blocks: re.Pattern[str] = BLOCK
) -> None:
    """Record a page again."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        page.write_text(recorded(text, outputs(text, Path(folder))[0], blocks))


if __name__ == "__main__":
    record(PAGE, outputs)
