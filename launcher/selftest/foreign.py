"""Reduce answers about other users' resources to their shape: keys, kinds of values, and known enums.

An allow-list: a text stays if it belongs to this selftest, comes from one of Google's public catalogs, or stands in a
field that only ever holds Google's own words. Numbers and booleans stay, except in logs, metadata and people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from launcher.selftest.kit import OWN

NAMES: Final = ("name", "displayName", "id", "bucket", "logsBucket", "selfLink", "targetLink")
"""Fields with the name of the resource that contains them."""
PUBLIC: Final = re.compile(
    r"GET .*/(skus|machineTypes/\*|acceleratorTypes/\*|regions/\*|images/family/\*)|.*Permissions"
)
"""Operations whose answers are Google's catalogs or permissions."""
HARMLESS: Final = re.compile(
    "@type|IPProtocol|architecture|code|currencyCode|direction|domain|format|kind|locationType|metric|mode|reason|shell"
    "|natIpAllocateOption|operatingSystemType|operationType|sourceSubnetworkIpRangesToNat|state|status|storageClass"
    "|usageType"
)
"""Fields whose values are Google's own terms."""
WORD: Final = re.compile(r"[\w#./-]{1,80}")
STRICT: Final = frozenset({"entries", "commonInstanceMetadata", "loginProfile", "posixAccounts", "sshPublicKeys"})
"""Fields that are reduced to their shape."""
FREE: Final = frozenset({"labels", "annotations", "jsonPayload", "protoPayload", "sshPublicKeys"})
"""Maps whose keys are chosen by users."""
PEOPLE: Final = "/users/"
"""Occurs only in the paths of OS Login."""
THINGS: Final = re.compile(
    r"(?<=/)(subnetworks|instances|repositories|builds|images|b|o|users)/(?!launch-selftest-)[^/:]+"
)


def reduced(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded call without other users' data. Lists keep their length."""
    if PEOPLE in str(call.get("path", "")):
        shapes = {name: shape(call.get(name), strict=True) for name in ("request", "answer")}
        return {**call, "path": call["operation"], **shapes}
    if PUBLIC.fullmatch(str(call.get("operation", ""))):
        return {**call}
    answer = call.get("answer")
    if not (isinstance(answer, Mapping) and answer.keys() == {"error"}):  # an error message explains a failed step
        answer = shape(answer)
    return {**call, "path": THINGS.sub(r"\1/*", str(call.get("path", ""))), "answer": answer}


def shape(value: Any, name: str = "", *, strict: bool = False) -> Any:
    """Return JSON of the same shape. `name` is the field that contains it."""
    strict = strict or name in STRICT
    if isinstance(value, Mapping):
        if not strict and is_own(value):
            return value
        keys = [str(number) for number in range(len(value))] if name in FREE else [*map(str, value)]
        return {key: shape(each, key, strict=strict) for key, each in zip(keys, value.values(), strict=True)}
    if isinstance(value, list):
        return [shape(each, name, strict=strict) for each in value]
    if isinstance(value, str):
        return value if HARMLESS.fullmatch(name) and WORD.fullmatch(value) else "string"
    return type(value)() if strict and isinstance(value, int | float) and not isinstance(value, bool) else value


def is_own(value: Mapping[str, Any]) -> bool:
    """Return whether a resource belongs to a selftest, judging by its name."""
    return any(OWN.search(str(value.get(name, ""))) for name in NAMES)
