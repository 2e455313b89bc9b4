"""The steps of the selftest: the resources that each creates, its prerequisites and its check.

`items` lists what the steps create and may cost, `run_steps` runs them in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher import catalog
from launcher.catalog.sku_prices import Rates, machine_price
from launcher.errors import LaunchError, NoCapacity, PlanRefused
from launcher.gcp.price_list import PriceList
from launcher.jobs.job import RUN_LABEL
from launcher.jobs.vm import DOWN
from launcher.selftest.cleanup import ONCE, clean, storage_client
from launcher.selftest.kit import CPU, GPU, LABEL, SMALL, Kit, NotTried, Ran, checked, expect
from launcher.text import usd_text

STEPS: Final = 20
"""Training steps of the short runs."""
AT_ONCE: Final = 3
BEFORE: Final = 40
"""Training steps after which the run is cancelled, to be resumed."""
JOIN: Final = 0.25
"""Largest relative difference between the mean losses of ten steps before and after a resume."""
MEAN: Final = 10
NODE_SECONDS, LOG_SECONDS, STOP_SECONDS, GONE_SECONDS = 2400.0, 300.0, 900.0, 300.0
"""Time limits in seconds: for a job's first steps, its log lines, a VM's stop and a VM's deletion."""


class Step(NamedTuple):
    """One step. `command` and `spec` are the billed part: a launch command that gets the spec's file."""

    name: str
    group: str
    """The group's name in --only. Empty: the step always runs."""
    target: str
    check: Callable[[Kit], str]
    """Returns the finding. Raises NoCapacity; LaunchError, or anything else: the step failed."""
    needs: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    spec: Mapping[str, Any] = {}


class Item(NamedTuple):
    """One resource, and the upper bound on its cost. None: negligible."""

    kind: str
    name: str
    usd: float | None = None


class Outcome(NamedTuple):
    """The result of a step. `ok` is None if it could not be tried: no capacity, or a prerequisite failed."""

    name: str
    ok: bool | None
    target: str
    seconds: float
    why: str = ""
    found: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return it in the format of benchmarks/results/selftest-DATE.json."""
        return {**self._asdict(), "seconds": round(self.seconds, 1)}


# --- The project ------------------------------------------------------------------------------------------------------


def access(kit: Kit) -> str:
    """Check with `launch doctor` that the APIs are enabled and the permissions granted, for Vertex AI and for VMs."""
    checks = [*project_checks(kit, "vertex"), *project_checks(kit, "vm")]
    problems = [f"{check['name']}: {check['text']}" for check in checks if check["status"] == "failed"]
    expect(not problems, "; ".join(dict.fromkeys(problems)))
    unread = dict.fromkeys(check["name"] for check in checks if check["status"] == "unknown")
    return f"{len(checks)} checks" + (f"; not checked: {', '.join(unread)}" if unread else "")


def project_checks(kit: Kit, target: str) -> list[dict[str, Any]]:
    """Return what `launch doctor` says of the project itself; the selftest has its own bucket and repository."""
    ran = kit.launch("doctor", "--only", "project", "--for", target, "--region", kit.region, "-o", "json")
    names = ("credentials", "project", "billing", "apis", "permissions")
    return [check for check in ran.data["project"] if check["name"] in names]


def tables(kit: Kit) -> str:
    """Check with `--preflight` that the region has the catalog's machine type, quota and boot image of an L4."""
    ran = kit.launch(*argv(kit, "vm"), "--preflight", "-o", "json")
    checks = [check for check in ran.data.get("checks", ()) if check["name"] == "vm"]
    wrong = [check["text"] for check in checks if check["status"] in ("failed", "unknown")]
    expect(not wrong and ran.code in (0, NoCapacity.exit_code), "; ".join(wrong) or ran.problem)
    return "quotas, machine types, zones, image family"


SHARE: Final = 0.02
"""Largest relative error of the shipped price. Spot prices change up to once a day, so they are only reported."""


