"""What a machine holds at one moment, and what differs between two moments.

A snapshot is taken by a script inside the machine, so it works in either tier. It has everything: each file
of each file system that is not the kernel's own, systemd's units and unit files, the mount table, interfaces,
addresses, routes, firewall rules, forwarding, cgroups and processes. What changes by itself on an idle machine
is named in ``IGNORED``, each with the reason; nothing else is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tests.lab.machine import Machine

# The digest of everything would take a second (in qemu: a minute). In some places a file's change time stands for
# it: no program can set that, so a file that has the same one was not touched.
_SCRIPT = r"""
import hashlib, json, os, re, shutil, stat, subprocess, sys, time

TIMED = ("/usr/", "/boot/", "/var/log/journal/", "/run/log/journal/")
HASHED = ("/usr/local/",)

hashed = {}

def digest(path, info):
    # Stratum's programs have two names each.
    key = info.st_dev, info.st_ino
    if key not in hashed:
        try:
            with open(path, "rb") as file:
                hashed[key] = hashlib.sha256(file.read()).hexdigest()
        except OSError as error:
            return type(error).__name__
    return hashed[key]

def describe(path, info):
    mode = info.st_mode
    found = f"{stat.filemode(mode)} {info.st_uid}:{info.st_gid}"
    if stat.S_ISLNK(mode):
        return f"{found} -> {os.readlink(path)}"
    if not stat.S_ISREG(mode):
        return found
    timed = path.startswith(TIMED) and not path.startswith(HASHED)
    return f"{found} {info.st_size} " + (f"changed {info.st_ctime_ns}" if timed else digest(path, info))

def files(skip):
    found, pending = {}, ["/"]
    while pending:
        directory = pending.pop()
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            path = os.path.join(directory, name)
            try:
                info = os.lstat(path)
                found[path] = describe(path, info)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode) and path not in skip:
                pending.append(path)
    return found

def lines(*argv):
    if shutil.which(argv[0]) is None:
        # Not every machine has systemd or a firewall, and then there is nothing of it to see.
        return []
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    return done.stdout.splitlines()

def asked(*argv):
    # An answer that did not come (systemd is slow on a loaded machine) is not an empty one.
    for _ in range(10):
        found = lines(*argv)
        if found:
            return found
        time.sleep(1)
    return []

def table(rows):
    # Several equal rows are one entry with a count.
    found = {}
    for row in rows:
        found[row] = found.get(row, 0) + 1
    return {row: f"{count} times" for row, count in found.items()}

def units():
    listed = asked("systemctl", "list-units", "--all", "--plain", "--no-legend")
    rows = [line.replace("*", " ").split(None, 4) for line in listed]
    return {row[0]: " ".join(row[1:4]) for row in rows if len(row) >= 4}

def unit_files():
    rows = [line.split() for line in asked("systemctl", "list-unit-files", "--no-legend")]
    return {row[0]: row[1] for row in rows if row}

def mounts():
    rows = [line.split(" ") for line in open("/proc/self/mountinfo").read().splitlines()]
    # Without the numbers, which the kernel gives anew.
    return table(" ".join([row[4], row[3], *row[5:6], *row[row.index("-") + 1:]]) for row in rows)

def settle():
    # What the kernel and systemd finish a second or two after a command has ended, also when nobody does anything:
    # an address gets its local route when nobody else was seen to have it, a bridge that lost its last port is down
    # when its carrier was looked at again, a job that was queued is run.
    for _ in range(100):
        if not (lines("ip", "-6", "-o", "addr", "show", "tentative") or idle_bridges() or lines(*JOBS)):
            return
        time.sleep(0.1)

JOBS = ("systemctl", "list-jobs", "--no-legend", "--plain")

def idle_bridges():
    found = []
    for place in ("/sys/class/net/" + name for name in os.listdir("/sys/class/net")):
        try:
            if not os.listdir(place + "/brif") and open(place + "/operstate").read() != "down\n":
                found.append(place)
        except OSError:
            continue
    return found

def interfaces():
    found = {}
    for link in json.loads("".join(lines("ip", "-j", "-d", "addr")) or "[]"):
        addresses = [f"{item['local']}/{item['prefixlen']}" for item in link.get("addr_info", [])]
        kind = link.get("linkinfo", {}).get("info_kind", "")
        found[link["ifname"]] = " ".join([link.get("operstate", ""), kind, *addresses])
    return found

def firewall():
    nft = lines("nft", "list", "ruleset")
    return table([f"nft {number:04} {line}" for number, line in enumerate(nft)])

def forwarding():
    found = {}
    for base, _, names in os.walk("/proc/sys/net"):
        for name in names:
            if name in ("ip_forward", "forwarding", "route_localnet", "rp_filter") or "bridge-nf" in name:
                try:
                    found[f"{base}/{name}"] = open(f"{base}/{name}").read().strip()
                except OSError:
                    pass
    return found

def cgroups():
    return {path: "" for path, _, _ in os.walk("/sys/fs/cgroup")}

