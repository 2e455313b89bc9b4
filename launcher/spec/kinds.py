"""Types of the values in a spec, and the base class of its sections."""

from typing import Annotated

from msgspec import Meta, Struct


def matching(pattern: str, description: str, words: tuple[str, ...] = ()) -> Meta:
    """Return the bounds of a text that matches a pattern, which the reader checks (`Shape.pattern`). `words` are some
    that it accepts: an error suggests the one that was meant.

    msgspec would compile all patterns when the types are defined; a plan needs a few of them.
    """
    return Meta(
        description=description, extra={"pattern": pattern, "words": words}, extra_json_schema={"pattern": pattern}
    )


DURATION = r"^[1-9][0-9]{0,6}(s|m|h|d)$"
Duration = Annotated[str, matching(DURATION, "a duration: 90s, 30m, 6h or 2d")]
Name = Annotated[
    str, matching(r"^[a-z][a-z0-9-]{0,40}$", "a-z, 0-9 and -, starting with a letter, at most 41 characters")
]
LabelKey = Annotated[
    str,
    matching(
        r"^[a-z][a-z0-9_-]{0,62}$", "a label key: a-z, 0-9, - and _, starting with a letter, at most 63 characters"
    ),
]
LabelValue = Annotated[str, matching(r"^[a-z0-9_-]{0,63}$", "a label value: a-z, 0-9, - and _, at most 63 characters")]
EnvName = Annotated[str, matching(r"^[A-Za-z_][A-Za-z0-9_]{0,254}$", "a variable name: letters, digits and _")]
ShellLine = Annotated[str, matching(r"\S", "a line for a shell: text without a line break; join several with &&")]
SlurmName = Annotated[str, matching(r"^[A-Za-z0-9_.,-]+$", "a name on the cluster: letters, digits, _ . , and -")]
SbatchOption = Annotated[
    str,
    matching(
        r"^--(?!(job-name|dependency|requeue|no-requeue|open-mode|signal|nodes|ntasks|gpus|gres|time|output|error|comment"
        r"|chdir|array|wrap|export|partition|account|clusters|test-only|wait|parsable)\b)[a-z][a-z-]*(=[^\s'\"\\]+)?$",
        "a long option of sbatch without spaces, such as --qos=long, that launch does not set itself",
    ),
]
IMAGE = r"^(~?/.+|[a-z0-9][a-z0-9._:/-]*[a-z0-9](:[A-Za-z0-9_.-]+)?(@sha256:[0-9a-f]{64})?)$"
ContainerImage = Annotated[
    str,
    matching(IMAGE, "the image of a container that runs the job: HOST/NAME:TAG, or a path there, /shared/torch.sif"),
]
MOUNT = r"^~?/[^:,]*(:/[^:,]*)?$"
ContainerMount = Annotated[str, matching(MOUNT, "a folder there that the container sees: /data, or /data:/mnt/data")]
BUCKET = r"^gs://[a-z0-9][a-z0-9._-]{1,221}[a-z0-9](/.*)?$"
Region = Annotated[str, matching(r"^[a-z]+(-[a-z]+)+[0-9]+$", "a region, such as us-central1")]
Repository = Annotated[
    str,
    matching(
        r"^([a-z]+[a-z0-9-]*-docker\.pkg\.dev/([a-z0-9.-]+/)?[a-z0-9.:-]+/[a-z][a-z0-9-]*"
        r"|([a-z]+\.)?gcr\.io/.+"
        r"|(localhost|127\.0\.0\.1):[0-9]+(/[a-z0-9]+([._-]+[a-z0-9]+)*)+)$",
        "where the image is pushed: LOCATION-docker.pkg.dev/PROJECT/REPOSITORY (or "
        "localhost:PORT/NAME for tests); launch adds the image name and tag",
    ),
]
ZONE = r"[a-z]+(?:-[a-z]+)+[0-9]+-(?:ai[0-9]+)?[a-z]"
"""A zone: us-central1-a, or an AI zone such as us-central1-ai1a
(https://docs.cloud.google.com/compute/docs/regions-zones/ai-zones)."""
Zone = Annotated[str, matching(f"^{ZONE}$", "a zone, such as us-central1-a or us-central1-ai1a")]
Provisioning = Annotated[
    str,
    matching(
        r"^(standard|spot|flex-start|reservation:projects/[^/]+/zones/[^/]+/reservations/[^/]+)$",
        "standard, spot, flex-start or reservation:projects/P/zones/Z/reservations/R",
        ("standard", "spot", "flex-start"),
    ),
]
SecretVersion = Annotated[
    str,
    matching(
        r"^projects/[^/]+/secrets/[A-Za-z0-9_-]{1,255}/versions/(latest|[1-9][0-9]*)$",
        "a Secret Manager version, never the secret itself: projects/P/secrets/S/versions/latest",
    ),
]
Webhook = Annotated[
    str,
    matching(
        r"^(https?://[^\s/@\"\\\\]+(/[^\s\"\\\\]*)?|projects/[^/]+/secrets/[A-Za-z0-9_-]{1,255}/versions/(latest|[1-9][0-9]*))$",
        "a Secret Manager version with the webhook's URL: projects/P/secrets/S/versions/latest; for "
        "launch local also the URL itself, https://…",
    ),
]
Event = Annotated[
    str,
    matching(
        r"^(preempted|failed|finished|stalled|cost>([1-9][0-9]?|100)%)$",
        "preempted, failed, finished, stalled, or cost>80% (of limits.usd)",
        ("preempted", "failed", "finished", "stalled"),
    ),
]
ServiceAccount = Annotated[
    str, matching(r"^[^@\s]+@[^@\s]+\.gserviceaccount\.com$", "a service account: NAME@PROJECT.iam.gserviceaccount.com")
]
MountPoint = Annotated[str, matching(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", "a folder name: letters, digits, . _ and -")]


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of all sections: frozen, keyword-only, unknown keys forbidden."""
