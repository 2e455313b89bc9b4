"""Parse and validate a CustomJob's JSON for a local run.

A request may be written by hand, so every value that a process gets is validated. Field names are those of
google.cloud.aiplatform_v1.CustomJob; numbers may be strings, as proto3 JSON writes 64-bit ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from launch_train.common import contract
from launcher.errors import UsageError
from launcher.plan.container import escaped, expand
from launcher.spec.models import BUILTIN

NODE_POOLS = 2
"""Pools 0 and 1 are nodes. Pools 2 (reduction servers) and 3 (evaluators) run other images and are not started."""
MAX_COUNT = 1000
"""Upper bound for the replicas of a pool and the GPUs of a replica: more is a typing error."""

HINT = "It must be a CustomJob: {displayName, jobSpec: {workerPoolSpecs: …}}; in a plan that is attempts[0].request."

LIMITS_AND_PLACES = frozenset(
    {
        *(contract.RUN_FOLDER, contract.HOURS, contract.RESTARTS, contract.MTBF),
        *(contract.GPU, contract.NCCL_SCRIPT, contract.LIBRARY_PATH, contract.PREFLIGHT),
        *(contract.LOGGERS, contract.NOTIFY, contract.HANG_AFTER, contract.SCRIPT_METRICS, contract.RESUME),
    }
)
"""Variables that do not change what is computed."""

Text = Annotated[str, Meta(pattern=r"^[^\0\ud800-\udfff]*$")]
"""A valid argument or variable of a process: without NUL and lone surrogates."""


class Read(Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the parsed messages. Unknown fields are ignored: Vertex AI checks them."""


class Variable(Read, frozen=True, kw_only=True, rename="camel"):
    """One entry of `env`."""

    name: Annotated[str, Meta(pattern=r"^[^=\0\ud800-\udfff]+$")]
    value: Text = ""


class Container(Read, frozen=True, kw_only=True, rename="camel"):
    """A containerSpec."""

    image_uri: str = ""
    command: tuple[Text, ...] = ()
    args: tuple[Text, ...] = ()
    env: tuple[Variable, ...] = ()


class MachineSpec(Read, frozen=True, kw_only=True, rename="camel"):
    """A machineSpec."""

    accelerator_count: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0


class Pool(Read, frozen=True, kw_only=True, rename="camel"):
    """A worker pool of nodes."""

    container_spec: Container
    machine_spec: MachineSpec = MachineSpec()
    replica_count: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1


class OtherPool(Read, frozen=True, kw_only=True, rename="camel"):
    """A worker pool that is not started, and may be empty."""

    container_spec: Container = Container()


class Scheduling(Read, frozen=True, kw_only=True, rename="camel"):
    """scheduling."""

    disable_retries: bool = False


class Output(Read, frozen=True, kw_only=True, rename="camel"):
    """baseOutputDirectory."""

    output_uri_prefix: Text = ""


class ParsedJob(Struct, frozen=True, kw_only=True):
    """A parsed CustomJob. `raw` is its unchanged jobSpec, which CLUSTER_SPEC contains."""

    name: str
    pools: tuple[Pool, ...]
    base: str
    """baseOutputDirectory without a trailing slash; empty if the request has none."""
    raw: Mapping[str, Any]
    disable_retries: bool = False
    """No replica is restarted."""

    @property
    def run_folder(self) -> str | None:
        """Return the run folder without a trailing slash; None if the request has none."""
        env: dict[str, str] = {}
        for entry in self.pools[0].container_spec.env:
            env[entry.name] = expand(entry.value, env)
        return (env.get(contract.RUN_FOLDER) or self.base).rstrip("/") or None

    @property
    def is_builtin(self) -> bool:
        """Return whether the job runs the built-in trainer, which resumes from its checkpoints."""
        container = self.pools[0].container_spec
        words = (*container.command, *container.args)
        return ("--module", BUILTIN) in pairwise(words[: words.index("--")] if "--" in words else words)

    @property
    def uses_torch(self) -> bool:
        """Return whether launch's own processes need PyTorch: torchrun, or the store between several nodes."""
        container = self.pools[0].container_spec
        words = (*container.command, *container.args)
        words = words[: words.index("--")] if "--" in words else words
        is_single = "--command" in words or ("--launcher", "python") in pairwise(words)
        count = sum(pool.replica_count for pool in self.pools)
        return not words or (f"{BUILTIN}.node" in words and (not is_single or count > 1))

    @property
    def images(self) -> tuple[str, ...]:
        """Return the images of all replicas, each once."""
        return tuple(sorted({pool.container_spec.image_uri for pool in self.pools}))


