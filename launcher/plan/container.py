"""What runs in the container: command, arguments and environment, the same on every service."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec.structs import replace

from launch_train.common import contract
from launcher.catalog import Gpu, Nccl
from launcher.plan.model import Chosen, Container, Shared
from launcher.spec.models import BUILTIN, JobSpec, Run

ENTRYPOINT = ("python", "-m", "launch_train.node")


def container(spec: JobSpec, chosen: Chosen, shared: Shared, nccl: Nccl | None) -> Container:
    """The container of each node. `nccl` is None where the machine's network needs no settings."""
    return Container(
        command=ENTRYPOINT,
        args=node_args(spec.run),
        env={
            # A user's train.py must not hide our package: Python then puts no script folder in front of the path.
            "PYTHONSAFEPATH": "1",
            contract.RUN: shared.run,
            **({contract.RUN_FOLDER: shared.run_folder} if shared.run_folder else {}),
            **({contract.CONFIG: as_json(spec.run.config)} if spec.run.config else {}),
            contract.PROCESSES: str(chosen.gpus),
            contract.RESTARTS: str(spec.limits.restarts),
            contract.HOURS: f"{shared.hours:g}",
            **({contract.MTBF: f"{shared.mtbf_hours:.4g}"} if shared.mtbf_hours else {}),
            contract.GPU: as_json(gpu_facts(chosen.gpu)),
            **({contract.PREFLIGHT: spec.run.preflight} if spec.run.preflight != "off" else {}),
            **({contract.HANG_AFTER: f"{spec.run.hang_after:g}"} if spec.run.hang_after else {}),
            **({contract.SECRETS: as_json(spec.secrets)} if spec.secrets else {}),
            **nccl_env(nccl),
            **spec.env,
        },
    )


def node_args(run: Run) -> tuple[str, ...]:
    """The arguments of `launch_train.node`: how to start, what to start, then what it gets."""
    launcher = ("--launcher", run.launcher) if run.launcher == "python" else ()
    if run.command:
        return ("--command", "--", *run.command, *run.args)
    what = ("--script", run.script) if run.script else ("--module", run.module or BUILTIN)
    return (*launcher, *what, *(("--", *run.args) if run.args else ()))


def gpu_facts(gpu: Gpu) -> dict[str, object]:
    """What the trainer needs to know of the GPU: train has no catalog of its own."""
    return {
        "name": gpu.name,
        "memory_gb": gpu.memory_gb,
        "min_driver": gpu.min_driver,
        "peak_tflops": dict(gpu.peak_tflops),
    }


def nccl_env(nccl: Nccl | None) -> dict[str, str]:
    """The machine's NCCL settings, its setup script and its plugin's folder."""
    if nccl is None:
        return {}
    return {
        **({contract.NCCL_SCRIPT: nccl.script} if nccl.script else {}),
        **({contract.LIBRARY_PATH: nccl.library_path} if nccl.library_path else {}),
        **nccl.env,
    }


def escaped(value: str) -> str:
    """`value` so that Vertex's `$(NAME)` expansion gives it back unchanged.

    Vertex expands as Kubernetes does: `$(NAME)` is replaced, `$$` is one `$`, any other `$` stays.
    """
    return re.sub(r"\$(?=[$(])", "$$", value)


def expand(text: str, env: Mapping[str, str]) -> str:
    """`text` as Kubernetes, and so Vertex AI, expands it.

    `$(NAME)` is replaced by its value and `$$` by `$`; an unknown name and any other `$` stay as they are.
    """

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def expanded(container: Container) -> Container:
    """The container with `$(NAME)` replaced in the way of Vertex AI, for services that don't do it themselves."""
    env: dict[str, str] = {}
    for name, value in container.env.items():
        env[name] = value if name == contract.CONFIG else expand(value, env)
    return replace(container, args=tuple(expand(word, env) for word in container.args), env=env)


def as_json(data: object) -> str:
    """Canonical JSON: the same data gives the same bytes."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
