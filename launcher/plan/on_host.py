"""Move the plan of a local run to a host that is reached by SSH. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from launch_train.common import contract
from launcher.errors import PlanRefused
from launcher.plan.binding import bound
from launcher.plan.build import replace_text
from launcher.plan.model import Attempt, Plan
from launcher.text import usd_text

ROOT: Final = "~/launch"
"""The folder on a host for everything that launch puts there; relative outputs are below it."""


def on_host(
    plan: Plan,
    host: str,
    output: str,
    *,
    code: str,
    python: str,
    container: Mapping[str, Any],
    packages: Mapping[str, Any],
    gpus: int,
    price: float | None,
    price_source: str = "--price",
    peers: Sequence[str] = (),
    is_colab: bool = False,
    usd_limit: float | None = None,
) -> Plan:
    """Return the plan of `launch local` for a host, as ssh knows it.

    `output` is where runs go there: gs://…, /…, ~/…, or relative to ROOT. `code` is the digest of the user's code,
    `python` the interpreter there (empty: one with the `packages`, which may be installed first), `container` the
    `image` and the `mounts` that the job runs in (empty: none). `gpus`: how many the
    job gets on each host, 0: it runs on processors. `peers`: the hosts of the job's other nodes. `price`: USD per hour
    and host; None: unknown; `price_source`: what sets it. `is_colab`: the host is a runtime of Google Colab.
    `usd_limit`: limits.usd.

    Raises PlanRefused: the run could cost more than the limit, or its price is unknown.
    """
    folder = output if output.startswith(("gs://", "/", "~/")) else f"{ROOT}/{output}"
    old, new = plan.run_folder or "", f"{folder.rstrip('/')}/{plan.run}"
    attempt = plan.attempts[0]
    job: dict[str, Any] = replace_text(attempt.request, old, new) if old else attempt.request
    pools = []
    for pool in job["jobSpec"]["workerPoolSpecs"]:
        program = pool["containerSpec"]
        env = [entry for entry in program["env"] if entry["name"] != contract.GPU]  # its GPUs are seen on arrival
        pools.append(
            {
                "machineSpec": {"acceleratorCount": gpus},
                "replicaCount": pool["replicaCount"],
                "containerSpec": {"command": program["command"], "args": program["args"], "env": env},
            }
        )
    labels = job["labels"]
    job = {"displayName": job["displayName"], "jobSpec": {**job["jobSpec"], "workerPoolSpecs": pools}}
    usd = None if price is None else price * plan.machine.nodes * plan.limits.hours
    if usd_limit is not None and usd is None:
        problem = "the price of the host is unknown, so limits.usd cannot be checked"
        hint = "Set it, in USD per hour and node: --price USD\nOr remove the limit: --set limits.usd=null"
        raise PlanRefused(problem, hint, field="limits.usd")
    if usd_limit is not None and usd is not None and usd > usd_limit:
        problem = f"this run could cost {usd_text(usd)}, more than limits.usd ({usd_text(usd_limit)})"
        raise PlanRefused(problem, "Lower --hours or --price, or raise --usd.", field="limits.usd")
    rule = "unknown: set --price, USD per hour" if price is None else f"set by {price_source}"
    moved = Attempt(
        region=", ".join((host, *peers)),
        zone=None,
        machine_type=host,
        provisioning="standard",
        usd_per_hour=price,
        usd_approx=False,
        usd_ceiling=price,
        usd_hard_bound=price,
        usd_rule=rule,
        usd_excludes=(),
        request={
            "host": host,
            **({"peers": [{"host": peer} for peer in peers]} if peers else {}),
            "labels": labels,
            "code": code,
            "python": python,
            **({"container": container} if container else {}),
            "packages": packages,
            "job": job,
        },
    )
    machine = replace(
        plan.machine, machine_type=host, gpu="GPU", gpus=gpus, gpu_memory_gb=None, vcpus=None, memory_gb=None
    )
    has_setup = plan.spec.get("image", {}).get("setup")
    not_run = [f"image.setup is not run on a host: {'; '.join(has_setup)}"] if has_setup else []
    run_folder = new if new.startswith("gs://") else f"ssh://{host}/{new.lstrip('/')}"
    return bound(
        replace(
            plan,
            target="on",
            project=host,
            run_folder=run_folder,
            machine=machine,
            image=replace(plan.image, uri="", builds_base=False) if plan.image else None,
            attempts=(moved,),
            limits=replace(plan.limits, usd_at_most=usd, usd_expected=None, usd_hard_bound=usd),
            warnings=(*plan.warnings, *not_run, *(about_colab(plan.run, run_folder) if is_colab else ())),
            spec=replace_text(plan.spec, old.rpartition("/")[0], folder) if old else plan.spec,
        )
    )


def about_colab(run: str, run_folder: str) -> Iterator[str]:
    """Yield what to know about a run on a Colab runtime."""
    yield (
        "Colab's FAQ does not allow SSH on runtimes without a positive balance of compute units; these may be ended at "
        "any time."
    )
    if not run_folder.startswith("gs://"):
        yield (
            "the run folder is lost when the Colab runtime ends, after 24 h at most. To keep it: output: gs://…, or "
            f"after the run's end: launch move {run}"
        )