def prices(kit: Kit) -> str:
    """Check that the machine costs what the catalog says.

    Raises NotTried: the price list can't be read; LaunchError.
    """
    known, rates = catalog.load(), Rates()
    machine = known.find(GPU, None, None, "compute")
    try:
        for sku in PriceList(kit.project, kit.environ, kit.clock).skus():
            rates.add(sku)
    except LaunchError as error:
        raise NotTried(error.problem) from error
    texts = []
    for model, kind in (("standard", "list"), ("spot", "spot")):
        price = machine_price(machine, kit.region, rates, kind)
        if price is None:
            raise LaunchError(f"Google's list has no {model} price of {machine.name} in {kit.region}")
        usd, shipped = price[0], known.price(machine, "compute", model, kit.region).usd
        wrong = shipped is None or abs(shipped - usd) > SHARE * usd
        text = f"{model} ${usd:.4f}/h" + (f", shipped ${shipped}" if wrong else "")
        expect(not wrong or model == "spot", f"{machine.name} in {kit.region}: {text}")
        texts.append(text)
    return "; ".join(texts)


# --- The bucket -------------------------------------------------------------------------------------------------------


def bucket(kit: Kit) -> str:
    """Create the selftest's bucket."""
    with storage_client(kit.project) as client:
        resource = client.bucket(kit.prefix)
        resource.labels = {LABEL: kit.id}
        resource.iam_configuration.uniform_bucket_level_access_enabled = True
        resource.soft_delete_policy.retention_duration_seconds = 0
        client.create_bucket(resource, project=kit.project, location=kit.region, **ONCE)
    return kit.bucket


# --- The image --------------------------------------------------------------------------------------------------------


def build(kit: Kit) -> str:
    """Build the dependency image with Cloud Build, and append the code."""
    code(kit).write_text("1\n")
    if not kit.repository:
        from launcher.images import artifact_registry

        artifact_registry.create(kit.images, kit.environ, kit.clock, {LABEL: kit.id})
    image = kit.must("push", spec(kit, "build"), "--builder", "cloud-build", "-o", "json").data
    states = [build.status.name for build in kit.builds(kit.prefix)]
    expect(states == ["SUCCESS"], f"Cloud Build lists {states or 'no build'}, not one that succeeded")
    expect(image["how"] == "appended", f"the image was {image['how']}, not appended to what Cloud Build made")
    kit.notes["image"] = image["reference"]
    return str(image["dependencies"]).rpartition(":")[2]


def append(kit: Kit) -> str:
    """Append an edit of the code, using only the registry."""
    code(kit).write_text("2\n")
    image = kit.must("push", spec(kit, "build"), "--builder", "append", "-o", "json").data
    expect(image["how"] == "appended", f"the image was {image['how']}, not appended")
    expect(image["reference"] != kit.notes["image"], "the edited code has the same image")
    return f"{image['sent']:,} bytes sent"


def code(kit: Kit) -> Path:
    """Return the one file of the code."""
    folder = kit.folder / "code"
    folder.mkdir(exist_ok=True)
    return folder / "edit.txt"


# --- Vertex AI --------------------------------------------------------------------------------------------------------


def cpu(kit: Kit) -> str:
    """Run a job without GPUs, from its submission to its metrics."""
    kit.notes["run"] = kit.name("cpu")
    ended = kit.must(*argv(kit, "cpu"), "-o", "json").data
    kit.notes["run"] = ended["run"]
    return trained(kit, ended)


def logs(kit: Kit) -> str:
    """Read the job's lines from Cloud Logging, and its state with `launch status`."""
    run = kit.notes["run"]
    printed: list[dict[str, Any]] = []

    def is_complete() -> bool:
        printed[:] = [json.loads(line) for line in kit.must("logs", run, "-o", "json").out.splitlines()]
        return any(re.search(rf"step +{STEPS}/{STEPS}\b", line["text"]) for line in printed)

    seen = kit.wait(LOG_SECONDS, is_complete)
    expect(seen, f"the line of step {STEPS} isn't among the {len(printed)} lines of launch logs")
    replicas = {line["replica"] for line in printed}
    expect("workerpool0-0" in replicas, f"the lines are of {sorted(replicas)}, none of workerpool0-0")
    shown = kit.must("status", run, "-o", "json").data
    expect(shown["state"] == "SUCCEEDED", f"launch status says {shown['state']}")
    return f"{len(printed)} lines"


