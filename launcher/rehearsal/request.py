"""A CustomJob's JSON read into what a rehearsal needs of it: checked once, here, and trusted from then on.

A request may be written by hand, so every value that a process gets is looked at. Field names are those of
google.cloud.aiplatform_v1.CustomJob; numbers may be text, as proto3 JSON writes 64-bit ones.
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

NODE_POOLS = 2
"""Pools 0 and 1 are nodes; 2 are reduction servers and 3 evaluators, whose images are not ours to rehearse."""
MOST = 1000
"""Replicas of a pool, GPUs of a replica: more is a slip of the hand."""

HINT = "It must be a CustomJob: {displayName, jobSpec: {workerPoolSpecs: …}}; in a plan that is attempts[0].request."

LIMITS_AND_PLACES = frozenset(
    {
        *(contract.RUN_FOLDER, contract.HOURS, contract.RESTARTS, contract.MTBF),
        *(contract.GPU, contract.NCCL_SCRIPT, contract.LIBRARY_PATH, contract.PREFLIGHT),
    }
)
"""Variables that change nothing of what is computed."""

Text = Annotated[str, Meta(pattern=r"^[^\0\ud800-\udfff]*$")]
"""What a process can be given: no argument or variable holds a NUL or half a character."""


class Read(Struct, frozen=True, kw_only=True, rename="camel"):
    """The base of what is read: unknown fields are Vertex AI's business and passed over."""


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
    """How many GPUs a replica has."""

    accelerator_count: Annotated[int, Meta(ge=0, le=MOST)] = 0


class Pool(Read, frozen=True, kw_only=True, rename="camel"):
    """A worker pool of nodes."""

    container_spec: Container
    machine_spec: MachineSpec = MachineSpec()
    replica_count: Annotated[int, Meta(ge=1, le=MOST)] = 1


class OtherPool(Read, frozen=True, kw_only=True, rename="camel"):
    """A worker pool that is not rehearsed, and may be empty."""

    container_spec: Container = Container()


class Output(Read, frozen=True, kw_only=True, rename="camel"):
    """baseOutputDirectory."""

    output_uri_prefix: Text = ""


class Job(Struct, frozen=True, kw_only=True):
    """A CustomJob as a rehearsal sees it. `raw` is its jobSpec as it stands, which CLUSTER_SPEC carries."""

    name: str
    pools: tuple[Pool, ...]
    base: str
    """baseOutputDirectory without a trailing slash; empty when the request has none."""
    raw: Mapping[str, Any]

    @property
    def run_folder(self) -> str | None:
        """Where the job writes, without a trailing slash; None when the request doesn't say."""
        env: dict[str, str] = {}
        for entry in self.pools[0].container_spec.env:
            env[entry.name] = expand(entry.value, env)
        return (env.get(contract.RUN_FOLDER) or self.base).rstrip("/") or None

    @property
    def is_builtin(self) -> bool:
        """Whether our own trainer runs, of which we know that it goes on from its checkpoints."""
        container = self.pools[0].container_spec
        words = (*container.command, *container.args)
        return any(pair in (("--module", "launch_train"), ("--module", "train")) for pair in pairwise(words))

    @property
    def images(self) -> tuple[str, ...]:
        """The images of all replicas, each once."""
        return tuple(sorted({pool.container_spec.image_uri for pool in self.pools}))


def fingerprint(job: Job, code: str) -> str:
    """Sixteen hex digits of what the job computes: commands, environment, replicas, and the digest of the user's code.

    As with a run's id, where it runs and its limits stay out. The package launch_train counts under its old name, so
    that a run folder from before is recognised.
    """
    old = re.compile(r"^launch_(?=train(\.|$))")
    pools = [
        [
            pool.replica_count,
            [old.sub("", word, count=1) for word in pool.container_spec.command],
            [old.sub("", word, count=1) for word in pool.container_spec.args],
            [(entry.name, entry.value) for entry in pool.container_spec.env if entry.name not in LIMITS_AND_PLACES],
        ]
        for pool in job.pools
    ]
    return hashlib.sha256(json.dumps([pools, code]).encode()).hexdigest()[:16]


