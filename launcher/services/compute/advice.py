"""Google's advice on Spot capacity: how likely it is now, and how often VMs were preempted.

advice.capacity and advice.capacityHistory (https://cloud.google.com/compute/docs/reference/rest/beta/advice) answer for
Spot VMs only; the history has no N1 machines with GPUs. They exist in Compute Engine's v1 and beta API, but not for
every project in both, so v1 is tried first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from launcher.catalog import Gpu, MachineType
from launcher.errors import LaunchError
from launcher.gcp.api import open_session, status_of
from launcher.gcp.parallel import TolerantApi, call_once
from launcher.services.compute.client import SERVICE, Compute
from launcher.services.compute.messages import origin_only

SECONDS: Final = 8.0
VERSIONS: Final = ("v1", "beta")
NOT_SERVED: Final = (400, 404, 501)
"""Statuses of a version that does not serve the method, or not for Spot."""


class Capacity(Struct, frozen=True, kw_only=True):
    """The likelihood (0 to 1) that a region has Spot capacity for one VM, and the seconds that most such VMs are
    expected to run. None: no advice. `api`: v1 or beta."""

    obtainability: float | None
    uptime_seconds: float | None
    api: str


class History(Struct, frozen=True, kw_only=True):
    """Preemptions and prices of a machine's Spot VMs in a region. `api`: v1 or beta.

    `preemption_rate`: the mean of the daily shares of stopped VMs that were preempted, over `days` days; None: no data.
    `prices`: (first day, USD per hour) of each list price, oldest first.
    """

    preemption_rate: float | None
    days: int
    prices: tuple[tuple[str, float], ...]
    api: str


class AdviceClient:
    """Plain REST requests, with the method signature that `Api` expects: Google's client only has the v1 API."""

    def __init__(self, session: Any, endpoint: str, project: str) -> None:
        self._session, self._endpoint, self._project = session, endpoint, project

    def ask(self, request: Mapping[str, Any], retry: None, timeout: float) -> dict[str, Any]:
        """Return the answer of `version` to the method `path` in `region`."""
        from google.api_core.exceptions import from_http_response

        path = f"compute/{request['version']}/projects/{self._project}/regions/{request['region']}/advice"
        url = f"{self._endpoint}/{path}/{request['path']}"
        answer = self._session.post(url, json=request["body"], timeout=timeout)
        if answer.status_code >= 400:
            raise from_http_response(answer)
        advice: dict[str, Any] = answer.json()
        return advice


def advice_api(compute: Compute) -> TolerantApi:
    """Return the API of the advice. Raises NotAuthorised: no credentials."""
    session, endpoint = open_session(SERVICE, origin_only(compute.environ))
    return TolerantApi(SERVICE, compute.project, AdviceClient(session, endpoint, compute.project), compute.clock)


def capacity(api: TolerantApi, machine: MachineType, gpu: Gpu, region: str) -> Capacity:
    """Return the advice on one Spot VM in any zone of a region. Raises LaunchError."""
    accelerators = [{"acceleratorType": gpu.accelerator, "acceleratorCount": machine.gpus}]
    selection = {
        "machineTypes": [machine.name],
        **({"guestAccelerators": accelerators} if machine.guest_accelerator else {}),
    }
    body = {
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE"},
        "instanceFlexibilityPolicy": {"instanceSelections": {"launch": selection}},
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "size": 1,
    }
    answer, version = first_served(api, "capacity", region, body)
    scores: Mapping[str, Any] = next(
        (recommendation.get("scores", {}) for recommendation in answer.get("recommendations", ())), {}
    )
    obtainability, uptime = scores.get("obtainability"), str(scores.get("estimatedUptime", ""))
    return Capacity(
        obtainability=None if obtainability is None else float(obtainability),
        uptime_seconds=float(uptime.removesuffix("s")) if uptime.endswith("s") else None,
        api=version,
    )


def history(api: TolerantApi, machine: MachineType, region: str) -> History | None:
    """Return the history of a machine's Spot VMs in a region; None: Google keeps none of N1 machines with GPUs. Raises
    LaunchError."""
    if machine.guest_accelerator:
        return None
    body = {
        "instanceProperties": {"machineType": machine.name, "scheduling": {"provisioningModel": "SPOT"}},
        "types": ["PREEMPTION", "PRICE"],
    }
    answer, version = first_served(api, "capacityHistory", region, body)
    rates = [
        float(record["preemptionRate"]) for record in answer.get("preemptionHistory", ()) if "preemptionRate" in record
    ]
    return History(
        preemption_rate=sum(rates) / len(rates) if rates else None,
        days=len(rates),
        prices=price_steps(answer.get("priceHistory", ())),
        api=version,
    )


def price_steps(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """Return the first day of each price, without records that repeat the price before; a price of 0 is unknown."""
    steps: list[tuple[str, float]] = []
    for record in sorted(records, key=lambda record: str(record.get("interval", {}).get("startTime", ""))):
        money = record.get("listPrice", {})
        usd = int(money.get("units") or 0) + int(money.get("nanos") or 0) / 1e9
        if usd and (not steps or steps[-1][1] != usd):
            steps.append((str(record.get("interval", {}).get("startTime", ""))[:10], usd))
    return tuple(steps)


def first_served(api: TolerantApi, method: str, region: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the answer of the first API version that serves a method, and that version. Raises LaunchError."""
    *earlier, last = VERSIONS
    for version in earlier:
        try:
            return call_once(api, "ask", SECONDS, version=version, path=method, region=region, body=body), version
        except LaunchError as error:
            if status_of(error) not in NOT_SERVED:
                raise
    return call_once(api, "ask", SECONDS, version=last, path=method, region=region, body=body), last
