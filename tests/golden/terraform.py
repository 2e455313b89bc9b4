"""docs/terraform/main.tf, rendered from the gcloud commands of `launch setup`'s steps: each command is one resource."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from launcher.gcp.api import Rest
from launcher.project.setup import SetupTarget, steps
from tests.command import ROOT

PAGE = ROOT / "docs" / "terraform" / "main.tf"
HEAD = """\
# What `launch setup --for both --yes` creates (docs/project.md). It has never been applied: check the plan first.

terraform {
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.0" }
  }
}

variable "project" { type = string }

variable "region" {
  type    = string
  default = "us-central1"
}

variable "users" {
  type        = list(string)
  description = "IAM members who launch jobs: user:you@example.com, group:…"
}

variable "vms" {
  type        = bool
  default     = false
  description = "Also prepare the project for VMs."
}

variable "network" {
  type    = string
  default = "default"
}

locals {
  suffix = var.network == "default" ? "" : "-${var.network}"
}
"""
VARIABLES: dict[str, Any] = {"project": "my-project", "region": "my-region", "network": "my-network"}
TRAINER, REPOSITORY = "google_service_account.trainer", "google_artifact_registry_repository.images"
Arguments = dict[str, Any]
Block = tuple[str, str, Arguments]
"""Type, name and arguments of a resource. A text in `…` is an expression, a dict a block."""


def rendered() -> str:
    """Return the module. Raises KeyError, ValueError: a step has a command that no resource stands for."""
    common, every = (commands(vms=vms) for vms in (False, True))
    blocks = [block for command in every for block in resources(command, common)]
    return "\n".join([HEAD, *(hcl(*block) for block in blocks)])


def commands(*, vms: bool) -> list[str]:
    """Return the commands of all steps; what an administrator has before is left out."""
    target = SetupTarget(number="", caller="user:me", vms=vms, **VARIABLES)
    lines = [line for step in steps(target, Rest(target.project, {})) for line in step.command.splitlines()]
    return [line.partition(" || ")[0] for line in lines]


def resources(command: str, common: list[str]) -> Iterator[Block]:
    """Yield the resource of a command; those of VMs alone are made if var.vms is set."""
    is_describe = command.startswith("RANGE=$(")
    words = shlex.split(command.removeprefix("RANGE=$(").removesuffix(")"))[1:]
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    names = [word for word in words if not word.startswith("--")]
    of_vms: Arguments = {} if command in common or names[0] == "services" else {"count": "`var.vms ? 1 : 0`"}
    project: Arguments = {**of_vms, "project": "`var.project`"}
    member: Arguments = {"role": flags.get("role"), "member": f"`{TRAINER}.member`"}
    match names:
        case ["services", "enable", *apis]:
            base = [api for api in apis if api in " ".join(common)]
            lists = (json.dumps(part, indent=2) for part in (base, [api for api in apis if api not in base]))
            every = "`toset(concat({}, var.vms ? {} : []))`".format(*lists)
            yield "google_project_service", "api", {"for_each": every, **project, "service": "`each.value`",
                                                    "disable_on_destroy": False}  # fmt: skip
        case ["artifacts", "repositories", "create", name]:
            kind = {"repository_id": name, "format": flags["repository-format"].upper(), **after_apis()}
            yield "google_artifact_registry_repository", "images", {**project, "location": flags["location"], **kind}
        case ["storage", "buckets", "create", url]:
            soft_delete = {"retention_duration_seconds": int(flags["soft-delete-duration"])}
            settings = {"uniform_bucket_level_access": True, "soft_delete_policy": soft_delete}
            name = url.removeprefix("gs://")
            yield "google_storage_bucket", "runs", {**project, "name": name, "location": flags["location"], **settings}
        case ["iam", "service-accounts", "create", name]:
            yield "google_service_account", "trainer", {**project, "account_id": name, **after_apis()}
        case ["storage", "buckets", "add-iam-policy-binding", _]:
            yield "google_storage_bucket_iam_member", "runs", {"bucket": "`google_storage_bucket.runs.name`", **member}
        case ["projects", "add-iam-policy-binding", _]:
            yield "google_project_iam_member", flags["role"].rpartition(".")[2].lower(), {**project, **member}
        case ["artifacts", "repositories", "add-iam-policy-binding", _]:
            where: Arguments = {"location": f"`{REPOSITORY}.location`", "repository": f"`{REPOSITORY}.name`"}
            yield "google_artifact_registry_repository_iam_member", "pull", {**project, **where, **member}
        case ["iam", "service-accounts", "add-iam-policy-binding", _]:
            users = {"for_each": "`toset(var.users)`", "service_account_id": f"`{TRAINER}.name`"}
            yield "google_service_account_iam_member", "users", {**users, **member, "member": "`each.value`"}
        case ["compute", "networks", "subnets", "describe", name] if is_describe:
            yield "data google_compute_subnetwork", "nodes", {**project, "region": flags["region"], "name": name}
        case ["compute", "firewall-rules", "create", name]:
            protocol, _, port = flags["allow"].partition(":")
            allow = {"protocol": protocol, **({"ports": [port]} if port else {})}
            peers = flags["source-ranges"].replace("$RANGE", "`data.google_compute_subnetwork.nodes[0].ip_cidr_range`")
            label = "iap_ssh" if port else "internal"
            where = {"name": name, "network": flags["network"], "source_ranges": [peers], "allow": allow}
            yield "google_compute_firewall", label, {**project, **where}
        case ["compute", "routers", "create", name]:
            where = {"region": flags["region"], "name": name, "network": flags["network"]}
            yield "google_compute_router", "nat", {**project, **where}
        case ["compute", "routers", "nats", "create", name]:
            ranges = {"nat_ip_allocate_option": "AUTO_ONLY"}
            ranges["source_subnetwork_ip_ranges_to_nat"] = "ALL_SUBNETWORKS_ALL_IP_RANGES"
            where = {"region": flags["region"], "router": "`google_compute_router.nat[0].name`", "name": name}
            yield "google_compute_router_nat", "nat", {**project, **where, **ranges}
        case _:
            raise ValueError(f"no resource stands for: {command}")


def after_apis() -> dict[str, Any]:
    return {"depends_on": ["`google_project_service.api`"]}


def hcl(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a resource as `terraform fmt` writes it."""
    data, _, kind = kind.rpartition(" ")
    plain = {key: value for key, value in arguments.items() if not isinstance(value, dict)}
    lines = [f'{data or "resource"} "{kind}" "{name}" {{', *assigned(plain, "  ")]
    for key, value in arguments.items():
        if isinstance(value, dict):
            lines += ["", f"  {key} {{", *assigned(value, "    "), "  }"]
    return "\n".join([*lines, "}", ""])


def assigned(values: dict[str, Any], indent: str) -> Iterator[str]:
    width = max(map(len, values))
    for key, value in values.items():
        text = json.dumps(value).replace("\\n", f"\n{indent}").replace('\\"', '"')
        text = text.replace(f"-{VARIABLES['network']}", "${local.suffix}")
        for variable, example in VARIABLES.items():
            text = text.replace(f'"{example}"', f"var.{variable}").replace(example, f"${{var.{variable}}}")
        text = text.replace('"`', "").replace('`"', "")
        yield f"{indent}{key:{width}} = {text}"
