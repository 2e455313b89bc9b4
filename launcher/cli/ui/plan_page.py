"""Print a plan: as a page, as JSON, or as the YAML file that gcloud takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import msgspec

from launch_train.common.config import parse
from launcher import catalog
from launcher.cli.options import Output
from launcher.cli.ui.text import LABEL, WIDTH, labelled, wrapped
from launcher.jobs.vm import of_instance
from launcher.plan.build import with_hidden_webhook
from launcher.plan.cost import billed_hours, ceiling_in_hours, hourly_ceiling
from launcher.plan.estimate import START_HOURS
from launcher.plan.image import BASE_TORCH, CONDA_TORCH
from launcher.plan.memory.fit import memory_line
from launcher.plan.placement import choose
from launcher.plan.vertex_request import gcloud_command
from launcher.plan.yaml_text import as_yaml
from launcher.spec.models import JobSpec, Mount, Notify
from launcher.text import either, exact_duration, hourly_price, plural, rough_duration, size_text, usd_text

if TYPE_CHECKING:
    from launcher.inputs.gather import AppliedSettings
    from launcher.inputs.interpreter import Interpreter
    from launcher.plan.model import Attempt, Image, Plan, Target

ATTEMPTS_SHOWN = 5
NO_IMAGE = "not used: runs in the local Python environment"
TARGETS = {"vertex": "Vertex AI", "vm": "Compute Engine", "local": "this machine", "on": "a host"}


def show_plan(
    plan: Plan,
    spec: JobSpec,
    output: Output,
    *,
    image: bool = False,
    settings: AppliedSettings | None = None,
    python: Interpreter | None = None,
    explain: bool = False,
) -> None:
    """Print the plan of a spec; `image`: the job runs in containers of the image (launch local --docker). `settings`
    have the fields that settings files have set, and their cap. `python` runs the job on this machine. `explain`: with
    formulas, bounds and all attempts."""
    plan = with_hidden_webhook(plan)
    if output is Output.json:
        print(json.dumps(msgspec.to_builtins(plan), indent=2, ensure_ascii=False))
    elif output is Output.yaml:
        print("\n".join(yaml_lines(plan)))
    else:
        print("\n".join(plan_lines(plan, spec, image, settings, python, explain=explain)))


# --- YAML for gcloud ------------------------------------------------------------------------------------------------


def yaml_lines(plan: Plan) -> Iterator[str]:
    """Yield the first attempt's request; for Vertex AI the CustomJobSpec, with the gcloud command as a comment."""
    first = plan.attempts[0]
    if plan.target != "vertex":
        method = "bulkInsert" if "instanceProperties" in first.request else "insert"
        comments = {
            "vm": f"# The body of instances.{method}.",
            "local": "# The CustomJob that launch local runs.",
            "on": f"# What launch_train.host {'queues' if plan.is_slurm else 'starts'} on {plan.project}. "
            "launch local --request runs it here.",
        }
        yield comments[plan.target]
        yield as_yaml(first.request)
        return
    yield f"# {plan.run}: attempt 1 of {len(plan.attempts)}, {first.provisioning} in {first.region}."
    yield f"# To submit it, save this as {plan.run}.vertex.yaml, push the image (launch push) and run:"
    file = f"{plan.run}.vertex.yaml"  # not job.yaml, which may be the spec
    command = gcloud_command(first.request, project=plan.project, region=first.region, config=file)
    head, *flags = [" ".join(command[:4]), *command[4:]]
    for line in (head, *(f"  {shlex.quote(flag)}" for flag in flags[:-1])):
        yield f"# {line} \\"
    yield f"#   {flags[-1]}"
    yield as_yaml(first.request["jobSpec"])


# --- The page --------------------------------------------------------------------------------------------------------


