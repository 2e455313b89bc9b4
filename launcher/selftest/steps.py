"""The selftest as a list of launch commands with their expected ends.

`items` lists what they create and may cost, `run_steps` runs them in order.
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
from launcher.images import artifact_registry, cloud_build
from launcher.jobs.vm import DOWN
from launcher.selftest.cleanup import ONCE, clean, storage_client
from launcher.selftest.kit import LABEL, Kit, Ran
from launcher.text import usd_text

GPU: Final = "g2-standard-4"
"""The smallest machine type with an L4."""
STEPS: Final = 20
"""Training steps of the short runs."""
SMALL: Final = {"name": "gpt", "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32}
MEDIUM: Final = {"name": "gpt", "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
LONG: Final = {"model": MEDIUM, "steps": 2000, "batch_size": 24}
"""Trains for two or three minutes on CPU, long enough to be cancelled midway."""
BEFORE: Final = 40
"""Training steps after which that run is cancelled, to be resumed."""
JOIN: Final = 0.25
"""Largest relative difference between the mean losses of MEAN steps before and after a resume."""
MEAN: Final = 10
SHARE: Final = 0.02
"""Largest relative error of the shipped price. Spot prices change up to once a day, so they are only reported."""


class Command(NamedTuple):
    """A launch command. `{spec}`, `{name}`, `{region}`, and the `{run}` and `{output}` printed before are filled in."""

    line: str
    end: str = ""
    """The expected end, in words."""
    holds: Callable[[Any], object] = bool
    """Takes its JSON, or its text; returns whether it ended so. May raise LaunchError: it can't be."""
    seconds: float = 0.0
    """Time for that end: the command is repeated until then, or until its run failed."""
    processes: int = 0
    """Runs in that many processes at once, and `holds` takes a list; 0: in this process."""


class Step(NamedTuple):
    """One step: its commands, the changes to the spec that these read, and the steps that must have passed."""

    name: str
    group: str
    """The group's name in --only. Empty: the step always runs."""
    target: str
    commands: tuple[Command, ...] = ()
    needs: tuple[str, ...] = ()
    spec: Mapping[str, Any] = {}
    """Of a job or VM, which is billed."""
    prepare: Callable[[Kit], str] = lambda _kit: ""
    """Comes before the commands, and returns the finding."""


class NotTried(LaunchError):
    """A step could not be tried, for a reason outside launch."""


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


# --- Preparations -----------------------------------------------------------------------------------------------------


def compare_prices(kit: Kit) -> str:
    """Check that the machine costs what the catalog says. Raises NotTried: the list can't be read; LaunchError."""
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
        if wrong and model != "spot":
            raise LaunchError(f"{machine.name} in {kit.region}: {text}")
        texts.append(text)
    return "; ".join(texts)


def create_bucket(kit: Kit) -> str:
    with storage_client(kit.project) as client:
        resource = client.bucket(kit.prefix)
        resource.labels = {LABEL: kit.id}
        resource.iam_configuration.uniform_bucket_level_access_enabled = True
        resource.soft_delete_policy.retention_duration_seconds = 0
        client.create_bucket(resource, project=kit.project, location=kit.region, **ONCE)
    return f"gs://{kit.prefix}"


def create_repository(kit: Kit) -> str:
    """Create the selftest's repository, unless another one is used."""
    if not kit.repository:
        artifact_registry.create(kit.images, kit.environ, kit.clock, {LABEL: kit.id})
    return ""


# --- Expected ends ----------------------------------------------------------------------------------------------------


def are_passed(checks: Sequence[Mapping[str, str]], *wrong: str) -> bool:
    """Return True if no check failed or has one of the statuses `wrong`. Raises LaunchError: what these say."""
    problems = [f"{check['name']}: {check['text']}" for check in checks if check["status"] in ("failed", *wrong)]
    if problems:
        raise LaunchError("; ".join(dict.fromkeys(problems)))
    return True


def has_project(doctor: Any) -> bool:
    """Check what `launch doctor` says of the project itself: the selftest has its own bucket and repository."""
    names = ("credentials", "project", "billing", "apis", "permissions")
    return are_passed([check for check in doctor["project"] if check["name"] in names])


