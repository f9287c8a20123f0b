#!/bin/sh
# Gets a Debian 12 or 13 ready for the tests and the demo: the programs that
# the lab needs, and .venv with what the tests need. Run it as root, as often
# as you like: what is there already is left alone.
set -eu
cd "$(dirname "$0")/.."

# Program or file that shows that a package is there, and the package.
needed="
mmdebstrap:mmdebstrap
systemd-nspawn:systemd-container
qemu-system-x86_64:qemu-system-x86
qemu-img:qemu-utils
mkfs.ext4:e2fsprogs
minisign:minisign
skopeo:skopeo
umoci:umoci
zstd:zstd
unshare:util-linux
setpriv:util-linux
python3:python3
/usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring
/etc/ssl/certs/ca-certificates.crt:ca-certificates
"
PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in $needed; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || test -e "${pair%%:*}" || missing="$missing ${pair#*:}"
done
# ensurepip is what Debian leaves out of python3.
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "tests/prepare.sh: missing:$missing; install them, or run this as root on a Debian 12 or 13" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q update
    # shellcheck disable=SC2086 # a list of words
    apt-get -q -y --no-install-recommends install $missing </dev/null
fi

# The lists tell which mirror this machine uses; the lab asks the same one.
if [ "$(id -u)" = 0 ] && ! ls /var/lib/apt/lists/*Packages* >/dev/null 2>&1; then
    apt-get -q update
fi

stamp=.venv/prepared-for
wanted=$(cat pyproject.toml tests/prepare.sh | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! .venv/bin/python -c 'import pytest' 2>/dev/null; then
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
    echo "$wanted" >"$stamp"
fi