def plan_lines(
    plan: Plan,
    spec: JobSpec,
    image: bool = False,
    settings: AppliedSettings | None = None,
    python: Interpreter | None = None,
    *,
    explain: bool = False,
) -> Iterator[str]:
    """Yield the page of a plan, in at most 80 columns."""
    where = f"the Slurm cluster of {plan.project}" if plan.is_slurm else target_text(plan.target, plan.project)
    where = f"{plan.attempts[0].region}, by SSH" if plan.target == "on" and not plan.is_slurm else where
    yield from wrapped(f"{plan.run}  on {where}", WIDTH)
    yield ""
    for label, text in plan_facts(plan, spec, image, settings.usd_cap if settings else None, explain=explain):
        yield from labelled(label, text)
        if label == "image" and python and (python.origin != "launch's own" or python.note):
            yield from labelled("python", python.text)
    for number, origin in enumerate(settings.origins if settings else ()):
        yield from labelled("" if number else "settings", f"{origin.field}: {origin.where}")
    if plan.target in ("vertex", "vm"):
        yield ""
        yield from attempt_table(plan, len(plan.attempts) if explain else ATTEMPTS_SHOWN)
    notes = [python.note] if python and python.note else []
    if python and python.error:
        notes.append(". ".join(filter(None, (python.error.problem, python.error.hint))))
    more = "" if explain else " --explain shows all attempts, limits and sources."
    yield from closing_lines([*notes, *plan.warnings], plan.target, more)


def target_text(target: Target, project: str) -> str:
    """Return `Vertex AI, project my-project`."""
    if target == "on":
        return f"{project}, by SSH"
    return TARGETS[target] + ("" if target == "local" else f", project {project}")


def closing_lines(warnings: Iterable[str], target: Target, more: str = "") -> Iterator[str]:
    """Yield the warnings, and that nothing was submitted; `more`: how to see more."""
    for warning in warnings:
        yield ""
        yield from labelled("warning", warning)
    yield ""
    yield f"Nothing was submitted.{more}" if target in ("vertex", "vm") else "Nothing was started."


