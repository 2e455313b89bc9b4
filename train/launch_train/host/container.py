"""Run a job's processes in a container: by Docker or Apptainer on this machine, or by Pyxis, a plugin of Slurm's srun.

The account's home folder, the folder of launch and those of `mounts` are at the same places inside, and the processes
are the account's, without root. So all paths of a job, its environment included, hold inside too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from launch_train.host.errors import RefusedError

PYXIS: Final = "pyxis"
APPTAINER: Final = ("apptainer", "singularity")
"""Names of one program."""
CLIENT: Final = ("DOCKER_", "APPTAINER_", "SINGULARITY_")
"""Beginnings of the variables of this machine that Docker's and Apptainer's programs read."""
OF_MACHINE: Final = frozenset({"PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "LANG", "LC_ALL"})
"""Variables of a login that mean nothing in a container."""
RUN_LABEL: Final = "launch-run"
ANSWER_SECONDS: Final = 60.0
NO_PYTHON: Final = 98
LOOK: Final = f"""for each in {{}}; do python=$(command -v "$each") && break; done
[ "$python" ] || exit {NO_PYTHON}; echo "$python"; exec "$python" "$0" "$@\""""
"""Looks for a Python in a container, and lets it answer the probe in the script's arguments."""


def provide_container(root: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container for the jobs of a request: `runtime`, the exact `image`, `mounts`; and `pythons`, as
    `environment.probe_pythons` does, with the first of its candidates that the image has. An image that is not here is
    pulled.

    The request has `image` (a path of this machine, or HOST/NAME:TAG), `mounts` (SOURCE or SOURCE:TARGET), `pythons`,
    `probe`, `gpus`, and `slurm`: the container runs on a cluster's nodes. Pyxis starts none on a login node; its
    `pythons` is empty.

    Raises RefusedError: no program runs containers, or the image is not available or has no Python.
    """
    image, is_slurm = str(request["image"]), bool(request["slurm"])
    path = os.path.expanduser(image) if image.startswith(("/", "~/")) else ""  # noqa: PTH111 - it is a name elsewhere
    for place in filter(None, (path, *(mount.partition(":")[0] for mount in request["mounts"]))):
        if not os.path.exists(os.path.expanduser(place)):  # noqa: PTH110, PTH111
            raise RefusedError(f"{place} does not exist here", "Name a path on the host, or an image: HOST/NAME:TAG")
    container: dict[str, Any] = {"runtime": choose_runtime(path, is_slurm=is_slurm), "image": path or image}
    container["mounts"] = [os.path.expanduser(mount) for mount in request["mounts"]]  # noqa: PTH111
    if container["runtime"] == PYXIS:
        return {**container, "pythons": []}
    if container["runtime"] == "docker":  # a rootless engine maps its root to the account
        is_rootless = "rootless" in output_of("docker", "info", "--format={{.SecurityOptions}}")
        container["user"] = "0:0" if is_rootless else f"{os.getuid()}:{os.getgid()}"
    if not path:
        container["image"] = pull_image(root, container["runtime"], image)
    look = LOOK.format(shlex.join(request["pythons"]))
    words, env = contained(container, ["sh", "-c", look, *request["probe"]], {}, root, Path("/"), gpus=request["gpus"])
    ran = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode == NO_PYTHON:
        raise RefusedError(f"{image} has no Python", "Name an image that has one, or its place in this: --python PATH")
    lines = ran.stdout.splitlines()
    if ran.returncode or len(lines) < 2:
        raise RefusedError(f"{image} can't be run: {last_line(ran.stderr or ran.stdout)}", "")
    return {**container, "pythons": [{"path": lines[0], "answer": json.loads(lines[-1])}]}


def choose_runtime(path: str, *, is_slurm: bool) -> str:
    """Return the program that runs an image; `path`: of an image in a file or folder. Raises RefusedError."""
    if is_slurm and (not path or path.endswith(".sqsh")):
        with suppress(RefusedError):
            if "--container-image" in output_of("bash", "-lc", "srun --help"):
                return PYXIS
    problem = "Docker is not installed"
    if not path and not is_slurm and shutil.which("docker"):
        words = ["docker", "version", "--format={{.Server.Version}}"]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        if not ran.returncode:
            return "docker"
        problem = f"Docker can't be used: {last_line(ran.stderr)}"
    for program in APPTAINER:
        if shutil.which(program):
            return program
    if is_slurm:
        problem = "Pyxis and Apptainer are not installed"
    elif path:
        problem = "Apptainer, which runs an image from a file, is not installed"
    fix = "sudo usermod -aG docker $USER" if "permission denied" in problem else "Run the job without --container."
    raise RefusedError(f"no container can be run: {problem}", fix)


def pull_image(root: Path, runtime: str, image: str) -> str:
    """Return the exact name of an image for Docker, or the file of one for Apptainer; pull it unless it is here.

    A tag is looked up once: later jobs use the same image until it is removed. Raises RefusedError.
    """
    if runtime == "docker":
        look = ("docker", "image", "inspect", "--format={{json .}}", image)
        if subprocess.run(look, capture_output=True, check=False).returncode:
            output_of("docker", "pull", "--quiet", image)
        facts = json.loads(output_of(*look))
        return image if "@" in image else str([*facts["RepoDigests"], facts["Id"]][0])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", image.rpartition("/")[2])[:40]
    file = root / "images" / f"{name}-{hashlib.sha256(image.encode()).hexdigest()[:8]}.sif"
    file.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            output_of(runtime, "pull", "--force", f"{file}.part", f"docker://{image}")
            Path(f"{file}.part").rename(file)
    return str(file)


def output_of(*argv: str) -> str:
    """Run a program and return its output. Raises RefusedError with its last line."""
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode:
        fix = "Of a private image: log in to its registry, on the host (docker login HOST, apptainer registry login)."
        raise RefusedError(f"{argv[0]} {argv[1]}: {last_line(ran.stderr)}", fix)
    return ran.stdout


def last_line(text: str) -> str:
    """Return a program's last line, without colours."""
    lines = (line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    *_, last = ["no output", *(line for line in lines if line and not line.startswith("See 'docker "))]
    return re.sub(r"^((docker|FATAL|ERROR|Error response from daemon)\s*:\s*)+", "", last)


def is_in_container(job: Mapping[str, Any]) -> bool:
    """Return whether the processes of a job must be put into a container; Pyxis has done so itself."""
    return bool(job.get("container")) and job["container"]["runtime"] != PYXIS


def contained(
    container: Mapping[str, Any],
    argv: Sequence[str],
    variables: Mapping[str, str],
    root: Path,
    folder: Path,
    *,
    places: Iterable[str] = (),
    gpus: int = 0,
    label: str = "",
    stdin: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `argv` in a container, and its environment.

    `variables`: what the processes get besides the image's own; their PATH comes before the image's. `folder`: where
    they start; `places`: further folders that they see. `label`: what `remove_containers` finds it by. `stdin`: they
    read this program's.
    """
    home = os.path.expanduser("~")  # noqa: PTH111 - it is a text
    variables = {"HOME": home, **variables}
    binds = binds_of(container, root, places)
    inside = ["sh", "-c", 'export PATH="${0:+$0:}$PATH"; exec "$@"', variables.get("PATH", ""), *argv]
    client = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith(CLIENT)}
    if container["runtime"] in APPTAINER:
        words = [container["runtime"], "--quiet", "exec", "--home", home, "--pwd", str(folder)]
        words += [word for bind in binds for word in ("--bind", bind)] + ["--nv"] * bool(gpus)
        return [*words, container["image"], *inside], {**variables, **client}
    words = ["docker", "run", "--rm", "--network=host", "--ipc=host", f"--user={container['user']}"]
    words += [f"--workdir={folder}", "--entrypoint="]
    for bind in binds:
        source, _, target = bind.partition(":")
        words.append(f"--mount=type=bind,source={source},target={target}")
    words += [f"--env={name}" for name in variables if name != "PATH"]
    words += ["--gpus=all"] * bool(gpus) + ["--interactive"] * stdin
    if Path("/dev/infiniband").is_dir():
        words += ["--device=/dev/infiniband", "--ulimit=memlock=-1"]  # RDMA pins memory
    words += [f"--label={RUN_LABEL}={label}"] if label else []
    return [*words, container["image"], *inside], {**variables, **client}


def pyxis_options(job: Mapping[str, Any], root: Path) -> list[str]:
    """Return the options of srun that put its processes into a job's container; none without Pyxis."""
    container = job.get("container") or {}
    if container.get("runtime") != PYXIS:
        return []
    image = str(container["image"])
    name, at, digest = image.partition("@")
    if at:  # enroot before 4.0 takes a digest in the place of the tag alone
        image = f"{name.rpartition(':')[0] if ':' in name.rpartition('/')[2] else name}:{digest}"
    registry, slash, name = image.partition("/")
    if slash and registry and (registry == "localhost" or "." in registry or ":" in registry):
        image = f"{registry}#{name}"
    mounts = ",".join(binds_of(container, root, [str(job["folder"])]))
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={root}"]


def binds_of(container: Mapping[str, Any], root: Path, places: Iterable[str]) -> list[str]:
    """Return the folders that a container sees, as SOURCE:TARGET."""
    folders = [os.path.expanduser("~"), os.path.realpath(root), *places]  # noqa: PTH111 - it is a text
    binds = [f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder.startswith("/")]
    return binds + [mount if ":" in mount else f"{mount}:{mount}" for mount in container["mounts"]]


def remove_containers(job: Mapping[str, Any], label: str) -> None:
    """Remove a job's containers in Docker by their label: one whose client was killed would run on."""
    if is_in_container(job) and job["container"]["runtime"] == "docker":
        with suppress(RefusedError):
            ids = output_of("docker", "ps", "--all", "--quiet", f"--filter=label={RUN_LABEL}={label}").split()
            if ids:
                output_of("docker", "rm", "--force", *ids)
