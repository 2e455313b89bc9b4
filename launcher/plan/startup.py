"""The startup scripts of VMs, as text. Compute Engine runs them as root at every boot, so each step may come twice."""

from __future__ import annotations

import shlex

from launcher.plan.model import Container, Image

SHM = "16g"
"""Shared memory of the container: Docker's 64 MB end NCCL and DataLoader workers with a bus error."""

LOCAL_SSD = """\
# Local SSDs, when there are any: one striped, fast, temporary disk at /mnt/localssd. Its content is lost at a stop.
mapfile -t disks < <(ls /dev/disk/by-id/google-local-nvme-ssd-* 2>/dev/null | grep -v -- -part || true)
if ((${#disks[@]})) && ! mountpoint -q /mnt/localssd; then
  disk=${disks[0]}
  if ((${#disks[@]} > 1)); then
    disk=/dev/md0
    [[ -e $disk ]] || mdadm --create "$disk" --run --level=0 --raid-devices=${#disks[@]} "${disks[@]}"
  fi
  blkid "$disk" >/dev/null || mkfs.ext4 -q -F "$disk"
  mkdir -p /mnt/localssd
  mount -o discard,noatime "$disk" /mnt/localssd
  chmod 1777 /mnt/localssd
fi
"""

TRAINING = """\
metadata() {{ curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/$1"; }}

# Whatever happens, the VM goes: it deletes itself, and if that is refused it powers off.
# maxRunDuration in the request is the limit behind this that Google keeps.
leave() {{
  set +e # else the first answer that is missing would end this before poweroff
  token=$(metadata instance/service-accounts/default/token | sed 's/.*"access_token":"\\([^"]*\\)".*/\\1/')
  # instance/zone is projects/NUMBER/zones/ZONE, which the API takes as it is.
  curl -sf -X DELETE -H "Authorization: Bearer $token" \\
    "https://compute.googleapis.com/compute/v1/$(metadata instance/zone)/instances/$(metadata instance/name)" \\
    || poweroff
}}
trap leave EXIT

# The driver may still be on its way at the first boot.
for _ in $(seq 120); do nvidia-smi >/dev/null 2>&1 && break; sleep 5; done
nvidia-smi

image={image}
gcloud auth configure-docker --quiet "${{image%%/*}}"
for _ in 1 2 3 4 5; do docker pull --quiet "$image" && break; sleep 10; done

# SIGTERM reaches train.node when the machine is taken away; 25 s of the 30 s of notice are for saving.
docker run --rm --name launch --gpus all --network host --shm-size {shm} --ulimit memlock=-1 --stop-timeout 25 \\
{env}  --entrypoint {entrypoint} "$image" {arguments}
"""


def workplace() -> str:
    """A VM to work on: nothing but its local SSDs."""
    return f"#!/bin/bash\nset -euo pipefail\n{LOCAL_SSD}"


def training(image: Image, container: Container) -> str:
    """A VM that runs one container and then deletes itself."""
    entrypoint, *rest = container.command
    body = TRAINING.format(
        image=shlex.quote(image.uri),
        shm=SHM,
        env="".join(f"  --env {shlex.quote(f'{name}={value}')} \\\n" for name, value in container.env.items()),
        entrypoint=shlex.quote(entrypoint),
        arguments=shlex.join([*rest, *container.args]),
    )
    return f"#!/bin/bash\nset -euo pipefail\n{LOCAL_SSD}{body}"
