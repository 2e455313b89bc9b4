"""The environment of the processes that a node starts: variables for the generation, for frameworks, and for the
machine. Pure, except that it runs the image's NCCL script."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launch_train.common.errors import UnfitError
from launch_train.node.cluster import Cluster
from launch_train.node.command import Task
from launch_train.node.control_store import GenerationSpec
from launch_train.node.hang_detection import RECORDER

SITECUSTOMIZE: Final = str(Path(__file__).with_name("sitecustomize"))
"""A folder that contains only sitecustomize.py, which keeps the lines of processes whole."""


def project_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder with the metadata and programs of the code's projects, which need not exist."""
    return Path(environ.get(contract.PROJECT) or Path(__file__).parents[1] / contract.PROJECT_FOLDER)


def code_path(environ: Mapping[str, str], code: Path) -> tuple[str, ...]:
    """Return the folders from which the user's code is imported, in their order: those of the spec's PYTHONPATH, the
    code's own, those of its projects, and their metadata."""
    project = project_folder(environ)
    own = [folder for folder in environ.get(contract.PYTHON_PATH, "").split(":") if folder]
    named = project / "code.pth"
    roots = named.read_text(encoding="utf-8").splitlines() if named.is_file() else []
    folders = [code / folder for folder in (*own, ".", *roots)] + ([project] if project.is_dir() else [])
    return tuple(dict.fromkeys(map(str, folders)))


def program_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the programs of the code's projects first."""
    programs = project_folder(environ) / "bin"
    return os.pathsep.join(filter(None, (str(programs) if programs.is_dir() else "", environ.get("PATH"))))


def child_env(
    environ: Mapping[str, str], order: GenerationSpec, node: int, *, gpus: int, code: Path, folder: Path
) -> dict[str, str]:
    """Return the environment of the processes of one generation; `gpus` are visible on this node, `code` is the user's.

    `folder` has the files and folders that the node shares with them (see contract).
    """
    path, programs, watch = code_path(environ, code), program_path(environ), folder / "watch"
    return {
        **recorder_env(environ, watch),
        **environ,
        **({"PATH": programs} if programs else {}),
        **({contract.CODE_PATH: os.pathsep.join(path)} if path != (str(code),) else {}),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (SITECUSTOMIZE, environ.get("PYTHONPATH")))),
        contract.ATTEMPT: str(order.attempt),
        contract.GENERATION: str(order.generation),
        contract.NODE: str(node),
        contract.VISIBLE_GPUS: str(gpus),
        contract.CODE: str(code),
        contract.EXIT_FILE: str(folder / "exit"),
        contract.NOTICE: str(folder / "notice"),
        contract.WATCH: str(watch),
        contract.FAULTS: str(folder / "faults"),
    }


def recorder_env(environ: Mapping[str, str], watch: Path) -> dict[str, str]:
    """Return the variables by which NCCL's flight recorder writes a dump into the node's folder, on request
    (hang_detection.py) or at a timeout. A user's own settings are kept."""
    files = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if any(name in environ for name in (*files, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        return {}
    try:
        torch = tuple(int(part) for part in version("torch").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return {}
    # The pipe of older versions needs it; newer ones warn that it is deprecated.
    size = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"} if torch < (2, 13) else {}
    return {**dict.fromkeys(files, f"{watch}/{RECORDER}"), **size}


def with_run_path(task: Task, environ: Mapping[str, str]) -> tuple[Task, dict[str, str]]:
    """Return the task and the environment with the run folder's path (contract.RUN_PATH). Raises UnfitError: they use
    it, and the bucket is not mounted."""
    url, marker = environ.get(contract.RUN_FOLDER, ""), f"$({contract.RUN_PATH})"
    path = url.replace("gs://", "/gcs/", 1) if url.startswith("gs://") else url.removeprefix("file://")
    bucket = "/".join(path.split("/")[:3])
    if not path or (url.startswith("gs://") and not Path(bucket).is_dir()):
        if marker in " ".join((*task.args, *environ.values())):
            raise UnfitError(f"{contract.RUN_PATH}: {f'{bucket} is not mounted' if path else 'there is no run folder'}")
        return task, dict(environ)
    quoted = json.dumps(path)[1:-1]
    env = {
        name: value.replace(marker, quoted if name in (*contract.VERBATIM, contract.RESUME) else path)
        for name, value in environ.items()
    }
    args = tuple(word.replace(marker, path) for word in task.args)
    return replace(task, args=args), {**env, contract.RUN_PATH: path}


def framework_env(task: Task, cluster: Cluster, order: GenerationSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which TensorFlow and JAX find the nodes, for a program that is started once per node.

    TF_CONFIG is what tf.distribute.cluster_resolver.TFConfigClusterResolver reads: one worker per node, none for a
    single node. JAX_COORDINATOR_ADDRESS is read by jax.distributed.initialize (jax/_src/distributed.py); JAX has no
    names for the other two, which a script passes to it. Workers listen on the ports of CLUSTER_SPEC, which on node 0
    the control store has: worker 0 takes the generation's. A user's own coordinator is kept.
    """
    if task.launcher == "torchrun" or not all(cluster.nodes):
        return {}
    host = cluster.nodes[0].rpartition(":")[0] if cluster.size > 1 else "localhost"
    first = f"{host}:{order.port}"
    variables: dict[str, str] = {}
    if "JAX_COORDINATOR_ADDRESS" not in environ:
        variables["JAX_COORDINATOR_ADDRESS"] = first
        variables |= {"JAX_NUM_PROCESSES": str(cluster.size), "JAX_PROCESS_ID": str(cluster.node)}
    if cluster.size > 1:
        workers = [first, *cluster.nodes[1:]]
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": cluster.node}}
        variables["TF_CONFIG"] = json.dumps(config)
    return variables


def network_env(environ: Mapping[str, str], *, rehearsal: bool) -> tuple[dict[str, str], str]:
    """Return `environ` for this machine's network, and a line about it, or "".

    a3-mega, a4 and others need NCCL settings that a script in the image sets, and its libraries. In a rehearsal the
    settings for the cloud's network are removed.
    """
    if rehearsal:
        settings = [name for name in environ if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")]
        settings += [name for name in (contract.NCCL_SCRIPT, contract.LIBRARY_PATH) if name in environ]
        env = {name: value for name, value in environ.items() if name not in settings}
        return env, f"local run: ignored cloud network settings ({', '.join(settings)})" if settings else ""
    env, warning = _sourced(environ)
    if folders := environ.get(contract.LIBRARY_PATH):
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (folders, env.get("LD_LIBRARY_PATH"))))
    return env, warning


def _sourced(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    script = environ.get(contract.NCCL_SCRIPT, "")
    if not script or not Path(script).is_file():
        return dict(environ), ""
    shell = ["bash", "-c", 'source "$1" >&2 && exec env -0', "bash", script]
    try:
        result = subprocess.run(shell, env=dict(environ), capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict(environ), f"{script} could not be sourced ({error}): NCCL may be slow"
    if result.returncode:
        last = os.fsdecode(result.stderr).strip().rpartition("\n")[2]
        return dict(environ), f"{script} failed with code {result.returncode} ({last}): NCCL may be slow"
    pairs = (pair.partition("=") for pair in os.fsdecode(result.stdout).split("\0") if pair)
    shell_variables = {"_", "SHLVL", "PWD", "OLDPWD"}
    return {name: value for name, _, value in pairs if name not in shell_variables or name in environ}, ""