def plan_facts(
    plan: Plan, spec: JobSpec, image: bool, usd_cap: tuple[float, str] | None = None, *, explain: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts above the table of attempts."""
    is_cloud = plan.target in ("vertex", "vm")
    yield from beside("machine", machine_lines(plan, explain))
    if is_cloud and plan.command:
        if plan.machine.gpu_memory_gb:
            yield from beside("memory", memory_lines(plan, spec, explain))
        yield from beside("time", time_lines(plan, explain))
    if is_cloud:
        yield from beside("cost", cost_lines(plan, usd_cap, explain))
    elif plan.target == "on":
        usd, hours = (
            plan.limits.usd_at_most,
            f"{plan.limits.hours:g} h, after which {'launch' if plan.is_slurm else 'the host'} ends the job",
        )
        most = "unknown (--price); at most" if usd is None else f"at most {usd_text(usd)} in"
        yield "cost", f"{most} {hours}"
    yield from beside("image", image_lines(plan, is_cloud or image, explain))
    if plan.image and (is_cloud or image):
        yield from beside("setup", setup_lines(plan.spec, plan.image))
    if plan.image and plan.image.files:
        copied = (
            "" if is_cloud or image else "; each start gets a copy" + " (without --in-place)" * (plan.target == "local")
        )
        yield "code", code_text(plan.image) + copied
    if plan.command:
        config = plan.spec.get("run", {}).get("config")
        if explain or not is_cloud or not config:
            yield "command", shlex.join(plan.command)
        if config:
            yield "config", flow(config)
        yield "output", plan.run_folder or "none"
    if is_cloud:
        yield from beside("mounts", mount_lines(plan) if plan.command else ())
        yield from account_facts(plan, explain)


def memory_lines(plan: Plan, spec: JobSpec, explain: bool) -> Iterator[str]:
    """Yield the memory that the run needs on each machine type. It is not part of the plan, whose digest is in the
    requests."""
    machines = choose(spec, catalog.load(), plan.target)
    lines = {chosen.name: memory_line(spec, chosen, brief=not explain) for chosen in machines}
    of_gpu = {machine.gpu: lines[machine.machine_type] for machine in plan.machines}
    texts = {*of_gpu.values()}
    yield from texts if len(texts) == 1 else (f"{gpu}: {line}" for gpu, line in of_gpu.items())


def beside(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield texts with one label, which stands beside the first."""
    yield from zip(chain([label], repeat("")), texts, strict=False)


def image_lines(plan: Plan, used: bool, explain: bool) -> Iterator[str]:
    """Yield the container image and its PyTorch, or the boot image of a VM to work on."""
    image = plan.image
    if image is None:
        if plan.target == "vm":
            yield str(plan.attempts[0].request["disks"][0]["initializeParams"]["sourceImage"]).rpartition("/")[2]
    elif not used:
        request = plan.attempts[0].request if plan.target == "on" else {"packages": {}}
        container = request.get("container")
        lacked = f"packages that {'it' if container else 'the host'} lacks are installed there, once"
        if container:
            yield from (container["image"], lacked if request["packages"] else "its Python runs the job")
        else:
            on_host = f"not used: {lacked if request['packages'] else 'runs in a Python of the host'}"
            yield NO_IMAGE if plan.target == "local" else on_host
    else:
        tag = f"tag: content hash; {image.platform}, " if explain else ""
        whose = {BASE_TORCH: "the base image's PyTorch", CONDA_TORCH: "PyTorch as conda chooses"}
        torch = whose.get(image.wheel, image.wheel)
        if image.torch:
            torch = f"torch {image.torch.version}+{image.torch.build}"
        how = "(custom image, pinned by digest)" if image.pinned else f"({tag}{torch})"
        yield from [f"{image.uri} {how}"] if len(image.uri) + len(how) < WIDTH - LABEL else [image.uri, how]


def account_facts(plan: Plan, explain: bool) -> Iterator[tuple[str, str]]:
    """Yield the account of the job or the VM, its secrets, limits and notifications."""
    if explain:
        yield "account", account_text(plan)
    if secrets := plan.spec.get("secrets"):
        yield "secrets", f"{', '.join(secrets)}: read on the machine by {account_text(plan)}"
    if explain or not plan.command:
        yield "limits", limits_text(plan)
    if notify := plan.spec.get("notify"):  # the webhook's URL is a secret
        wanted = msgspec.convert(notify, Notify)
        form = " as Slack text" if wanted.format == "slack" else ""
        yield "notify", f"{', '.join(wanted.on)}: sent to the webhook{form}"


def setup_lines(spec: dict[str, Any], image: Image) -> Iterator[str]:
    """Yield the lines of image.setup, and what can build an image with them."""
    yield from (lines := spec.get("image", {}).get("setup", ()))
    if lines:
        builder = "a Docker engine" if image.build_secrets or image.builds_base else "a Docker engine or Cloud Build"
        yield f"(needs {builder} to build the dependency image, once)"


def time_lines(plan: Plan, explain: bool) -> Iterator[str]:
    """Yield how long the run takes and how that is known, and how long it may wait for a machine."""
    limits = plan.limits
    if limits.hours_expected is None:
        yield f"duration unknown: {limits.hours_basis}; stops after {limits.hours:g} h"
    else:
        start, training = 3600 * START_HOURS, 3600 * limits.hours_expected
        steps = f"{parse(plan.spec.get('run', {}).get('config', {})).steps:,} steps"
        total = rough_duration(start + training)
        yield f"about {total}: {rough_duration(start)} to start (assumed), {rough_duration(training)} for {steps}"
        yield limits.hours_basis
    if limits.wait_at_most_seconds:
        longest = exact_duration(limits.wait_at_most_seconds)
        yield f"plus the wait for a machine, unbilled: at most {longest} in {plural(len(plan.attempts), 'attempt')}"
    if explain:
        waits = {attempt.provisioning.partition(":")[0]: attempt.wait_seconds for attempt in plan.attempts}
        each = ", ".join(f"{kind} {exact_duration(wait)}" for kind, wait in waits.items() if wait)
        yield f"({each} per attempt; {'' if limits.wait_total_seconds else 'no '}limits.wait_total)"


def mount_lines(plan: Plan) -> Iterator[str]:
    """Yield what is mounted at each folder of the container, and what happens to it after the job."""
    for mount in (msgspec.convert(mount, Mount) for mount in plan.spec.get("mounts", ())):
        name = f"gs://{mount.bucket}" if mount.bucket else mount.source
        end = ", deleted with its VM" if mount.new_disk_gb else ", read-only" if mount.read_only else ""
        yield f"{mount.folder}: {name}{end}"


def flow(data: Any) -> str:
    """Return `{a: 1, b: {c: x}}` on one line, for people."""
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key}: {flow(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(flow, data)) + "]"
    return data if isinstance(data, str) else json.dumps(data)


def account_text(plan: Plan) -> str:
    """Return the service account of the job or the VM."""
    first = plan.attempts[0].request
    if plan.target == "vm":
        return str(first.get("instanceProperties", first)["serviceAccounts"][0]["email"])
    return str(first["jobSpec"].get("serviceAccount", "Custom Code Service Agent (Vertex AI's default)"))


def machine_lines(plan: Plan, explain: bool) -> Iterator[str]:
    """Yield `1 × a3-highgpu-2g: 2 × NVIDIA H100 80GB, 52 vCPUs, 468 GB`, with the total GPUs of several nodes; to
    `explain` for each of several machine types, else a line with all of them."""
    if plan.is_slurm:
        _, *lines = str(plan.attempts[0].request["script"]).splitlines()
        options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
        partition = f", partition {options['partition']}" if "partition" in options else ""
        name = options.get("gpus-per-node", "").rpartition(":")[0]
        gpus = f"with {plural(plan.machine.gpus, 'GPU')}" + (f" ({name})" if name else "")
        gpus += " each" if plan.machine.nodes > 1 else ""
        yield f"{plural(plan.machine.nodes, 'node')} {gpus if plan.machine.gpus else 'without GPUs'}{partition}"
        yield f"time limit {rough_duration(int(options['time']) * 60)} for each Slurm job"
        return
    if plan.target == "on":
        each = " each" if plan.machine.nodes > 1 else ""
        free = f"{plural(plan.machine.gpus, 'free GPU')}{each}; checked on arrival"
        uses = free if plan.machine.gpus else "runs on the CPUs"
        yield f"{plan.attempts[0].region}: {uses}"
        return
    if plan.target == "local":
        machine = plan.machine
        nodes, each = ("1 node", "") if machine.nodes == 1 else (f"{machine.nodes} nodes", " each")
        here = f"{nodes} with {plural(machine.gpus, 'process')}{each}"
        yield f"{here}, instead of {machine.machine_type} ({machine.gpus} × {machine.gpu})"
        return
    if len(plan.machines) > 1 and not explain:
        named = either(f"{shape.machine_type} ({shape.gpu.removeprefix('NVIDIA ')})" for shape in plan.machines)
        yield f"{plan.machine.nodes} × {named}, {plural(plan.machine.gpus, 'GPU')} each"
        return
    for machine in plan.machines:
        parts = [f"{machine.gpus} × {machine.gpu}"]
        if machine.vcpus:
            parts.append(f"{machine.vcpus} vCPUs")
        if machine.memory_gb:
            parts.append(f"{machine.memory_gb:g} GB")
        total = f"; {machine.nodes * machine.gpus} GPUs in total" if machine.nodes > 1 else ""
        yield f"{machine.nodes} × {machine.machine_type}: {', '.join(parts)}{total}"


def code_text(image: Image) -> str:
    """Return the number and size of the user's code files: `12 files, 13 kB`."""
    return f"{plural(image.files, 'file')}, {size_text(image.size)}"


def limits_text(plan: Plan) -> str:
    """Return the limits of time and restarts, and when a VM to work on ends itself before its time limit."""
    limits = plan.limits
    parts = [f"{limits.hours:g} h of billed time"]
    if plan.command:
        parts.append(f"{limits.restarts} restarts without progress")
    parameters = of_instance(plan.attempts[0].request, plan.project).parameters if plan.target == "vm" else {}
    how = "deletes itself" if parameters.get("on_stop") == "delete" else "stops itself"
    known = {"after": parameters.get("lease_seconds"), "when idle for": parameters.get("idle_stop_seconds")}
    if ends := [f"{when} {exact_duration(seconds)}" for when, seconds in known.items() if seconds]:
        parts.append(f"{how} {' or '.join(ends)}")
    return ", ".join(parts)


def cap_text(limit: float | None, of_settings: tuple[float, str] | None) -> str:
    """Return the cap on the cost: the lower one of limits.usd and that of the settings files, with its place."""
    if of_settings and (limit is None or of_settings[0] < limit):
        return f"cost limit {usd_text(of_settings[0])} ({of_settings[1]})"
    return f"cost limit {usd_text(limit)}" if limit is not None else "no cost limit (--usd sets one)"


def cost_lines(plan: Plan, usd_cap: tuple[float, str] | None, explain: bool) -> Iterator[str]:
    """Yield the expected cost, and the upper bound that the cap is compared with; to `explain` them also the hard
    bound, and what they cover."""
    limits, first, nodes = plan.limits, plan.attempts[0], plan.machine.nodes
    cap = cap_text(limits.usd, usd_cap)
    hourly = expected_price(first) + (f" × {plural(nodes, 'node')}" if nodes > 1 else "")
    place = f"{first.provisioning.partition(':')[0]} in {first.where}"
    if limits.usd_expected is not None:
        yield f"{usd_text(limits.usd_expected, approx=True)} with {place}, {hourly}"
    else:
        yield f"{hourly} with {place}"
    if limits.usd_at_most is None:
        yield f"upper bound unknown: some attempts have no known price; {cap}"
        return
    there = hourly_ceiling(first) * billed_hours(first, limits.hours) * nodes
    most = max(plan.attempts, key=lambda attempt: hourly_ceiling(attempt) * billed_hours(attempt, limits.hours))
    is_dearest = limits.usd_at_most - there < 0.005  # the sums may differ in their last bit
    where = [most.where]
    where += [most.provisioning.partition(":")[0]] if most.provisioning != first.provisioning else []
    where += [most.machine_type] if most.machine_type != first.machine_type else []
    dearest = "" if is_dearest else f", {usd_text(limits.usd_at_most)} in {', '.join(where)}"
    yield f"in {limits.hours:g} h at most {usd_text(there)} there{dearest}"
    yield cap + (f"; prices of {plan.prices.date}" if plan.prices else "")
    if not explain:
        return
    by = ceiling_in_hours(most, nodes, limits.hours)
    yield f"{usd_text(limits.usd_at_most)} = {by}; price ceiling: {most.usd_ceiling_rule}"
    if limits.usd_hard_bound is not None and limits.usd_hard_bound > limits.usd_at_most:
        restarts = max(attempt.service_restarts for attempt in plan.attempts)
        again = f"if Vertex AI restarts the job {restarts} times, each with its own {limits.hours:g} h"
        yield f"{usd_text(limits.usd_hard_bound)} hard bound: {again if restarts else 'every hour at list price'}"
    inside = dict.fromkeys(item for attempt in plan.attempts for item in attempt.usd_extras)
    outside = dict.fromkeys(item for attempt in plan.attempts for item in attempt.usd_excludes)
    yield f"including {', '.join(inside) or 'only the machines'}; excluding {', '.join(outside)}"
    if plan.prices:
        yield f"the price table {'came with launch' if plan.prices.shipped else 'was fetched'}"


def attempt_table(plan: Plan, most: int) -> Iterator[str]:
    """Yield the first attempts, in fallback order."""
    shown = plan.attempts[:most]
    shown_of = f", {len(shown)} of {len(plan.attempts)}" if len(plan.attempts) > len(shown) else ""
    per_node = ", prices per node" if plan.machine.nodes > 1 else ""
    yield f"fallback order (next on refusal or timeout){shown_of}{per_node}:"
    width = max(len(attempt.provisioning.partition(":")[0]) for attempt in shown)
    place = max(24, *(len(attempt.where) for attempt in shown))
    several = len(plan.machines) > 1
    types = max(len(attempt.machine_type) for attempt in shown)
    for number, attempt in enumerate(shown, 1):
        kind = attempt.provisioning.partition(":")[0]
        price = f"{attempt.machine_type:<{types}}  {expected_price(attempt)}" if several else attempt_price(attempt)
        yield f"{number:>{LABEL - 1}}  {kind:<{width}}  {attempt.where:<{place}}  {price}"


def attempt_price(attempt: Attempt) -> str:
    """Return the expected price of a node and hour, and its ceiling if that is higher."""
    price = expected_price(attempt)
    if attempt.usd_per_hour is None or attempt.usd_ceiling is None or attempt.usd_ceiling <= attempt.usd_per_hour:
        return price
    return f"{price:<12} at most {hourly_price(attempt.usd_ceiling)}"


def expected_price(attempt: Attempt) -> str:
    """Return the expected price of a node and hour."""
    known, highest = attempt.usd_per_hour, attempt.usd_ceiling
    return hourly_price(known, highest, approx=attempt.usd_approx, bound=attempt.usd_is_bound)
