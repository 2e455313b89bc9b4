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
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launch_train.common import contract
from launch_train.host.errors import RefusedError

PYXIS: Final = "pyxis"
APPTAINER: Final = ("apptainer", "singularity")
"""Names of one program."""
CLIENT_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "docker": ("DOCKER_",),
    **dict.fromkeys(APPTAINER, ("APPTAINER_", "SINGULARITY_")),
}
"""Beginnings of the variables of this machine that each program reads."""
LOGIN_ONLY: Final = frozenset({"PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "LANG", "LC_ALL"})
"""Variables of a login that mean nothing in a container."""
RUN_LABEL: Final = "launch-run"
ANSWER_SECONDS: Final = 60.0
REMOVE_SECONDS: Final = 90.0
"""A Docker engine that is being updated is back by then."""
NO_PYTHON: Final = 98
FIND_PYTHON: Final = f"""is_new='import sys; sys.exit(sys.version_info < (3, 10))'
for each in {{}}; do
  python=$(command -v "$each") && "$python" -c "$is_new" 2>/dev/null && echo "$python" && exec "$python" -s "$0" "$@"
done
exit {NO_PYTHON}"""
"""Looks for a Python in a container, and lets it answer the probe in the script's arguments."""
SET_VARIABLES: Final = """for name in $LAUNCH_NAMES; do
  eval "value=\\$LAUNCHENV_$name old=\\${$name-}"
  case $name in PATH | PYTHONPATH | LD_LIBRARY_PATH) value="$value${old:+:$old}" ;; esac
  export "$name=$value" && unset "LAUNCHENV_$name"
done
unset LAUNCH_NAMES; exec "$0" "$@\""""
"""Sets a job's variables in a container, where an image may have set them too, and adds its folders to the image's."""


def provide_container(root: Path, request: Mapping[str, Any], srun_help: str) -> dict[str, Any]:
    """Return the container for the jobs of a request: `runtime`, the exact `image`, `mounts`; and `pythons`, as
    `environment.probe_pythons` does, with the first of its candidates that the image has. An image that is not here is
    pulled.

    The request has `image` (a path of this machine, or HOST/NAME:TAG), `mounts` (SOURCE or SOURCE:TARGET), `pythons`,
    `probe`, `gpus`, and `slurm`: the container runs on a cluster's nodes, whose srun prints `srun_help`. Pyxis starts
    none on a login node; its `pythons` is empty.

    Raises RefusedError: no program runs containers, or the image is not available or has no Python.
    """
    image, is_slurm = str(request["image"]), bool(request["slurm"])
    path = str(Path(image).expanduser()) if image.startswith(("/", "~/")) else ""
    for place in filter(None, (path, *(mount.partition(":")[0] for mount in request["mounts"]))):
        if not Path(place).expanduser().exists():
            raise RefusedError(f"{place} does not exist here", "Name a path on the host, or an image: HOST/NAME:TAG")
    container: dict[str, Any] = {"runtime": choose_runtime(path, srun_help, is_slurm=is_slurm), "image": path or image}
    container["mounts"] = [str(Path(mount).expanduser()) for mount in request["mounts"]]
    if container["runtime"] == PYXIS:
        return {**container, "pythons": []}
    if not path:
        container["image"] = pull_image(root, container["runtime"], image)
    look = FIND_PYTHON.format(shlex.join(str(Path(python).expanduser()) for python in request["pythons"]))
    words, env = command_in_container(
        container, ["sh", "-c", look, *request["probe"]], {}, root, Path("/"), gpus=request["gpus"]
    )
    ran = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode == NO_PYTHON:
        raise RefusedError(f"{image} has no Python 3.10 or later", "Name its place in the image: --python PATH")
    lines = ran.stdout.splitlines()
    if ran.returncode or len(lines) < 2:
        raise RefusedError(f"{image} can't be run: {last_line(ran.stderr or ran.stdout)}")
    return {**container, "pythons": [{"path": lines[0], "answer": json.loads(lines[-1])}]}


def choose_runtime(path: str, srun_help: str, *, is_slurm: bool) -> str:
    """Return the program that runs an image; `path`: of an image in a file or folder. Raises RefusedError."""
    if "--container-image" in srun_help and (not path or path.endswith(".sqsh")):
        return PYXIS
    problem = "Docker is not installed"
    if not path and not is_slurm and shutil.which("docker"):
        try:
            answer_of_program("docker", "version", "--format={{.Server.Version}}", seconds=ANSWER_SECONDS)
        except RefusedError as error:
            problem = f"Docker can't be used: {error}"
        else:
            return "docker"
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
            answer_of_program(
                "docker",
                "pull",
                "--quiet",
                image,
                fix=f"If it is private, on the host: docker login {image.partition('/')[0]}",
            )
        facts = json.loads(answer_of_program(*look))
        return image if "@" in image else str([*facts["RepoDigests"], facts["Id"]][0])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", image.rpartition("/")[2])[:40]
    file = root / "images" / f"{name}-{hashlib.sha256(image.encode()).hexdigest()[:8]}.sif"
    file.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            fix = f"If it is private, on the host: {runtime} registry login docker://{image.partition('/')[0]}"
            answer_of_program(runtime, "pull", "--force", f"{file}.part", f"docker://{image}", fix=fix)
            Path(f"{file}.part").rename(file)
    return str(file)


def answer_of_program(*argv: str, fix: str = "", seconds: float | None = None) -> str:
    """Run a program for at most `seconds` and return its output. Raises RefusedError with its last line, and `fix`."""
    try:
        ran = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"{argv[0]} {argv[1]} does not answer") from error
    if ran.returncode:
        raise RefusedError(f"{argv[0]} {argv[1]}: {last_line(ran.stderr)}", fix)
    return ran.stdout


def last_line(text: str) -> str:
    """Return a program's last line, without colours."""
    lines = (line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    *_, last = [
        "no output",
        *(line for line in lines if line and not line.startswith(("See 'docker ", "Run 'docker "))),
    ]
    return re.sub(r"^((docker|FATAL|ERROR|Error response from daemon)\s*:\s*)+", "", last)


def is_in_container(job: Mapping[str, Any]) -> bool:
    """Return whether the processes of a job must be put into a container; Pyxis has done so itself."""
    return bool(job.get("container")) and job["container"]["runtime"] != PYXIS


def command_in_container(
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

    `variables`: what the processes get besides the image's own (`SET_VARIABLES`). `folder`: where they start; `places`:
    further folders that they see. `label`: what `remove_containers` finds it by. `stdin`: they read this program's.

    Raises RefusedError: a folder can't be seen in it.
    """
    home, runtime = str(Path.home()), container["runtime"]
    variables = {"HOME": home, "PYTHONNOUSERSITE": "1", **variables}  # the host's own packages are not the image's
    env = {f"LAUNCHENV_{name}": value for name, value in variables.items()} | {"LAUNCH_NAMES": " ".join(variables)}
    client = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "XDG_RUNTIME_DIR")}
    client |= {name: value for name, value in os.environ.items() if name.startswith(CLIENT_VARIABLES[runtime])}
    inside = [container["image"], "sh", "-c", SET_VARIABLES, *argv]
    if runtime in APPTAINER:
        words = [runtime, "--quiet", "exec", "--home", home, "--pwd", str(folder)]
        words += [f"--bind={source}:{target}" for source, target in binds_of(container, root, places)]
        return [*words, *["--nv"] * bool(gpus), *inside], {**env, **client}
    words = ["docker", "run", "--rm", "--network=host", "--ipc=host", f"--workdir={folder}", "--entrypoint="]
    if "rootless" in answer_of_program("docker", "info", "--format={{.SecurityOptions}}", seconds=ANSWER_SECONDS):
        words += ["--user=0:0"]  # which such an engine maps to the account
    else:
        words += [f"--user={os.getuid()}:{os.getgid()}", *(f"--group-add={group}" for group in os.getgroups())]
    for source, target in binds_of(container, root, places):
        words.append(f"--mount=type=bind,source={source},target={target}")
    words += [f"--env={name}" for name in env]
    words += ["--gpus=all"] * bool(gpus) + ["--interactive"] * stdin
    if Path("/dev/infiniband").is_dir():
        words += ["--device=/dev/infiniband", "--ulimit=memlock=-1"]  # RDMA pins memory
    if label:
        words += [f"--label={RUN_LABEL}={label}"]
        mark_of(root, label).parent.mkdir(parents=True, exist_ok=True)
        mark_of(root, label).touch()
    return [*words, *inside], {**env, **client}


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
    mounts = ",".join(f"{source}:{target}" for source, target in binds_of(container, root, [str(job["folder"])]))
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={root}"]


def binds_of(container: Mapping[str, Any], root: Path, places: Iterable[str]) -> list[tuple[str, str]]:
    """Return the folders that a container sees, each with its place there: the home folder, and those to which links in
    it may lead. Raises RefusedError: a path can't be told to a container."""
    home = str(Path.home())
    paths = [str(Path(place).expanduser()) for place in (home, str(root), *places)]
    folders = [os.path.realpath(path) for path in paths if path.startswith("/")]
    folders += [path for path in paths if path.startswith("/") and (path == home or not path.startswith(f"{home}/"))]
    if wrong := [folder for folder in folders if ":" in folder or "," in folder]:
        raise RefusedError(f"a container can't see {wrong[0]}: a colon or comma is in its name")
    binds = [(folder, folder) for folder in sorted({*folders})]
    pairs = (mount.partition(":") for mount in container["mounts"])
    return binds + [(source, target or source) for source, _, target in pairs]


def mark_of(root: Path, label: str) -> Path:
    """Return the file that exists from the start of a container in Docker until it is known to have gone."""
    return root / "containers" / label.replace("/", "-")


def remove_containers(root: Path, label: str, grace: float = contract.NOTICE_SECONDS) -> bool:
    """Remove what is left of the containers in Docker with a label, and return whether one still ran: its client may
    have been killed, or its engine restarted. `grace`: seconds in which its processes may save.

    Raises RefusedError: Docker does not answer for REMOVE_SECONDS, so that it may run on.
    """
    mark = mark_of(root, label)
    until, is_left, stop = time.monotonic() + REMOVE_SECONDS, False, ("stop", f"--time={grace:.0f}")
    while mark.exists():
        try:
            words = ("docker", "ps", "--all", "--quiet", f"--filter=label={RUN_LABEL}={label}")
            if ids := answer_of_program(*words, seconds=ANSWER_SECONDS).split():
                is_left = True
                answer_of_program("docker", *stop, *ids, seconds=ANSWER_SECONDS)
                stop = ("rm", "--force")
            else:
                mark.unlink(missing_ok=True)
        except RefusedError as error:
            if time.monotonic() > until:
                raise RefusedError(f"a container of the run may still run: {error}", "Start Docker there.") from error
            is_left = True
            time.sleep(1.0)
    return is_left
