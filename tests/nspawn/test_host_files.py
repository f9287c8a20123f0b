"""Files that other programs read as well: our reading of them is theirs."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import pytest

from stratum.host.fstab import disable_swap_lines, swap_lines
from stratum.host.sysctlfiles import find_winner, read_assignments
from stratum.system import Host
from tests.lab.nspawn import NspawnMachine
from tests.unit.hosting import put

# Settings of one interface that belong to the network namespace, and take any number.
NAMES = ("app_solicit", "ucast_solicit", "mcast_solicit", "proxy_qlen")
DIRECTORIES = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
FILES = ("10-a.conf", "50-b.conf", "99-sysctl.conf", "99-zz.conf", "zz.conf", "100.conf", "README")


def random_line(chance: random.Random) -> str:
    name = chance.choice(NAMES)
    key = chance.choice(
        [
            f"net.ipv4.neigh.lo.{name}",
            f"net/ipv4/neigh/lo/{name}",
            f" net.ipv4.neigh.lo.{name} ",
            f"-net.ipv4.neigh.lo.{name}",
            f"net.ipv4.neigh.*.{name}",
            f"net.ipv4.neigh.l?.{name}",
            f"# net.ipv4.neigh.lo.{name}",
            f"; net.ipv4.neigh.lo.{name}",
            f"net.ipv4.neigh.lo.{name}.",
        ]
    )
    if chance.random() < 0.08:
        return f"-net.ipv4.neigh.lo.{name}"
    return f"{key}={chance.choice(['', ' '])}{chance.randint(100, 9000)}"


@pytest.mark.parametrize("seed", range(12))
def test_the_file_that_decides_a_sysctl_is_the_one_that_systemd_takes(
    shared_machine: NspawnMachine, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    host = Host(str(tmp_path))
    script = ["mount -t tmpfs none /run"]
    script += [f"mkdir -p {directory}; mount -t tmpfs none {directory}" for directory in DIRECTORIES]
    for _ in range(chance.randint(2, 9)):
        path = f"{chance.choice(DIRECTORIES)}/{chance.choice(FILES)}"
        text = "".join(f"{random_line(chance)}\n" for _ in range(chance.randint(1, 5)))
        put(host, path, text)
        script.append(f"cat >{path} <<'END'\n{text}END")
    controls = [f"/proc/sys/net/ipv4/neigh/lo/{name}" for name in NAMES]
    # 77 is nothing that a line says.
    script += [f"echo 77 >{control}" for control in controls]
    script += ["/lib/systemd/systemd-sysctl 2>/dev/null || true", f"cat {' '.join(controls)}"]
    shown = shared_machine.run(["unshare", "--net", "--mount", "sh", "-euc", "\n".join(script)]).stdout.split()
    assignments = read_assignments(host)
    winners = [find_winner(assignments, f"net.ipv4.neigh.lo.{name}") for name in NAMES]
    assert [winner.value if winner else "77" for winner in winners] == shown


LINES = [
    b"/swap.img none swap sw 0 0",
    b"UUID=1234 swap swap",
    b"/dev/sda2\tswap\t swap\tpri=5",
    b" \t/dev/sda3 none swap sw,noauto 0 0",
    b"/swap\\040file none swap sw 0 0",
    b"/dev/zram0 none swap",
    b"#/old none swap sw 0 0",
    b"  # /dev/sda2 none swap sw 0 0",
    b"UUID=x /srv/swap ext4 defaults 0 2",
    b"/dev/swap /swap ext4 swap 0 0",
    b"/dev/sda9 none swapfs sw",
    b"LABEL=swap /data xfs defaults 0 0",
    b"",
]


def sources(machine: NspawnMachine, table: bytes) -> list[str]:
    """The swaps in a table as libmount, and with it swapon, reads it."""
    machine.write("/root/fstab", table)
    argv = ["findmnt", "--tab-file", "/root/fstab", "--types", "swap", "--noheadings", "--raw", "--output", "SOURCE"]
    return machine.run(argv, check=False).lines


@pytest.mark.parametrize("end", [b"\n", b"\n\n"])
def test_the_lines_of_swap_are_those_that_swapon_would_take(shared_machine: NspawnMachine, end: bytes) -> None:
    table = end.join(LINES)
    theirs = sources(shared_machine, table)
    ours = [line.split()[0].decode().replace("\\040", "\\x20") for line in swap_lines(table)]
    assert theirs == ours
    assert len(ours) == 6
    after = disable_swap_lines(table)
    assert sources(shared_machine, after) == []
    others = ["findmnt", "--tab-file", "/root/fstab", "--noheadings", "--raw", "--output", "SOURCE,TARGET,FSTYPE"]
    left = shared_machine.run(others).lines
    assert sorted(chain.from_iterable(line.split()[1:2] for line in left)) == ["/data", "/srv/swap", "/swap", "none"]