def is_continuous(metrics: Any) -> bool:
    """Return whether the loss continued after a resume. Raises LaunchError: it did not."""
    at = next((event["step"] for event in metrics["events"] if event["event"] == "resumed"), 0)
    if not at:
        raise LaunchError("the second job started from step 0, not from a checkpoint")
    losses = {row["step"]: row["loss"] for row in metrics["rows"]}
    before, after = (
        sum(losses[step] for step in range(first, first + MEAN)) / MEAN for first in (at - MEAN + 1, at + 1)
    )
    if abs(after - before) > JOIN * before:
        raise LaunchError(f"the loss is {before:.3f} before step {at} and {after:.3f} after it")
    return True


def has_steps(steps: int = STEPS) -> Command:
    """Return the command that finds each step once in a run's metrics."""
    numbers = [*range(1, steps + 1)]
    return Command(
        "metrics {output} -o json",
        f"metrics of steps 1 to {steps}",
        lambda run: [row["step"] for row in run["rows"]] == numbers,
    )


def succeeds(line: str) -> Command:
    """Return a command whose run succeeds."""
    return Command(line, "SUCCEEDED", lambda run: run["state"] == "SUCCEEDED")


# --- The list ---------------------------------------------------------------------------------------------------------


def training(hours: float, provisioning: Iterable[str], **config: Any) -> dict[str, Any]:
    """Return the fields of a training spec: a few steps unless `config` says otherwise."""
    usual = {"model": SMALL, "data": "python-stdlib", "steps": STEPS, "batch_size": 8, "log_every": 10}
    limits = {"hours": hours, "wait": "20m", "restarts": 0}
    return {"provisioning": [*provisioning], "limits": limits, "run": {"config": {**usual, **config}}}


def cancelled_and_resumed(**config: Any) -> Step:
    """Return the step that cancels a run midway and resumes it; `config` is what it trains."""
    commands = (
        Command(f"{ON_CPU} --detach"),
        Command(
            "status {run} -o json",
            f"step {BEFORE} reached",
            lambda run: run["state"] == "RUNNING" and (run["progress"] or {}).get("step", 0) >= BEFORE,
            seconds=2400,
        ),
        Command("cancel {run} --region {region}"),
        succeeds("vertex --resume {run} -o json"),
        has_steps(config["steps"]),
        Command("metrics {output} -o json", "resumed with a continuous loss", is_continuous),
    )
    return Step("preempt", "preempt", "vertex", commands, IMAGE, training(0.75, ["standard"], **config))


def pushes(builder: str) -> Command:
    """Return a command that appends the code to the dependency image."""
    return Command(f"push {{spec}} --builder {builder} -o json", "appended", lambda image: image["how"] == "appended")


ON_CPU: Final = "vertex {spec} -o json --cpu-machine n1-standard-4"
DOCTOR: Final = "doctor --only project --region {region} -o json --for"
LAST_LINE: Final = re.compile(rf"step +{STEPS}/{STEPS}\b")
IMAGE: Final = ("bucket", "build")
VM: Final = {"limits": {"hours": 1, "restarts": 0}, "vm": {"lease": "45m"}}

