#!/bin/sh
# Runs systemd-nspawn for one machine of the lab. It is the first process of a
# private mount and process namespace: when it goes, everything in there goes.
#
# $1 root to use as the lower layer   $2 name of the machine and its cgroup
# $3 size limit of what it may write  $4 1: cgroup v2 inside, 0: cgroup v1
# The rest is given to systemd-nspawn.
set -eu
lower=$1 name=$2 size=$3 unified=$4
shift 4

mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/machine
mount -t tmpfs -o "mode=755,size=$size" tmpfs /run/machine
cd /run/machine
mkdir upper work root varlib varlib/upper
mount -t overlay -o "lowerdir=$lower,upperdir=upper,workdir=work" overlay root
# containerd's snapshots are overlays, and an overlay cannot lie on another one.
cp -a "$lower/var/lib/." varlib/upper/

# systemd-nspawn wants one tree of cgroups. The outer machine keeps its own view.
umount -l /sys/fs/cgroup
tree=/sys/fs/cgroup
if [ "$unified" = 1 ]; then
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$tree"
else
    mount -t tmpfs -o mode=755 tmpfs "$tree"
    tree=$tree/systemd
    mkdir "$tree"
    mount -t cgroup -o nosuid,nodev,noexec,none,name=systemd cgroup "$tree"
fi
mkdir -p "$tree/$name/nspawn"
if [ "$unified" = 1 ]; then
    for controller in $(cat "$tree/$name/cgroup.controllers"); do
        echo "+$controller" >"$tree/$name/cgroup.subtree_control" || true
    done
fi

export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY="$unified"
while :; do
    status=0
    (
        # A shell knows its own number only through another one's eyes.
        sh -c 'echo $PPID' >/run/machine/pid
        read -r self </run/machine/pid
        echo "$self" >"$tree/$name/nspawn/cgroup.procs"
        exec systemd-nspawn --quiet --directory=/run/machine/root \
            --bind=/run/machine/varlib/upper:/var/lib --machine="$name" --hostname=stratum-lab \
            --register=no --keep-unit --private-network --capability=all \
            --system-call-filter='@keyring bpf' --console=read-only --link-journal=no \
            --resolv-conf=off --timezone=off --kill-signal=SIGRTMIN+3 "$@"
    ) || status=$?
    # 133 asks for a reboot; "power" is how the lab says that power comes back.
    if [ -e /run/machine/power ]; then
        rm /run/machine/power
    elif [ "$status" != 133 ]; then
        exit "$status"
    fi
    echo "--- next boot ---"
done
