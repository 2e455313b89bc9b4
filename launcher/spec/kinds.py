"""Kinds of values that a spec's fields take, and what all of its sections have in common."""

from typing import Annotated

from msgspec import Meta, Struct

Duration = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,6}(s|m|h|d)$", description="a time: 90s, 30m, 6h or 2d")]
Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,40}$", description="a-z, 0-9 and -, starting with a letter")]
LabelKey = Annotated[
    str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,62}$", description="a label's name: a-z, 0-9, - and _, at most 63")
]
LabelValue = Annotated[
    str, Meta(pattern=r"^[a-z0-9_-]{0,63}$", description="a label's value: a-z, 0-9, - and _, at most 63")
]
EnvName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$", description="a variable's name: letters, digits and _")
]
BUCKET = r"^gs://[a-z0-9][a-z0-9._-]{1,221}[a-z0-9](/.*)?$"
Region = Annotated[str, Meta(pattern=r"^[a-z]+(-[a-z]+)+[0-9]+$", description="a region, such as us-central1")]
ZONE = r"[a-z]+(?:-[a-z]+)+[0-9]+-(?:ai[0-9]+)?[a-z]"
"""A zone: us-central1-a, or an AI zone such as us-central1-ai1a
(https://docs.cloud.google.com/compute/docs/regions-zones/ai-zones)."""
Zone = Annotated[str, Meta(pattern=f"^{ZONE}$", description="a zone, such as us-central1-a or us-central1-ai1a")]
Provisioning = Annotated[
    str,
    Meta(
        pattern=r"^(standard|spot|flex-start|reservation:projects/[^/]+/zones/[^/]+/reservations/[^/]+)$",
        description="standard, spot, flex-start or reservation:projects/P/zones/Z/reservations/R",
    ),
]
SecretVersion = Annotated[
    str,
    Meta(
        pattern=r"^projects/[^/]+/secrets/[A-Za-z0-9_-]{1,255}/versions/(latest|[1-9][0-9]*)$",
        description="a secret in Secret Manager, never its value: projects/P/secrets/S/versions/latest",
    ),
]
ServiceAccount = Annotated[
    str,
    Meta(
        pattern=r"^[^@\s]+@[^@\s]+\.gserviceaccount\.com$",
        description="a service account: NAME@PROJECT.iam.gserviceaccount.com",
    ),
]
MountPoint = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="one folder's name: letters, digits, . _ and -")
]


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all models: frozen, by keyword, no unknown key."""