def fingerprint(job: ParsedJob, code: str) -> str:
    """Return 16 hex digits that identify what the job computes: commands, environment, replicas, and the digest of the
    user's code.

    As in a run id, its location and limits don't count.
    """
    pools = []
    for pool in job.pools:
        container = pool.container_spec
        command = len(container.command)
        words = (*container.command, *container.args)
        env = [(entry.name, entry.value) for entry in container.env if entry.name not in LIMITS_AND_PLACES]
        pools.append([pool.replica_count, words[:command], words[command:], env])
    return hashlib.sha256(json.dumps([pools, code]).encode()).hexdigest()[:16]


def parse_request(request: Mapping[str, Any]) -> ParsedJob:
    """Parse a CustomJob.

    Raises UsageError: it is no CustomJob with containers, or has an invalid value. Names the field.
    """
    job = required_section(request, "jobSpec", dict, "jobSpec")
    pools = required_section(job, "workerPoolSpecs", list, "jobSpec.workerPoolSpecs")
    for number, pool in enumerate(pools):
        if number < NODE_POOLS and (not isinstance(pool, dict) or "containerSpec" not in pool):
            raise UsageError(f"worker pool {number} has no containerSpec", "Only jobs with containers can run locally.")
    read(pools[NODE_POOLS:], tuple[OtherPool, ...], f"jobSpec.workerPoolSpecs[{NODE_POOLS}:]")
    output = read(job.get("baseOutputDirectory", {}), Output, "jobSpec.baseOutputDirectory")
    return ParsedJob(
        name=read(request.get("displayName", ""), str, "displayName"),
        pools=read(pools[:NODE_POOLS], tuple[Pool, ...], "jobSpec.workerPoolSpecs"),
        base=output.output_uri_prefix.rstrip("/"),
        raw=job,
        disable_retries=read(job.get("scheduling", {}), Scheduling, "jobSpec.scheduling").disable_retries,
    )


def rebased(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return a valid request with its output below `folder`.

    Nothing else changes: arguments that contain the old folder stay as they are. A request without an output folder
    gets one, in which Vertex AI's AIP_* folders lie.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parse_request(request).name).strip(".-") or "run"

    def moved(place: str) -> str:
        return f"{folder}/{place.rstrip('/').rpartition('/')[2] or name}"

    job = request["jobSpec"]
    base = job.get("baseOutputDirectory", {})
    pools = [with_folder(pool, moved) for pool in job["workerPoolSpecs"]]
    output = {**base, "outputUriPrefix": moved(base.get("outputUriPrefix", ""))}
    return {**request, "jobSpec": {**job, "workerPoolSpecs": pools, "baseOutputDirectory": output}}


def with_folder(pool: dict[str, Any], moved: Callable[[str], str]) -> dict[str, Any]:
    """Return a pool with its run folder's variable moved."""
    container = pool.get("containerSpec", {})
    env = [
        {**entry, "value": escaped(moved(entry.get("value", "")))} if entry["name"] == contract.RUN_FOLDER else entry
        for entry in container.get("env", ())
    ]
    return {**pool, "containerSpec": {**container, "env": env}} if env else pool


def with_image(request: Mapping[str, Any], image: str) -> dict[str, Any]:
    """Return a valid request with every node's image set to `image`, as a launch in the cloud does."""
    job = request["jobSpec"]
    pools = job["workerPoolSpecs"]
    nodes = [{**pool, "containerSpec": {**pool["containerSpec"], "imageUri": image}} for pool in pools[:NODE_POOLS]]
    return {**request, "jobSpec": {**job, "workerPoolSpecs": [*nodes, *pools[NODE_POOLS:]]}}


def required_section(parent: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return a field that must exist and not be empty. Raises UsageError."""
    section = parent.get(key)
    if not isinstance(section, kind) or not section:
        raise UsageError(f"the request has no {where}", HINT)
    return section


def read(value: Any, kind: Any, where: str) -> Any:
    """Convert a value to `kind`. Raises UsageError, which names the field."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        raise UsageError(f"the request's {where}{at.rstrip('`')}: {explain(message)}", HINT) from None


def explain(message: str) -> str:
    """Return msgspec's message without its type names: `Expected `int`, got `str`` → `expected a whole number, …`."""
    if " matching regex " in message:
        return "invalid for a process (contains NUL or a lone surrogate, or a name with =)"
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    words |= {"array": "a list", "object": "an object", "null": "null"}
    text = re.sub(r"`(\w+)`", lambda match: words.get(match[1], match[0]), message)
    return text.replace("Expected ", "expected ").replace("Object missing required field", "missing field")