def once(kit: Kit) -> str:
    """Submit the same job three times at once and check that only one job is created."""
    running = [kit.start(*argv(kit, "once"), "--detach", "-o", "json") for _ in range(AT_ONCE)]
    try:
        ended = [(process, *process.communicate()) for process in running]
    finally:
        for process in running:
            process.kill()
    begun = [checked(Ran(("vertex",), process.returncode, out, err)).data for process, out, err in ended]
    run = begun[0]["run"]
    names = {job["job"] for job in begun}
    there = kit.vertex.find(f'labels.{RUN_LABEL}="{run}"', [kit.region]).jobs
    kit.must("cancel", run, "--region", kit.region)
    expect(len(names) == len(there) == 1, f"{AT_ONCE} submissions name {len(names)} jobs, and {len(there)} exist")
    return f"{AT_ONCE} submissions, 1 job"


def preempt(kit: Kit) -> str:
    """Cancel a run midway and resume it. It must continue from its checkpoint."""
    run = kit.must(*argv(kit, "preempt"), "--detach", "-o", "json").data["run"]
    reached: list[int] = [0]

    def is_under_way() -> bool:
        shown = kit.must("status", run, "-o", "json").data
        expect(shown["state"] not in ("FAILED", "SUCCEEDED"), f"the job was {shown['state']} before it was cancelled")
        reached[0] = (shown["progress"] or {}).get("step", 0)
        return reached[0] >= BEFORE

    expect(kit.wait(NODE_SECONDS, is_under_way), f"the job reached step {reached[0]} in {NODE_SECONDS:.0f} s")
    kit.must("cancel", run, "--region", kit.region)
    ended = kit.must("vertex", "--resume", run, "-o", "json").data
    result = trained(kit, ended, kit.long_run["steps"])
    shown = kit.must("metrics", ended["output"], "-o", "json").data
    at = next((event["step"] for event in shown["events"] if event["event"] == "resumed"), 0)
    expect(at, "the second job started from step 0, not from a checkpoint")
    rows = {row["step"]: row["loss"] for row in shown["rows"]}
    before, after = mean(rows, at - MEAN + 1, at), mean(rows, at + 1, at + MEAN)
    expect(abs(after - before) <= JOIN * before, f"the loss is {before:.3f} before step {at} and {after:.3f} after it")
    return f"{result}; resumed from step {at}"


def mean(rows: Mapping[int, float], first: int, last: int) -> float:
    """Return the mean loss of some steps."""
    known = [rows[step] for step in range(first, last + 1) if step in rows]
    return sum(known) / len(known) if known else float("nan")


def gpu(kit: Kit) -> str:
    """Run a job with an L4. Its node fails if no GPU is visible."""
    return trained(kit, kit.must(*argv(kit, "gpu"), "-o", "json").data)


def trained(kit: Kit, ended: Mapping[str, Any], steps: int = STEPS) -> str:
    """Check that a run succeeded and its folder has the metrics of each step once."""
    expect(ended["state"] == "SUCCEEDED", f"{ended['run']} {ended['state']}")
    rows = kit.must("metrics", ended["output"], "-o", "json").data["rows"]
    numbers = [row["step"] for row in rows]
    expect(numbers == [*range(1, steps + 1)], f"the metrics have {len(rows)} steps, not 1 to {steps}")
    return f"{steps} steps, loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}"


# --- VMs --------------------------------------------------------------------------------------------------------------


def vm(kit: Kit) -> str:
    """Create a VM with an L4, and log in over SSH."""
    created = kit.must(*argv(kit, "vm"), "-o", "json").data
    expect(created["ready"], "the VM isn't ready")
    process = kit.start("ssh", kit.name("vm"), "--", "nvidia-smi", "-L")
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    expect(process.returncode == 0, f"nvidia-smi over SSH ended with {process.returncode}: {' '.join(err.split())}")
    expect("L4" in out, f"nvidia-smi lists {' '.join(out.split())[:100]!r}, not an L4")
    return out.partition(" (")[0].strip()