ACCESS: Final = tuple(Command(f"{DOCTOR} {target}", f"ready for {target}", has_project) for target in ("vertex", "vm"))
TABLES: Final = Command(
    "vm {spec} --preflight -o json", "known to Google", lambda preflight: are_passed(preflight["checks"], "unknown")
)
LOGS: Final = Command(
    "logs {run} -o json",
    "the line of the last step",
    lambda lines: any(LAST_LINE.search(line["text"]) and line["replica"] == "workerpool0-0" for line in lines),
    seconds=300,
)
TOGETHER: Final = (
    Command(f"{ON_CPU} --detach", "3 submissions", lambda jobs: len({job["job"] for job in jobs}) == 1, processes=3),
    Command("status {run} -o json", "1 job", lambda run: len(run["jobs"]) == 1),
    Command("cancel {run} --region {region}"),
)
READY: Final = (
    Command("vm {spec} -o json", "ready", lambda vm: vm["ready"]),
    Command("ssh {name} -- nvidia-smi -L", "an L4", lambda outputs: "L4" in outputs[0], processes=1),
)
LEASE: Final = (
    Command("vm extend {prefix}-vm --lease 2m"),
    Command("vm status {prefix}-vm -o json", "stopped", lambda vm: vm["state"] in DOWN, seconds=900),
)
DELETED: Final = Command(
    "vm list -o json", "VM deleted", lambda vms: not any("-spot-vm-" in str(vm["run"]) for vm in vms["machines"]), 300
)
ALL: Final = (
    Step("access", "", "project", ACCESS),
    Step("tables", "", "project", (TABLES,), spec=VM),
    Step("prices", "", "project", prepare=compare_prices),
    Step("bucket", "", "bucket", prepare=create_bucket),
    Step("build", "push", "image", (pushes("cloud-build"),), ("bucket",), prepare=create_repository),
    Step("append", "push", "image", (pushes("append"),), ("build",)),
    Step("cpu", "cpu", "vertex", (succeeds(ON_CPU), has_steps()), IMAGE, training(0.5, ["standard"])),
    Step("logs", "cpu", "vertex", (LOGS, succeeds("status {run} -o json")), ("cpu",)),
    Step("once", "cpu", "vertex", TOGETHER, IMAGE, training(0.25, ["standard"], seed=1)),
    cancelled_and_resumed(**LONG),
    Step(  # its node fails if no GPU is visible
        "gpu",
        "vertex",
        "vertex",
        (succeeds("vertex {spec} -o json"), has_steps()),
        IMAGE,
        training(0.5, ["spot", "flex-start"]),
    ),
    Step("vm", "vm", "vm", READY, spec=VM),
    Step("lease", "vm", "vm", LEASE, ("vm",)),
    Step(
        "spot-vm",
        "vm",
        "vm",
        (succeeds("vm {spec} --run -o json"), has_steps(), DELETED),
        IMAGE,
        training(0.5, ["spot"]),
    ),
)
BY_NAME: Final = {step.name: step for step in ALL}
GROUPS: Final = tuple(dict.fromkeys(step.group for step in ALL if step.group))


def chosen(groups: Iterable[str]) -> tuple[Step, ...]:
    """Return the steps of some groups (none: all) and their prerequisites, in order."""
    wanted = {step.name for step in ALL if not step.group or not groups or step.group in groups}
    for step in reversed(ALL):
        wanted |= set(step.needs) if step.name in wanted else set()
    return tuple(step for step in ALL if step.name in wanted)


# --- Cost -------------------------------------------------------------------------------------------------------------


def items(kit: Kit, steps: Sequence[Step]) -> list[Item]:
    """Return the resources that the steps create.

    Raises LaunchError: the region lacks the machine, or its price is unknown.
    """
    resources = [Item("bucket", f"gs://{kit.prefix}")]
    if any(step.group == "push" for step in steps):
        minutes = cloud_build.TIMEOUT_SECONDS / 60
        usd = catalog.load().rates["cloud-build-minute"] * minutes
        resources += [] if kit.repository else [Item("repository", kit.images)]
        resources.append(Item("build", f"by Cloud Build, {minutes:.0f} min at most", usd))
    return [*resources, *(step_item(kit, step) for step in steps if step.spec and step.target != "project")]


def step_item(kit: Kit, step: Step) -> Item:
    """Return the job or VM of a step, priced by the dry run of its command. Raises LaunchError."""
    ran = kit.launch(*create_command(kit, step), "--dry-run")
    if ran.code:
        raise PlanRefused(ran.problem)
    plan = ran.data
    usd = plan["limits"]["usd_hard_bound"]
    kind = plan["machine"]["machine_type"]
    if usd is None:  # without a price, --usd would be no upper bound
        raise PlanRefused(f"the highest price of {kind} in {kit.region} is unknown", "Choose another --region.")
    what = "job" if step.target == "vertex" else "VM"
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
        ok, text = run_step(kit, step)
        seconds = kit.clock.now() - began
        outcomes.append(Outcome(step.name, ok, step.target, seconds, "" if ok else text, text if ok else ""))
        if not ok:
            clean(kit, kit.name(step.name), machines_only=True)


