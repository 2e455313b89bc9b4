"""Combine Vertex AI and Compute Engine into one service. Each request goes to the service that has the job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.jobs.job import Job
from launcher.plan.model import Attempt
from launcher.services.base import Listing, OfGoogle, Service
from launcher.spec.kinds import ZONE


class Services(OfGoogle):
    """The two services of one project.

    A place is a region on Vertex AI or a zone on Compute Engine. A service is called only if one of its places is
    named, because the user may have no access to the other service.
    """

    def __init__(self, vertex: Service, vms: Service) -> None:
        self.vertex, self.vms = vertex, vms

    @property
    def project(self) -> str:
        return self.vertex.project

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        return (self.vms if attempt.zone else self.vertex).create(attempt, body, request_id)

    def get(self, name: str) -> Job:
        return self._of(name).get(name)

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        places = list(regions)
        zones = [place for place in places if re.fullmatch(ZONE, place)]
        listings = [
            service.find(filter_, named, partly=partly)
            for service, named in ((self.vertex, [place for place in places if place not in zones]), (self.vms, zones))
            if named
        ]
        jobs = sorted((job for listing in listings for job in listing.jobs), key=lambda job: (-job.created, job.name))
        return Listing(tuple(jobs), {place: error for listing in listings for place, error in listing.unread.items()})

    def request_ids(self, name: str) -> frozenset[str]:
        return self._of(name).request_ids(name)

    def cancel(self, name: str) -> None:
        self._of(name).cancel(name)

    def release(self, job: Job) -> None:
        self._of(job.name).release(job)

    def forget(self, job: Job) -> None:
        self._of(job.name).forget(job)

    def _of(self, name: str) -> Service:
        return self.vms if "/zones/" in name else self.vertex