def lease(kit: Kit) -> str:
    """Set a lease of two minutes. The VM must stop itself."""
    name = kit.name("vm")
    kit.must("vm", "extend", name, "--lease", "2m")
    began, states = kit.clock.now(), [""]

    def is_down() -> bool:
        states.append(kit.must("vm", "status", name, "-o", "json").data["state"])
        return states[-1] in DOWN

    expect(
        kit.wait(STOP_SECONDS, is_down), f"{STOP_SECONDS / 60:.0f} min after a lease of 2 min the VM is {states[-1]}"
    )
    return f"stopped {kit.clock.now() - began:.0f} s after a lease of 120 s began"


def spot_vm(kit: Kit) -> str:
    """Train on a Spot VM. It must delete itself."""
    ended = kit.must(*argv(kit, "spot-vm"), "-o", "json").data
    result = trained(kit, ended)

    def is_gone() -> bool:
        return not kit.compute.instances(f'labels.{RUN_LABEL}="{ended["run"]}"').machines

    expect(kit.wait(GONE_SECONDS, is_gone), f"its VM still exists {GONE_SECONDS / 60:.0f} min after its end")
    return f"{result}; the VM was deleted"


# --- The list ---------------------------------------------------------------------------------------------------------

ON_CPU: Final = ("vertex", "--cpu-machine", CPU)
IMAGE: Final = ("bucket", "build")


def training(hours: float, provisioning: Iterable[str], **config: Any) -> dict[str, Any]:
    """Return the fields of a training spec: a few steps unless `config` says otherwise."""
    usual = {"model": SMALL, "data": "python-stdlib", "steps": STEPS, "batch_size": 8, "log_every": 10}
    limits = {"hours": hours, "wait": "20m", "restarts": 0}
    return {"provisioning": [*provisioning], "limits": limits, "run": {"config": {**usual, **config}}}


ALL: Final = (
    Step("access", "", "project", access),
    Step("tables", "", "project", tables),
    Step("prices", "", "project", prices),
    Step("bucket", "", "bucket", bucket),
    Step("build", "push", "image", build, ("bucket",)),
    Step("append", "push", "image", append, ("build",)),
    Step("cpu", "cpu", "vertex", cpu, IMAGE, ON_CPU, training(0.5, ["standard"])),
    Step("logs", "cpu", "vertex", logs, ("cpu",)),
    Step("once", "cpu", "vertex", once, IMAGE, ON_CPU, training(0.25, ["standard"], seed=1)),
    Step("preempt", "preempt", "vertex", preempt, IMAGE, ON_CPU, training(0.75, ["standard"])),
    Step("gpu", "vertex", "vertex", gpu, IMAGE, ("vertex",), training(0.5, ["spot", "flex-start"])),
    Step("vm", "vm", "vm", vm, (), ("vm",), {"limits": {"hours": 1, "restarts": 0}, "vm": {"lease": "45m"}}),
    Step("lease", "vm", "vm", lease, ("vm",)),
    Step("spot-vm", "vm", "vm", spot_vm, IMAGE, ("vm", "--run"), training(0.5, ["spot"])),
)
BY_NAME: Final = {step.name: step for step in ALL}
GROUPS: Final = tuple(dict.fromkeys(step.group for step in ALL if step.group))


def chosen(groups: Iterable[str]) -> tuple[Step, ...]:
    """Return the steps of some groups (none: all) and their prerequisites, in order."""
    wanted = {step.name for step in ALL if not step.group or not groups or step.group in groups}
    for step in reversed(ALL):
        wanted |= set(step.needs) if step.name in wanted else set()
    return tuple(step for step in ALL if step.name in wanted)


def argv(kit: Kit, name: str) -> tuple[str, ...]:
    """Return the command that creates a step's job or VM."""
    command = BY_NAME[name].command
    return (command[0], spec(kit, name), *command[1:])


def spec(kit: Kit, name: str) -> str:
    """Write a step's spec, and return its path."""
    fields = {
        "name": kit.name(name),
        "machine": {"type": GPU},
        "regions": [kit.region],
        "labels": {LABEL: kit.id},
        "image": {"repository": kit.images, **({"code": str(kit.folder / "code")} if name == "build" else {})},
        "output": f"{kit.bucket}/runs",
        **BY_NAME[name].spec,
    }
    if name == "preempt":
        fields |= training(0.75, ["standard"], **kit.long_run)
    path = kit.folder / f"{name}.yaml"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