def processes():
    mine, rows = {os.getpid()}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if words and int(name) not in mine:
            rows.append(words)
    return table(rows)

settle()
print(json.dumps({
    "processes": processes(), "files": files({"/proc", "/sys"}), "units": units(), "unit files": unit_files(),
    "mounts": mounts(), "interfaces": interfaces(), "routes": table(lines("ip", "route", "show", "table", "all")),
    "firewall": firewall(), "forwarding": forwarding(), "cgroups": cgroups(),
}))
"""

#: What may differ between two moments of a machine on which nothing was done: section, pattern of the whole
#: entry, reason.
IGNORED: tuple[tuple[str, str, str], ...] = (
    ("files", r"/dev/pts/\d+", "a terminal of the lab or of systemd comes and goes"),
    ("files", r"/(var|run)/log/journal/.*|/run/systemd/journal/.*", "journald writes what happens"),
    ("files", r"/run/systemd/(units|transient|generator.*|propagate)(/.*)?", "systemd's own memory of units"),
    ("files", r"/run/stratum/lock", "it holds the process id of the last run"),
    ("files", r"/run/udev/.*", "udev remembers each interface that there was"),
    ("processes", r"\(udev-worker\)", "udev keeps some for a few seconds after the last event"),
    ("units", r"session-.*\.scope|user@.*|user-.*\.slice|user-runtime-dir@.*", "nobody logs in; systemd may tidy up"),
    ("units", r".*\.mount", "systemd learns late of a mount and keeps a unit after it; mounts are a section"),
    ("cgroups", r"/sys/fs/cgroup(/systemd|/unified)?/lab(/.*)?", "the lab puts each of its commands in one of its own"),
)

#: What may differ too when a qemu machine has rebooted in between.
REBOOTED: tuple[tuple[str, str, str], ...] = (
    ("files", r"/dev/.*", "devtmpfs is the kernel's; the disk with the stick's files is there at first boot only"),
    ("files", r"/run/stratum-lab-\d+\.(err|out)", "the lab's own: what its commands print"),
    ("files", r"/run/qga.state", "the lab's agent counts its commands"),
    ("files", r"/run/utmp|/var/log/wtmp|/var/lib/systemd/random-seed", "every boot writes them"),
    ("files", r"/(var/)?tmp/systemd-private-.*", "systemd gives them new names at each boot"),
    ("units", r".*vdb\.device|dev-disk-by\\x2d.*\.device", "the lab's disk with the stick's files, as above"),
    ("mounts", r"/dev .*|/run .*|/proc/sys/fs/binfmt_misc .*", "their sizes and numbers are those of the boot"),
)


@dataclass(frozen=True)
class Snapshot:
    """The state of a machine: for each section, entries and what is known of each."""

    sections: Mapping[str, Mapping[str, str]]

    def __getitem__(self, section: str) -> Mapping[str, str]:
        return self.sections[section]


def snapshot(machine: Machine) -> Snapshot:
    """Look at everything on ``machine``; changes nothing there."""
    done = machine.run(["python3", "-IS", "-c", _SCRIPT], timeout=600)
    return Snapshot(json.loads(done.raw_stdout))


def difference(before: Snapshot, after: Snapshot, *, ignore: Collection[tuple[str, str, str]] = ()) -> list[str]:
    """What was added, removed or changed; empty when the two are the same but for what ``IGNORED`` names.

    ``ignore`` adds to ``IGNORED`` for one comparison; it has the same form, with a reason.
    """
    passed_over = [(section, re.compile(pattern)) for section, pattern, _ in (*IGNORED, *ignore)]
    found = []
    for section, old in before.sections.items():
        new = after.sections[section]
        for entry in sorted({*old, *new}):
            if old.get(entry) == new.get(entry):
                continue
            if any(section == where and pattern.fullmatch(entry) for where, pattern in passed_over):
                continue
            if entry not in old:
                found.append(f"{section}: + {entry} ({new[entry]})")
            elif entry not in new:
                found.append(f"{section}: - {entry} ({old[entry]})")
            else:
                found.append(f"{section}: {entry}: {old[entry]} became {new[entry]}")
    return found


def written(before: Snapshot, after: Snapshot, *, ignore: Collection[tuple[str, str, str]] = ()) -> list[str]:
    """The paths of files, links and directories that were made, changed or removed between two moments."""
    passed_over = [re.compile(pattern) for section, pattern, _ in (*IGNORED, *ignore) if section == "files"]
    old, new = before["files"], after["files"]
    changed = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
    return [path for path in changed if not any(pattern.fullmatch(path) for pattern in passed_over)]


def check_same(before: Snapshot, after: Snapshot, *, ignore: Collection[tuple[str, str, str]] = ()) -> None:
    """Fail, with the whole difference in the message, if two moments differ."""
    found = difference(before, after, ignore=ignore)
    assert not found, "\n".join([f"{len(found)} differences:", *found])
