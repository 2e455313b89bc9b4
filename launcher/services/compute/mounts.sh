
# --- Mounts ---------------------------------------------------------------------------------------------------------
# shellcheck shell=bash
# Only the startup script of a job with mounts has this part (launcher/plan/mounts.py). Each mount is made on the VM, at
# $MOUNTED/NUMBER, and bound into the container. Three functions of startup.sh get an additional step: their names stay,
# so that the script of all other VMs need not change.

MOUNTED=/mnt/launch
APT=/etc/apt

eval "start_container() $(declare -f start | tail -n +2)"
start() {
  mount_all
  start_container
}

eval "end_vm() $(declare -f go | tail -n +2)"
go() {
  unmount_all
  end_vm
}

eval "parameter() $(declare -f told | tail -n +2)"
told() {
  [[ $1 != words ]] || mounts volumes || return
  parameter "$@"
}

# list: number, kind, source, path, and ro or rw of each mount. volumes: arguments of docker run.
mounts() {
  python3 - "$STATE/told.json" "$MOUNTED" "$1" <<'PYTHON'
import json, sys

path, mounted, question = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    mounts = json.load(file)["mounts"]
for number, one in enumerate(mounts):
    mode = "ro" if one["read_only"] else "rw"
    if question == "list":
        words = [str(number), one["kind"], one["source"], one["path"], mode]
    else:
        words = ["--volume", f"{mounted}/{number}:{one['path']}:{mode}"]
    sys.stdout.write("".join(f"{word}\0" for word in words))
PYTHON
}

mount_all() {
  local words at
  say mount
  mounts list >"$STATE/mounts" 2>"$STATE/said" || leave 70 "the mounts can't be read: $(why)"
  mapfile -d '' -t words <"$STATE/mounts"
  for ((at = 0; at < ${#words[@]}; at += 5)); do
    mount_one "${words[@]:at:5}"
  done
}

# A mount that fails ends the attempt, before the container starts.
mount_one() { # NUMBER KIND SOURCE PATH MODE
  local folder="$MOUNTED/$1"
  ! mountpoint --quiet "$folder" || return 0 # since an earlier start of this script
  mkdir -p "$folder" && : >"$STATE/said"
  "mount_$2" "$3" "$folder" "$5" "$1" || leave 70 "$3 can't be mounted at $4: $(why)"
}

unmount_all() {
  local folder
  for folder in "$MOUNTED"/*; do
    ! timeout 10 mountpoint --quiet "$folder" || timeout 60 umount "$folder" || umount --lazy "$folder"
  done
}

saying() { patiently "$@" >"$STATE/said" 2>&1; } # why prints its last line

installed() { command -v "$1" >/dev/null; }

# What packages create is for all users, unlike the files of this script.
apt_get() {
  local status
  umask 022
  saying env DEBIAN_FRONTEND=noninteractive apt-get --quiet --yes -o DPkg::Lock::Timeout=300 "$@"
  status=$?
  umask 077
  return "$status"
}

# First with the lists of packages that the VM has: without Cloud NAT, asking for new ones takes minutes and fails.
install_packages() { apt_get install "$@" || { apt_get update && apt_get install "$@"; }; }

# Only the new source's list is fetched, for the same reason.
add_packages() { # NAME KEY-URL SOURCE
  local key="$APT/keyrings/launch-$1.asc" list="$APT/sources.list.d/launch-$1.list"
  mkdir -p "$APT/keyrings" "$APT/sources.list.d" && chmod 755 "$APT/keyrings" || return
  saying curl --silent --show-error --fail --max-time 60 --output "$key" "$2" &&
    echo "deb [signed-by=$key] $3 main" >"$list" && chmod 644 "$key" "$list" &&
    apt_get update -o "Dir::Etc::sourcelist=$list" -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0
}

codename() { sed -n 's/^VERSION_CODENAME=//p' /etc/os-release; }

# https://cloud.google.com/storage/docs/cloud-storage-fuse/install
install_gcsfuse() {
  add_packages gcsfuse https://packages.cloud.google.com/apt/doc/apt-key.gpg \
    "https://packages.cloud.google.com/apt gcsfuse-$(codename)" && install_packages gcsfuse
}

# Cloud Storage's own answer names what is missing; gcsfuse's log does not.
mount_bucket() { # BUCKET FOLDER MODE
  local account
  again 5 bucket_answers "$1" || { echo "status $(cat "$STATE/status") from Cloud Storage" >"$STATE/said"; return 1; }
  case $(cat "$STATE/status") in
    403)
      account=$(parameter value account)
      leave 70 "gs://$1 can't be mounted: the VM's account $account lacks storage.objects.list on this bucket: \
gcloud storage buckets add-iam-policy-binding gs://$1 --member=serviceAccount:$account --role=roles/storage.objectUser"
      ;;
    404) leave 70 "the bucket gs://$1 does not exist" ;;
  esac
  installed gcsfuse || again 3 install_gcsfuse || return
  saying gcsfuse --implicit-dirs --file-mode=666 --dir-mode=777 -o "allow_other,$3" "$1" "$2"
}

bucket_answers() {
  request GET "$STORAGE/storage/v1/b/$1/o?maxResults=1&fields=kind" >"$STATE/status"
  [[ $(cat "$STATE/status") =~ ^(200|403|404)$ ]]
}

mount_nfs() { # SERVER:/SHARE FOLDER MODE
  installed mount.nfs || again 3 install_packages nfs-common || return
  saying mount -t nfs -o "retry=1,$3" "$1" "$2" # minutes; mount waits two otherwise
}

# https://cloud.google.com/managed-lustre/docs/connect-from-compute-engine: a package for each kernel.
install_lustre() {
  add_packages lustre https://us-apt.pkg.dev/doc/repo-signing-key.gpg \
    "https://us-apt.pkg.dev/projects/lustre-client-binaries lustre-client-ubuntu-$(codename)" &&
    install_packages "lustre-client-modules-$(uname -r)" lustre-client-utils
}

mount_lustre() { # IP@tcp:/FILESYSTEM FOLDER MODE
  installed mount.lustre || again 2 install_lustre || {
    echo "no Lustre client for the kernel $(uname -r) ($(why)); boot an image that has one: vm.image" >"$STATE/kernel"
    mv "$STATE/kernel" "$STATE/said"
    return 1
  }
  saying mount -t lustre -o "noatime,$3" "$1" "$2"
}

device_answers() {
  again 24 test -e "$1" || { echo "the VM has no device ${1##*/}" >"$STATE/said"; return 1; }
}

# The mount's number is in the device's name. The first partition, if the disk has one.
mount_disk() { # DISK FOLDER MODE NUMBER
  local device="$DISKS/google-launch-mount-$4"
  device_answers "$device" || return
  [[ ! -e $device-part1 ]] || device=$device-part1
  saying mount -o "noatime,$3" "$device" "$2"
}

# A reboot finds the file system that the first boot made.
mount_new_disk() { # DISK FOLDER MODE NUMBER
  local device="$DISKS/google-launch-mount-$4"
  device_answers "$device" || return
  blkid "$device" >/dev/null || saying mkfs.ext4 -q -F -m 0 "$device" || return
  mount_disk "$@" && chmod 1777 "$2"
}