# --- Cost -------------------------------------------------------------------------------------------------------------


def items(kit: Kit, steps: Sequence[Step]) -> list[Item]:
    """Return the resources that the steps create.

    Raises LaunchError: the region lacks the machine, or its price is unknown.
    """
    resources = [Item("bucket", kit.bucket)]
    if any(step.group == "push" for step in steps):
        from launcher.images.cloud_build import TIMEOUT_SECONDS

        minutes = TIMEOUT_SECONDS / 60
        usd = catalog.load().rates["cloud-build-minute"] * minutes
        resources += [] if kit.repository else [Item("repository", kit.images)]
        resources.append(Item("build", f"by Cloud Build, {minutes:.0f} min at most", usd))
    return [*resources, *(step_item(kit, step) for step in steps if step.command)]


def step_item(kit: Kit, step: Step) -> Item:
    """Return the job or VM of a step, priced by the dry run of its command. Raises LaunchError."""
    ran = kit.launch(*argv(kit, step.name), "--dry-run", "-o", "json")
    if ran.code:
        raise PlanRefused(ran.problem)
    plan = ran.data
    usd = plan["limits"]["usd_hard_bound"]
    kind = plan["machine"]["machine_type"]
    if usd is None:  # without a price, --usd would be no upper bound
        raise PlanRefused(f"the highest price of {kind} in {kit.region} is unknown", "Choose another --region.")
    what = "job" if step.command[0] == "vertex" else "VM"
    return Item(what, f"{kit.name(step.name)}, {kind}, {plan['limits']['hours']:g} h at most", usd)


def total(resources: Sequence[Item]) -> float:
    """Return the sum in USD."""
    return sum(item.usd or 0.0 for item in resources)


def check_cap(kit: Kit, resources: Sequence[Item], usd: float) -> None:
    """Raise PlanRefused if it could cost more than `usd`; the hint lists the parts that fit."""
    if total(resources) <= usd:
        return
    fits = [group for group in GROUPS if total(items(kit, chosen([group]))) <= usd]
    hint = f"Each of these fits by itself: {', '.join(f'--only {group}' for group in fits)}" if fits else "Raise --usd."
    raise PlanRefused(f"the selftest could cost {usd_text(total(resources))}, more than --usd {usd:.2f}", hint)


# --- The run ----------------------------------------------------------------------------------------------------------


def run_steps(kit: Kit, steps: Sequence[Step], outcomes: list[Outcome], begins: Callable[[Step], None]) -> None:
    """Run the steps; each one's outcome is appended to `outcomes` as soon as it is known.

    If a step fails, the steps that need it are not run, and its jobs and VMs are removed at once.
    """
    for step in steps:
        known = {outcome.name: outcome.ok for outcome in outcomes}
        lacking = next((name for name in step.needs if not known.get(name)), None)
        if lacking:
            outcomes.append(Outcome(step.name, None, step.target, 0.0, f"not run: {lacking} did not pass"))
            continue
        begins(step)
        began = kit.clock.now()
        ok, text = tried(step, kit)
        seconds = kit.clock.now() - began
        outcomes.append(Outcome(step.name, ok, step.target, seconds, "" if ok else text, text if ok else ""))
        if not ok:
            clean(kit, kit.name(step.name), machines_only=True)


def tried(step: Step, kit: Kit) -> tuple[bool | None, str]:
    """Return whether a step passed, and the finding or the reason. An unexpected exception counts as a failure."""
    try:
        return True, step.check(kit)
    except NoCapacity as error:
        return None, f"no capacity: {error.problem}"
    except NotTried as error:
        return None, f"not tried: {error.problem}"
    except LaunchError as error:
        return False, " ".join(f"{error.problem} {error.hint}".split())
    except Exception as error:  # noqa: BLE001 - the other steps continue
        return False, f"{type(error).__name__}: {error}"
