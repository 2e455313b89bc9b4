"""Parse and edit a VM's request: a planned or existing Instance, or the body that creates several VMs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launch_train.common import contract
from launcher.jobs.vm import PARAMETERS, last_url_part, parameters, provisioning_of
from launcher.services.request.model import JobRequest


def read(request: Mapping[str, Any]) -> JobRequest:
    instance = properties(request)
    sent = startup_parameters(request)
    env = {str(name): str(value) for name, value in sent.get("env", {}).items()}
    accounts = instance.get("serviceAccounts") or [{}]
    listed = sum(int(accelerator.get("acceleratorCount", 0)) for accelerator in instance.get("guestAccelerators", ()))
    return JobRequest(
        provisioning=reservation(instance) or provisioning_of(instance),
        machine_type=last_url_part(instance.get("machineType", "")),
        gpus=int(env.get(contract.PROCESSES, 0)) or listed,
        nodes=len(sent.get("nodes", ())) or int(request.get("count", 1)),
        account=accounts[0].get("email", ""),
        image=str(sent.get("image", "")),
        output=str(sent.get("run_folder", "") or ""),
        words=tuple(str(word) for word in (sent.get("entrypoint", ""), *sent.get("arguments", ())) if word),
        env=env,
    )


def reservation(instance: Mapping[str, Any]) -> str:
    """Return `reservation:NAME`. Empty if the request names none."""
    values = instance.get("reservationAffinity", {}).get("values")
    return f"reservation:{values[0]}" if values else ""


def properties(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Instance, or the properties that all VMs of the request share."""
    instance_properties: Mapping[str, Any] = request.get("instanceProperties", request)
    return instance_properties


def startup_parameters(request: Mapping[str, Any]) -> Mapping[str, Any]:
    items = properties(request).get("metadata", {}).get("items", ())
    return parameters(next((item.get("value", "") for item in items if item.get("key") == PARAMETERS), ""))


def limit(request: Mapping[str, Any]) -> int:
    """Return the seconds after which Google ends the VM, or 0 if it has no limit."""
    return int(properties(request).get("scheduling", {}).get("maxRunDuration", {}).get("seconds", 0))


def with_limit(request: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    scheduling = properties(request)["scheduling"]
    return changed(request, {"scheduling": {**scheduling, "maxRunDuration": {"seconds": str(seconds)}}})


def wait(request: Mapping[str, Any]) -> int:
    """Return how long the VM may wait for a machine, in seconds, or 0 if it has no limit."""
    return int(request.get("params", {}).get("requestValidForDuration", {}).get("seconds", 0))


def with_wait(request: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    """Return the request of one VM with another limit on the wait for a machine."""
    return {**request, "params": {**request["params"], "requestValidForDuration": {"seconds": str(seconds)}}}


def with_env(request: Mapping[str, Any], name: str, value: str) -> Mapping[str, Any]:
    """Return the request with one more environment variable in the container."""
    sent = startup_parameters(request)
    sent = {**sent, "env": {**sent.get("env", {}), name: value}}
    text = json.dumps(sent, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    items = [
        {**item, "value": text} if item.get("key") == PARAMETERS else item
        for item in properties(request).get("metadata", {}).get("items", ())
    ]
    return changed(request, {"metadata": {**properties(request).get("metadata", {}), "items": items}})


def changed(request: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if "instanceProperties" in request:
        return {**request, "instanceProperties": {**request["instanceProperties"], **fields}}
    return {**request, **fields}