def parsed(request: Mapping[str, Any]) -> Job:
    """The request, read.

    Raises:
        UsageError: it isn't a CustomJob with containers, or a value in it can't be taken; the field is named.
    """
    job = section(request, "jobSpec", dict, "jobSpec")
    pools = section(job, "workerPoolSpecs", list, "jobSpec.workerPoolSpecs")
    for number, pool in enumerate(pools):
        if number < NODE_POOLS and (not isinstance(pool, dict) or "containerSpec" not in pool):
            raise UsageError(f"worker pool {number} has no containerSpec", "launch rehearses containers only.")
    read(pools[NODE_POOLS:], tuple[OtherPool, ...], f"jobSpec.workerPoolSpecs[{NODE_POOLS}:]")
    output = read(job.get("baseOutputDirectory", {}), Output, "jobSpec.baseOutputDirectory")
    return Job(
        name=read(request.get("displayName", ""), str, "displayName"),
        pools=read(pools[:NODE_POOLS], tuple[Pool, ...], "jobSpec.workerPoolSpecs"),
        base=output.output_uri_prefix.rstrip("/"),
        raw=job,
    )


def rebased(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The same request (one that `parsed` has taken), writing below `folder` instead of where it says.

    Nothing else changes: an argument that holds the old place is the program's own business. A request that says no
    place gets one, below which Vertex AI's AIP_* folders lie.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parsed(request).name).strip(".-") or "run"

    def moved(place: str) -> str:
        return f"{folder}/{place.rstrip('/').rpartition('/')[2] or name}"

    job = request["jobSpec"]
    base = job.get("baseOutputDirectory", {})
    pools = [with_folder(pool, moved) for pool in job["workerPoolSpecs"]]
    output = {**base, "outputUriPrefix": moved(base.get("outputUriPrefix", ""))}
    return {**request, "jobSpec": {**job, "workerPoolSpecs": pools, "baseOutputDirectory": output}}


def with_folder(pool: dict[str, Any], moved: Callable[[str], str]) -> dict[str, Any]:
    """The pool with its run folder (the one variable that names it) moved."""
    container = pool.get("containerSpec", {})
    env = [
        {**entry, "value": escaped(moved(entry.get("value", "")))} if entry["name"] == contract.RUN_FOLDER else entry
        for entry in container.get("env", ())
    ]
    return {**pool, "containerSpec": {**container, "env": env}} if env else pool


def with_image(request: Mapping[str, Any], image: str) -> dict[str, Any]:
    """The same request (one that `parsed` has taken), each node in `image`, as a real launch fills it in."""

    def with_its(pool: dict[str, Any]) -> dict[str, Any]:
        return {**pool, "containerSpec": {**pool["containerSpec"], "imageUri": image}}

    job = request["jobSpec"]
    pools = job["workerPoolSpecs"]
    nodes = [with_its(pool) for pool in pools[:NODE_POOLS]]
    return {**request, "jobSpec": {**job, "workerPoolSpecs": [*nodes, *pools[NODE_POOLS:]]}}


def section(of: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A part that must be there and not be empty. Raises UsageError."""
    found = of.get(key)
    if not isinstance(found, kind) or not found:
        raise UsageError(f"the request has no {where}", HINT)
    return found


def read(value: Any, kind: Any, where: str) -> Any:
    """The value as `kind`. Raises UsageError, which names the field."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        raise UsageError(f"the request's {where}{at.rstrip('`')}: {in_words(what)}", HINT) from None


def in_words(what: str) -> str:
    """msgspec's complaint without its names of types: `Expected `int`, got `str`` -> `expected a whole number, …`."""
    if " matching regex " in what:
        return "not something that a process can be given (NUL, half a character, or a name with = in it)"
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    words |= {"array": "a list", "object": "an object", "null": "null"}
    named = re.sub(r"`(\w+)`", lambda match: words.get(match[1], match[0]), what)
    return named.replace("Expected ", "expected ").replace("Object missing required field", "misses")