def run_step(kit: Kit, step: Step) -> tuple[bool | None, str]:
    """Return whether a step passed, and the finding or the reason. An unexpected exception counts as a failure."""
    try:
        findings = [step.prepare(kit), *(run_command(kit, step, command) for command in step.commands)]
        return True, "; ".join(dict.fromkeys(filter(None, findings)))
    except NoCapacity as error:
        return None, f"no capacity: {error.problem}"
    except NotTried as error:
        return None, f"not tried: {error.problem}"
    except LaunchError as error:
        return False, " ".join(f"{error.problem} {error.hint}".split())
    except Exception as error:  # noqa: BLE001 - the other steps continue
        return False, f"{type(error).__name__}: {error}"


def run_command(kit: Kit, step: Step, command: Command) -> str:
    """Run a command until it ends as expected, and return that end. Raises NoCapacity; LaunchError: it does not."""
    until = kit.clock.now() + command.seconds
    while True:
        argv = command_words(kit, step, command.line)
        ran = at_once(kit, argv, command.processes) if command.processes else [kit.launch(*argv)]
        # `launch doctor` fails if anything is missing that a user needs; `has_project` says what the selftest needs.
        printed = [(each if argv[0] == "doctor" else each.checked()).data for each in ran]
        if isinstance(printed[0], dict):
            kit.notes.update({key: printed[0][key] for key in ("run", "output") if printed[0].get(key)})
        data = printed if command.processes else printed[0]
        if not command.end or command.holds(data):
            return command.end
        is_over = isinstance(data, dict) and data.get("state") in ("FAILED", "SUCCEEDED", "CANCELLED")
        if is_over or kit.clock.now() >= until:
            after = f" after {command.seconds / 60:.0f} min" if command.seconds else ""
            raise LaunchError(f"launch {' '.join(argv)}{after}: expected {command.end}, not {summary(data)}")
        kit.clock.sleep(kit.poll_seconds)


def summary(data: Any) -> str:
    """Return the state, or the length of each list, of what a command printed."""
    if isinstance(data, dict):
        state = [str(data["state"])] if "state" in data else []
        return ", ".join([*state, *(f"{len(each)} {name}" for name, each in data.items() if isinstance(each, list))])
    return repr(" ".join(data.split())[:100]) if isinstance(data, str) else f"{json.dumps(data)[:200]}"


def at_once(kit: Kit, argv: Sequence[str], count: int) -> list[Ran]:
    """Run a command in `count` processes at once."""
    processes = [kit.start(*argv) for _ in range(count)]
    try:
        ended = [(process, *process.communicate()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ran(tuple(argv), process.returncode, out, err) for process, out, err in ended]


def create_command(kit: Kit, step: Step) -> list[str]:
    """Return the command that creates a step's job or VM, watched to its end."""
    return [word for word in command_words(kit, step, step.commands[0].line) if word != "--detach"]


def command_words(kit: Kit, step: Step, line: str) -> list[str]:
    """Return the arguments of a command, and write the spec that it reads."""
    words = {**kit.notes, "prefix": kit.prefix, "name": kit.name(step.name), "region": kit.region}
    if "{spec}" in line:
        words["spec"] = str(write_spec(kit, step))
    return [word.format(**words) for word in line.split()]


def write_spec(kit: Kit, step: Step) -> Path:
    """Write a step's spec, and return its path. The code of a push is different for each step."""
    image = {"repository": kit.images}
    if step.group == "push":
        folder = kit.folder / f"code-{step.name}"
        folder.mkdir(exist_ok=True)
        (folder / "edit.txt").write_text(step.name)
        image["code"] = str(folder)
    fields = {
        "name": kit.name(step.name),
        "machine": {"type": GPU},
        "regions": [kit.region],
        "labels": {LABEL: kit.id},
        "image": image,
        "output": f"gs://{kit.prefix}/runs",
        **step.spec,
    }
    path = kit.folder / f"{step.name}.yaml"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path
