"""Cloud Quotas: Vertex AI's GPU quotas of training, requests for more, and their use in Cloud Monitoring.

Facts. Seen (gcloud 528's generated client, cloudquotas v1): paths and fields. Seen (gcloud's model_garden_utils): the
usage metric, its labels, and that a limit of 0 has no `value`. Seen (vertex-ai-samples, common_util.py): the metrics.
Seen (Compute Engine's refusals): GPUs of VMs from H100 on share a quota with the dimension gpu_family, and its id.
Assumed: the order of dimensionsInfos within a quota; the ids of the other quotas of VMs (formed as RTX PRO 6000's);
that the quota of all regions has the location global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.testing.googlecloud.compute.capacity import (
    EVERYWHERE,
    NAMED,
    PER_FAMILY,
    PREEMPTIBLE_ONLY,
    Quotas,
    regions,
)
from launcher.testing.googlecloud.wire import ApiError, Request, Response, json_response, page, route

LOCATION = "/v1/projects/{project}/locations/global"
INFOS = LOCATION + "/services/{service}/quotaInfos"
PREFERENCES = LOCATION + "/quotaPreferences"
PREFERENCE = PREFERENCES + "/{name}"
NAMED_INFOS = "cloudquotas.projects.locations.services.quotaInfos."
NAMED_PREFERENCES = "cloudquotas.projects.locations.quotaPreferences."
GPUS = {
    "t4": "T4", "v100": "V100", "p100": "P100", "p4": "P4", "l4": "L4", "a100": "A100", "a100_80gb": "A10080GB",
    "h100": "H100", "h100_mega": "H100MEGA", "h200": "H200",
}  # fmt: skip
FAMILIES = ("NVIDIA_H100", "NVIDIA_H100_MEGA", "NVIDIA_H200", "NVIDIA_B200", "NVIDIA_RTX_PRO_6000")
PLENTY = 1000


class CloudQuotas:
    """The services. `limits` and `usage` are by metric without its service and region; limits default to plenty."""

    def __init__(self, project: str, compute: Quotas) -> None:
        self.project, self.compute = project, compute
        self.limits: dict[tuple[str, str], int] = {}
        self.usage: dict[tuple[str, str], int] = {}
        self.preferences: dict[str, dict[str, Any]] = {}

    @route("GET", INFOS, NAMED_INFOS + "list", query="pageSize pageToken")
    def infos(self, request: Request, project: str, service: str) -> Response:
        infos = self._infos(service)
        items, following = page(infos, 12, request.query.get("pageToken", ""))
        return json_response({"quotaInfos": items, **({"nextPageToken": following} if following else {})})

    @route("GET", INFOS + "/{quota}", NAMED_INFOS + "get")
    def info(self, request: Request, project: str, service: str, quota: str) -> Response:
        infos = self._compute_infos() if service == "compute.googleapis.com" else self._infos(service)
        for info in infos:
            if info["quotaId"] == quota:
                return json_response(info)
        raise ApiError(404, f"Quota {quota} not found.")

    def _infos(self, service: str) -> list[dict[str, Any]]:
        kinds = (("", ""), ("preemptible_", "Preemptible"))
        ids = {
            f"custom_model_training_{low}nvidia_{gpu}_gpus": f"CustomModelTraining{high}{name}GPUsPerProjectPerRegion"
            for low, high in kinds
            for gpu, name in GPUS.items()
        }
        infos = [self._vertex_info(service, metric, name) for metric, name in ids.items()]
        infos.append(self._vertex_info(service, "online_prediction_requests_per_base_model", "OnlinePrediction"))
        return infos

    def _compute_infos(self) -> list[dict[str, Any]]:
        """Return the GPU quotas of VMs: those of regions.get, that of all regions together, and that of families."""
        metrics = [*NAMED.values(), *(f"PREEMPTIBLE_{name}" for name in NAMED.values()), *PREEMPTIBLE_ONLY.values()]
        infos = [self._compute_info(name, [({}, region) for region in regions()]) for name in metrics]
        families = [({"gpu_family": name}, region) for region in regions() for name in FAMILIES]
        return [*infos, self._compute_info(PER_FAMILY, families), self._compute_info(EVERYWHERE, [({}, "")])]

    def _compute_info(self, metric: str, places: list[tuple[dict[str, str], str]]) -> dict[str, Any]:
        name = f"{metric.replace('_', '-')}-per-project{'' if metric == EVERYWHERE else '-region'}"
        limits = [(more, region, int(self.compute.limits.get((region, metric), PLENTY))) for more, region in places]
        return self._info("compute.googleapis.com", metric.lower(), name, limits)

    def _vertex_info(self, service: str, metric: str, name: str) -> dict[str, Any]:
        limits = [self.limits.get((metric, region), PLENTY) for region in regions()]
        return self._info(service, metric, name, [({}, *pair) for pair in zip(regions(), limits, strict=True)])

    def _info(
        self, service: str, metric: str, name: str, limits: Sequence[tuple[dict[str, str], str, int]]
    ) -> dict[str, Any]:
        """Return a quota with its limits, each by further dimensions and region (empty: global)."""
        return {
            "name": f"projects/{self.project}/locations/global/services/{service}/quotaInfos/{name}",
            "quotaId": name,
            "metric": f"{service}/{metric}",
            "service": service,
            "isPrecise": True,
            "containerType": "PROJECT",
            "quotaIncreaseEligibility": {"isEligible": True},
            "dimensionsInfos": [
                {
                    "dimensions": {**more, **({"region": region} if region else {})},
                    "details": {"value": str(limit)} if limit else {},
                    "applicableLocations": [region or "global"],
                }
                for more, region, limit in limits
            ],
        }

    @route("POST", PREFERENCES, NAMED_PREFERENCES + "create", query="quotaPreferenceId ignoreSafetyChecks")
    def prefer(self, request: Request, project: str) -> Response:
        name = request.query.get("quotaPreferenceId") or f"preference-{len(self.preferences) + 1}"
        if name in self.preferences:
            raise ApiError(409, f"Quota preference {name} already exists.")
        body = request.json()
        config = {**body["quotaConfig"], "grantedValue": "0"}
        full = f"projects/{self.project}/locations/global/quotaPreferences/{name}"
        self.preferences[name] = {**body, "name": full, "quotaConfig": config, "reconciling": True}
        return json_response(self.preferences[name])

    @route("PATCH", PREFERENCE, NAMED_PREFERENCES + "patch", query="updateMask ignoreSafetyChecks allowMissing")
    def change(self, request: Request, project: str, name: str) -> Response:
        config = {**request.json()["quotaConfig"], "grantedValue": "0"}
        self.preferences[name] |= {"quotaConfig": config}
        return json_response(self.preferences[name])

    @route("GET", PREFERENCE, NAMED_PREFERENCES + "get")
    def preference(self, request: Request, project: str, name: str) -> Response:
        if name not in self.preferences:
            raise ApiError(404, f"Quota preference {name} not found.")
        return json_response(self.preferences[name])

    @route("GET", PREFERENCES, NAMED_PREFERENCES + "list", query="pageSize pageToken filter orderBy")
    def listed(self, request: Request, project: str) -> Response:
        return json_response({"quotaPreferences": [*self.preferences.values()]})

    @route(
        "GET",
        "/v3/projects/{project}/timeSeries",
        "monitoring.projects.timeSeries.list",
        query="filter interval.startTime interval.endTime pageToken",
    )
    def series(self, request: Request, project: str) -> Response:
        wanted = request.query["filter"]
        if "quota/allocation/usage" not in wanted or request.query["interval.startTime"][:4] < "2020":
            raise ApiError(400, f"The loopback cloud has no time series {wanted}")
        series = [self._series(metric, region, used) for (metric, region), used in self.usage.items()]
        return json_response({"timeSeries": series})

    def _series(self, metric: str, region: str, used: int) -> dict[str, Any]:
        labels = {"quota_metric": f"aiplatform.googleapis.com/{metric}"}
        where = {"project_id": self.project, "location": region, "service": "aiplatform.googleapis.com"}
        return {
            "metric": {"type": "serviceruntime.googleapis.com/quota/allocation/usage", "labels": labels},
            "resource": {"type": "consumer_quota", "labels": where},
            "points": [{"value": {"int64Value": str(used)}}],
        }
