"""Types of the values in a spec, and the base class of its sections.

`extra={"words": …}` are the words that a pattern accepts: an error suggests the one that was meant.
"""

from typing import Annotated

from msgspec import Meta, Struct

Duration = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,6}(s|m|h|d)$", description="a duration: 90s, 30m, 6h or 2d")]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9-]{0,40}$", description="a-z, 0-9 and -, starting with a letter, at most 41 characters"
    ),
]
LabelKey = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9_-]{0,62}$",
        description="a label key: a-z, 0-9, - and _, starting with a letter, at most 63 characters",
    ),
]
LabelValue = Annotated[
    str, Meta(pattern=r"^[a-z0-9_-]{0,63}$", description="a label value: a-z, 0-9, - and _, at most 63 characters")
]
EnvName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$", description="a variable name: letters, digits and _")
]
BUCKET = r"^gs://[a-z0-9][a-z0-9._-]{1,221}[a-z0-9](/.*)?$"
Region = Annotated[str, Meta(pattern=r"^[a-z]+(-[a-z]+)+[0-9]+$", description="a region, such as us-central1")]
Repository = Annotated[
    str,
    Meta(
        pattern=r"^([a-z]+[a-z0-9-]*-docker\.pkg\.dev/([a-z0-9.-]+/)?[a-z0-9.:-]+/[a-z][a-z0-9-]*"
        r"|([a-z]+\.)?gcr\.io/.+"
        r"|(localhost|127\.0\.0\.1):[0-9]+(/[a-z0-9]+([._-]+[a-z0-9]+)*)+)$",
        description="where the image is pushed: LOCATION-docker.pkg.dev/PROJECT/REPOSITORY (or "
        "localhost:PORT/NAME for tests); launch adds the image name and tag",
    ),
]
ZONE = r"[a-z]+(?:-[a-z]+)+[0-9]+-(?:ai[0-9]+)?[a-z]"
"""A zone: us-central1-a, or an AI zone such as us-central1-ai1a
(https://docs.cloud.google.com/compute/docs/regions-zones/ai-zones)."""
Zone = Annotated[str, Meta(pattern=f"^{ZONE}$", description="a zone, such as us-central1-a or us-central1-ai1a")]
Provisioning = Annotated[
    str,
    Meta(
        pattern=r"^(standard|spot|flex-start|reservation:projects/[^/]+/zones/[^/]+/reservations/[^/]+)$",
        description="standard, spot, flex-start or reservation:projects/P/zones/Z/reservations/R",
        extra={"words": ("standard", "spot", "flex-start")},
    ),
]
SecretVersion = Annotated[
    str,
    Meta(
        pattern=r"^projects/[^/]+/secrets/[A-Za-z0-9_-]{1,255}/versions/(latest|[1-9][0-9]*)$",
        description="a Secret Manager version, never the secret itself: projects/P/secrets/S/versions/latest",
    ),
]
Webhook = Annotated[
    str,
    Meta(
        pattern=r"^(https?://[^\s/@\"\\\\]+(/[^\s\"\\\\]*)?|projects/[^/]+/secrets/[A-Za-z0-9_-]{1,255}/versions/(latest|[1-9][0-9]*))$",
        description="a Secret Manager version with the webhook's URL: projects/P/secrets/S/versions/latest; for "
        "launch local also the URL itself, https://…",
    ),
]
Event = Annotated[
    str,
    Meta(
        pattern=r"^(preempted|failed|finished|stalled|cost>([1-9][0-9]?|100)%)$",
        description="preempted, failed, finished, stalled, or cost>80% (of limits.usd)",
        extra={"words": ("preempted", "failed", "finished", "stalled")},
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
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="a folder name: letters, digits, . _ and -")
]


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of all sections: frozen, keyword-only, unknown keys forbidden."""
