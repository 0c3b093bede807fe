#!/usr/bin/env bash
# Stands for a srun with Pyxis. A step with --container-image runs in a mount namespace of its own, where /tmp is empty but
# for --container-mounts, as in Enroot's containers (its conf/mounts/10-system.fstab). All else is the node's; no image is
# read. Named containers, which share a namespace, are refused.
set -euo pipefail

contain() { # MOUNTS FOLDER COMMAND ...
    local pairs pair outside
    mount --rbind /tmp /mnt
    mount -t tmpfs tmpfs /tmp
    IFS=, read -ra pairs <<<"$1"
    for pair in "${pairs[@]}"; do
        outside=${pair%%:*}
        case $outside in /tmp | /tmp/*) outside=/mnt${outside#/tmp} ;; esac
        mkdir -p "${pair#*:}"
        mount --rbind "$outside" "${pair#*:}"
    done
    umount --lazy /mnt
    cd "$2"
    shift 2
    exec "$@"
}

image='' mounts='' folder=/ options=()
while [[ ${1:-} == --* ]]; do
    case $1 in
    --container-image=*) image=${1#*=} ;;
    --container-mounts=*) mounts=${1#*=} ;;
    --container-workdir=*) folder=${1#*=} ;;
    --container-*)
        echo "srun: the stand-in for Pyxis has no $1" >&2
        exit 1
        ;;
    *) options+=("$1") ;;
    esac
    shift
done
[ -n "$image" ] || exec /usr/bin/srun "${options[@]}" "$@"
if [ ! -f "$image" ]; then
    echo "srun: No such file or directory: $image" >&2
    exit 1
fi
exec /usr/bin/srun "${options[@]}" unshare --mount --propagation private \
    bash -euc "$(declare -f contain); contain \"\$@\"" contain "$mounts" "$folder" "$@"
