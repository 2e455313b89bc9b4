"""Parse the node's command line, and build the argument lists of what a node starts."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from launch_train.node.cluster import Cluster
from launch_train.node.control_store import GenerationSpec

TORCHRUN: Final = str(Path(__file__).with_name("torchrun_wrapper.py"))


@dataclass(frozen=True)
class Task:
    """A program to run. `kind` is module, script or command; a command has no `target`, and `args` is all of it."""

    launcher: str
    kind: str
    target: str
    args: tuple[str, ...]

    @property
    def is_trainer(self) -> bool:
        return self.kind == "module" and self.target.partition(".")[0] == "launch_train"


def parse_args(argv: Sequence[str]) -> Task:
    """Parse the node's command line; argparse exits with 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="launch_train.node", description="Run one machine's part of a run.", allow_abbrev=False
    )
    parser.add_argument(
        "--launcher",
        choices=("torchrun", "python"),
        default="torchrun",
        help="start one process per GPU, or a single one (default: torchrun)",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--module", metavar="M", help="run python -m M (default: launch_train)")
    target.add_argument("--script", metavar="S", help="run python S")
    target.add_argument("--command", action="store_true", help="run ARGS as a command line, once")
    parser.add_argument("args", nargs="*", metavar="ARGS", help="arguments of the program, after --")
    # What follows the first -- is the program's.
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:cut])
    args = (*options.args, *argv[cut + 1 :])
    if options.command:
        if not args:
            parser.error("--command needs a command after --")
        return Task("python", "command", "", args)
    if options.script:
        return Task(options.launcher, "script", options.script, args)
    return Task(options.launcher, "module", options.module or "launch_train", args)


def missing_target(task: Task, folder: Path, path: Sequence[str] = (), programs: str | None = None) -> str:
    """Return what the task needs and `folder` (the working directory) lacks, in one line; empty if nothing is
    missing. `path` are folders of modules besides it, `programs` is PATH."""
    if task.kind == "script" and not (folder / task.target).is_file():
        return f"{task.target}: no such file in {folder}"
    if task.kind == "command" and not shutil.which(task.args[0], path=programs):
        return f"{task.args[0]}: no such command"
    if task.kind == "module" and (absent := _missing_module(task.target, (str(folder), *path))):
        return f"{task.target}: no module {absent} in {folder}, and none is installed"
    return ""


def _missing_module(module: str, path: Sequence[str]) -> str:
    """Return the first part of a module's name that can't be found, without importing anything; "" if all are found."""
    parts = module.split(".")
    where: Sequence[str] | None = [*sys.path, *path]
    for count, part in enumerate(parts, start=1):
        if where is None:
            return f"{module} ({'.'.join(parts[: count - 1])} is not a package)"
        module_spec = PathFinder.find_spec(part, where) or (find_spec(part) if count == 1 else None)
        if module_spec is None:
            return ".".join(parts[:count])
        inside = module_spec.submodule_search_locations
        where = getattr(inside, "_path", inside)  # iterating a namespace path would import its parent
    return ""


def command_line(
    task: Task, cluster: Cluster, order: GenerationSpec, *, processes: int, run: str, grace: float
) -> list[str]:
    module = ["-m"] if task.kind == "module" else []
    if task.kind == "command":
        return [*task.args, *order.args]
    if task.launcher == "python":
        return [sys.executable, *module, task.target, *task.args, *order.args]
    # torchrun's parser would take --run of the task for its own --run-path: after -- it takes nothing.
    return [
        *_torchrun(cluster, order, processes, run, grace),
        *module,
        "--",
        task.target,
        *task.args,
        *order.args,
    ]


def _torchrun(cluster: Cluster, order: GenerationSpec, processes: int, run: str, grace: float) -> list[str]:
    """Return torchrun's arguments, with its own restarts disabled: in torch 2.13 they reuse a stale store and hang.

    https://github.com/pytorch/pytorch/issues/135712 and 167288
    """
    # -P: torchrun must not import a logging.py of the user's folder. Python 3.10 doesn't know it, and a script's own
    # folder, which has no such names, is all that it adds.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    argv = [sys.executable, *safe, TORCHRUN, f"--nproc-per-node={processes}", "--max-restarts=0"]
    argv += [f"--rdzv-id={run}-{order.attempt}-{order.generation}", f"--shutdown-timeout={max(1, round(grace))}"]
    if cluster.size == 1:  # torchrun picks a free port, without a race
        return [*argv, "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    # The static rendezvous keeps the ranks in the order of the nodes.
    return [
        *argv,
        f"--nnodes={cluster.size}",
        f"--node-rank={cluster.node}",
        f"--master-addr={cluster.host}",
        f"--master-port={order.port}",
    ]
