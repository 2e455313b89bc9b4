"""Check a project's APIs and permissions, and the shipped tables and prices against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from launcher import catalog
from launcher.catalog.sku_prices import Rates, machine_price
from launcher.errors import LaunchError
from launcher.gcp.api import Api, status_of
from launcher.gcp.parallel import together
from launcher.gcp.price_list import PriceList
from launcher.gcp.rest import Rest
from launcher.jobs.vm import last_url_part
from launcher.project.reads import RESOURCES, tested
from launcher.selftest.cleanup import selftest_buckets
from launcher.selftest.kit import GPU, LABEL, PREFIX, Kit, NotTried, expect

PERMISSIONS: Final = (
    "aiplatform.customJobs.create",
    "aiplatform.customJobs.cancel",
    "artifactregistry.repositories.create",
    "cloudbuild.builds.create",
    "compute.instances.create",
    "logging.logEntries.list",
    "storage.buckets.create",
)
"""Permissions that the steps need and that are granted at project level."""


# --- Access -----------------------------------------------------------------------------------------------------------


def access(kit: Kit) -> str:
    """Check that each API answers and the permissions are granted."""
    answers = together(reads(kit))
    missing = answers.pop("permissions")
    problems = [error.problem for error in answers.values() if isinstance(error, LaunchError)]
    problems += [f"missing: {', '.join(missing)}"] if isinstance(missing, list) and missing else []
    shown = answers["Compute Engine"]
    if not isinstance(shown, LaunchError) and shown.name != kit.project:
        problems.append(f"Compute Engine answers about project {shown.name}, not {kit.project}")
    expect(not problems, "; ".join(problems))
    unread = f"permissions not checked: {missing.problem}" if isinstance(missing, LaunchError) else ""
    return f"{len(answers)} APIs; {unread or f'{len(PERMISSIONS)} permissions'}"


def reads(kit: Kit) -> dict[str, Callable[[], Any]]:
    """Return one read of each API that launch uses."""
    from launcher.images import artifact_registry
    from launcher.runs.logs.cloud_logging import LOGGING, LogClient

    def repository_names() -> Any:
        api = Api(artifact_registry.SERVICE, kit.project, artifact_registry.client(kit.environ), kit.clock)
        return artifact_registry.listed(api, "us")

    def missing_permissions() -> list[str]:
        path = f"/v1/projects/{kit.project}:testIamPermissions"
        granted = tested(Rest(kit.project, kit.environ), RESOURCES, path, PERMISSIONS)
        return [permission for permission in PERMISSIONS if permission not in granted]

    def entries() -> Any:
        api = Api(LOGGING, kit.project, LogClient(kit.environ), kit.clock)
        return api.ask("list_log_entries", resourceNames=[f"projects/{kit.project}"], pageSize=1)

    return {
        "Compute Engine": lambda: kit.compute.api("ProjectsClient").ask("get", project=kit.project),
        "Vertex AI": lambda: kit.vertex.find(f"labels.{LABEL}:*", [kit.region]),
        "Artifact Registry": repository_names,
        "Cloud Build": lambda: kit.builds(PREFIX),
        "Cloud Logging": entries,
        "Cloud Storage": lambda: selftest_buckets(kit.project, PREFIX),
        "permissions": missing_permissions,
    }


# --- The tables -------------------------------------------------------------------------------------------------------


def tables(kit: Kit) -> str:
    """Check that quotas, machine types, zones and images match the catalog."""
    wrong = [*table_differences(kit)]
    expect(not wrong, "; ".join(wrong))
    return "quotas, machine types, zones, image family"


def table_differences(kit: Kit) -> Iterator[str]:
    """Yield the differences between the shipped tables and the project's region. Raises LaunchError."""
    known = catalog.load()
    machine = known.find(GPU, None, None, "compute")
    region = kit.compute.api("RegionsClient").ask("get", project=kit.project, region=kit.region)
    metrics = {quota.metric for quota in region.quotas}
    for model in ("standard", "spot"):
        quota = known.quota(machine, "compute", model)
        if quota and quota.metric and quota.metric not in metrics:
            yield f"{kit.region} has no quota {quota.metric}"
    for zone in known.zones(machine, kit.region):
        yield from machine_type_differences(kit, machine, zone)
    family = known.image_family(machine)
    if family is None:
        yield "there is no image family for an L4"
        return
    try:
        kit.compute.api("ImagesClient").ask("get_from_family", project=family.project, family=family.family)
    except LaunchError as error:
        if status_of(error) != 404:
            raise
        yield f"there is no image family {family.family}"


def machine_type_differences(kit: Kit, machine: catalog.MachineType, zone: str) -> Iterator[str]:
    """Yield the differences of a zone's machine type."""
    try:
        request = {"project": kit.project, "zone": zone, "machine_type": machine.name}
        offered = kit.compute.api("MachineTypesClient").ask("get", **request)
    except LaunchError as error:
        if status_of(error) != 404:
            raise
        yield f"{zone} has no {machine.name}"
        return
    memory, vcpus = offered.memory_mb / 1024, offered.guest_cpus
    if (vcpus, memory) != (machine.vcpus, machine.memory_gb):
        yield f"{machine.name} has {vcpus} vCPUs and {memory:g} GB, not {machine.vcpus} and {machine.memory_gb}"
    kinds = {
        last_url_part(accelerator.guest_accelerator_type): accelerator.guest_accelerator_count
        for accelerator in offered.accelerators
    }
    if kinds and kinds != {"nvidia-l4": machine.gpus}:
        yield f"{machine.name} has {kinds}, not {machine.gpus} × nvidia-l4"


# --- Prices -----------------------------------------------------------------------------------------------------------

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
