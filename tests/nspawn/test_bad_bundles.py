"""Bad bundles through `up` on a real host: each is refused with its exit status, and nothing is left behind."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stratum.bundle.oci import LAYER_GZIP, LAYER_TAR
from tests import bundles
from tests.bundles import ARM64, Bundle, Entry, Part, Publisher
from tests.lab import demo
from tests.lab.image import Image
from tests.lab.machine import Result
from tests.lab.node import BUNDLE, IMAGE, PYZ, TRUST, Node, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package
from tests.lab.snapshot import Snapshot, check_same, snapshot

MachineNode = Node[NspawnMachine]

FAILED, MALFORMED, NOT_TRUSTED, HOST_REFUSED = 1, 12, 13, 10
CANARY = "/root/canary"


@pytest.fixture(scope="module")
def host(bare: MachineNode) -> MachineNode:
    """A machine that trusts the factory of bundles in memory too, with a file that nobody may touch."""
    bare.machine.write(f"{TRUST}/factory.pub", bundles.key_pair()[1].to_bytes())
    bare.machine.write(CANARY, "canary\n", 0o640)
    return bare


@pytest.fixture
def before(host: MachineNode) -> Iterator[Snapshot]:
    """The machine before the test, and its check afterwards."""
    state = snapshot(host.machine)
    yield state
    check_same(state, snapshot(host.machine))


def holding(entries: Sequence[Any], **part: Any) -> Publisher:
    """A publisher of a component that calls itself containerd and holds these members."""
    return Publisher(parts=[Part("containerd", entries, version="1.6.20", **part)])


def up_with(host: MachineNode, bundle: Bundle, *arguments: str) -> Result:
    """Give a bundle to `up` through a pipe, and if it is refused there, check that a file fares no better."""
    data = bundle.tar()
    piped = host.stratum("up", "--bundle", "-", *arguments, check=False, input=data)
    host.machine.write("/root/bad.tar", data)
    done = host.stratum("up", "--bundle", "/root/bad.tar", *arguments, check=False)
    host.machine.run(["rm", "/root/bad.tar"])
    assert piped.status == done.status, f"{piped.describe()}\n{done.describe()}"
    assert refusal(piped) == refusal(done)
    return done


def check_refused(done: Result, status: int, reference: str, *words: str) -> None:
    """The exit status, the reference, one line each of error, state and hint; ``words`` are in the error."""
    assert (done.status, refusal(done)) == (status, reference), done.describe()
    assert "\nstate: nothing was changed\n" in f"\n{done.stderr}", done.describe()
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.describe()


# -- the real bundle, damaged on its way ------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A member of the bundle's tar: where its header, its content and its end are."""

    name: str
    header: int
    content: int
    end: int

    @property
    def middle(self) -> int:
        return (self.content + self.end) // 2


@pytest.fixture(scope="module")
def places(shipped: tuple[demo.Publisher, Path]) -> list[Place]:
    """The members of the real bundle that have content."""
    with tarfile.open(shipped[1]) as archive:
        return [
            Place(item.name, item.offset, item.offset_data, item.offset_data + item.size)
            for item in archive
            if item.size
        ]


def test_a_bundle_that_is_cut_short_is_refused(host: MachineNode, before: Snapshot, places: list[Place]) -> None:
    size = int(host.machine.run(["stat", "-c", "%s", BUNDLE]).stdout)
    last = places[-1].end
    cuts = {0, 1, 512, last - 1, last, size - 1024, size - 512, size - 1}
    cuts |= {place.header for place in places[1:6]} | {place.middle for place in places}
    # Whole, then with the bytes gone from the end: the same file, made shorter and shorter.
    host.machine.run(["cp", BUNDLE, "/root/cut.tar"])
    for cut in sorted(cuts, reverse=True):
        host.machine.run(["truncate", "-s", str(cut), "/root/cut.tar"])
        done = host.stratum("up", "--bundle", "/root/cut.tar", check=False)
        check_refused(done, MALFORMED, "cut-short" if cut > 1 else "bundle-malformed", "cut.tar")
    host.machine.run(["rm", "/root/cut.tar"])


def test_a_bundle_whose_pipe_breaks_is_refused(host: MachineNode, before: Snapshot, places: list[Place]) -> None:
    for cut in (0, 1, 512, *(place.middle for place in places), places[-1].end):
        piped = f"head -c {cut} {BUNDLE} | {PYZ} up --bundle -"
        check_refused(host.machine.run(["sh", "-c", piped], check=False), MALFORMED, refusal_of_cut(cut))


def refusal_of_cut(cut: int) -> str:
    return "cut-short" if cut > 1 else "bundle-malformed"


def test_a_flipped_bit_anywhere_is_found(host: MachineNode, before: Snapshot, places: list[Place]) -> None:
    host.machine.run(["cp", BUNDLE, "/root/flipped.tar"])
    for number, place in enumerate(places):
        # The last byte is the worst: everything before it has been unpacked by then.
        for offset in (place.middle, place.end - 1):
            with open(host.machine.path_in_machine("/root/flipped.tar"), "r+b") as file:
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))
                file.flush()
                done = host.stratum("up", "--bundle", "/root/flipped.tar", check=False)
                file.seek(offset)
                file.write(byte)
            if number == 0:
                check_refused(done, MALFORMED, "bundle-malformed", "oci-layout")
            elif number == 1:
                check_refused(done, NOT_TRUSTED, "bad-signature")
            elif number == 2:
                assert done.status == NOT_TRUSTED, done.describe()
                refusal(done)
            else:
                check_refused(done, MALFORMED, "digest-mismatch", place.name.rpartition("/")[2])
    host.machine.run(["rm", "/root/flipped.tar"])


# -- trust -------------------------------------------------------------------------------------------------


def test_only_a_bundle_that_a_trusted_key_signed_is_taken(host: MachineNode, before: Snapshot) -> None:
    good = Publisher.demo()
    check_refused(up_with(host, Publisher.demo().build()), MALFORMED, "no-containerd")  # trusted, but no node
    stranger = Publisher.demo()
    stranger.signers = ("stranger",)
    check_refused(up_with(host, stranger.build()), NOT_TRUSTED, "unknown-key", bundles.key_pair("stranger")[1].key_id)
    unsigned = Publisher.demo()
    unsigned.signers = ()
    check_refused(up_with(host, unsigned.build()), NOT_TRUSTED, "unsigned")
    other = Publisher.demo()
    other.version = "2.0.0"
    mixed = good.build()
    mixed.signatures = other.build().signatures
    check_refused(up_with(host, mixed), NOT_TRUSTED, "bad-signature")
    host.machine.sh(f"mv {TRUST} /root/aside")
    try:
        check_refused(up_with(host, good.build()), NOT_TRUSTED, "no-trusted-keys")
    finally:
        host.machine.sh(f"mv /root/aside {TRUST}")


def test_a_key_given_for_one_run_is_trusted_in_that_run_only(host: MachineNode, before: Snapshot) -> None:
    stranger = Publisher.demo()
    stranger.signers = ("stranger",)
    host.machine.write("/root/stranger.pub", bundles.key_pair("stranger")[1].to_bytes())
    done = up_with(host, stranger.build(), "--trust", "/root/stranger.pub")
    check_refused(done, MALFORMED, "no-containerd")
    check_refused(up_with(host, stranger.build()), NOT_TRUSTED, "unknown-key")
    host.machine.run(["rm", "/root/stranger.pub"])


def test_skipping_the_signature_says_loudly_what_it_does(host: MachineNode, before: Snapshot) -> None:
    host.machine.sh(f"mkdir /root/layout; tar -xf {BUNDLE} -C /root/layout; rm /root/layout/*.minisig")
    done = host.stratum("up", "--bundle", "/root/layout", check=False)
    check_refused(done, NOT_TRUSTED, "unsigned")
    done = host.stratum("up", "--quiet", "--bundle", "/root/layout", "--insecure-skip-verify")
    assert "warning: /root/layout: the signature is NOT checked" in done.stderr
    assert host.json("status")["signers"] == []
    assert "nobody" in host.stratum("status").stdout
    host.stratum("uninstall")
    # Digests are checked all the same.
    host.machine.sh("for f in /root/layout/blobs/sha256/*; do printf x | dd of=$f conv=notrunc bs=1 2>/dev/null; done")
    done = host.stratum("up", "--bundle", "/root/layout", "--insecure-skip-verify", check=False)
    assert (done.status, refusal(done)) == (MALFORMED, "digest-mismatch")
    host.machine.run(["rm", "-r", "/root/layout"])


# -- signed by a trusted key, and hostile -------------------------------------------------------------------

PROGRAM = Entry("bin/tool", b"#!/bin/sh\n")
HOSTILE: dict[str, list[Any]] = {
    "a name that climbs out": [Entry("../../../../root/evil", b"x")],
    "a name that climbs out in the middle": [Entry("bin/../../../../../root/evil", b"x")],
    "an absolute name": [Entry("/root/evil", b"x")],
    "a link that leads out": [bundles.symlink("bin/out", "../../../../../../root")],
    "an absolute link": [bundles.symlink("bin/out", CANARY)],
    "a file through a link": [bundles.symlink("bin", "/root"), Entry("bin/evil", b"x")],
    "a hard link out of the tree": [bundles.hard_link("bin/out", "../../../../root/canary")],
    "a hard link to an absolute name": [bundles.hard_link("bin/out", CANARY)],
    "a hard link to a link that leads out": [
        bundles.symlink("bin/out", "../../../../root/canary"), bundles.hard_link("bin/again", "bin/out"),
    ],
    "a device": [Entry("bin/null", flag=b"3", mode=0o666)],
    "a block device": [Entry("bin/disk", flag=b"4", mode=0o666)],
    "a FIFO": [Entry("bin/fifo", flag=b"6", mode=0o666)],
    "a set-user-id bit": [Entry("bin/su", b"x", mode=0o4755)],
    "a set-group-id bit": [Entry("bin/sg", b"x", mode=0o2755)],
    "a name twice": [PROGRAM, Entry("bin/tool", b"#!/bin/sh\nother\n")],
    "a name twice, once with a dot": [PROGRAM, Entry("./bin/tool", b"#!/bin/sh\n")],
    "a directory over a file": [PROGRAM, bundles.directory("bin/tool")],
    "a name that is not UTF-8": [Entry(b"bin/caf\xe9", b"x")],
    "a name with a line feed": [Entry("bin/a\nb", b"x")],
    "a member that is longer than the archive": [Entry("bin/tool", b"x", size=1 << 40)],
    "an extended header of a gigabyte": [Entry("x", flag=b"x", size=1 << 30), PROGRAM],
}


def test_hostile_members_are_refused_even_when_they_are_signed(host: MachineNode, before: Snapshot) -> None:
    failed = []
    for what, entries in HOSTILE.items():
        done = host.stratum("up", "--bundle", "-", check=False, input=holding(entries).build().tar())
        try:
            check_refused(done, MALFORMED, refusal(done))
        except AssertionError as error:
            failed.append(f"{what}: {error}")
    assert not failed, "\n".join(failed)


def test_a_member_that_the_description_does_not_list_is_refused(host: MachineNode, before: Snapshot) -> None:
    honest = bundles.listing([PROGRAM])
    more = holding([PROGRAM, Entry("bin/more", b"x")], files=honest)
    check_refused(up_with(host, more.build()), MALFORMED, "bad-layer", "bin/more")
    less = holding([PROGRAM], files=bundles.listing([PROGRAM, Entry("bin/less", b"x")]))
    check_refused(up_with(host, less.build()), MALFORMED, "bad-layer", "bin/less")
    other = holding([Entry("bin/tool", b"one")], files=bundles.listing([Entry("bin/tool", b"two")]))
    check_refused(up_with(host, other.build()), MALFORMED, "digest-mismatch", "bin/tool")


def test_a_bomb_is_stopped_by_the_size_that_was_signed(host: MachineNode, before: Snapshot) -> None:
    zeros = bundles.zstd(bytes(64 << 20))
    bomb = holding([PROGRAM], compress=lambda data: bundles.zstd(data) + zeros * 64)
    packed = bomb.build().tar()
    assert len(packed) < 1 << 20
    # In little memory, too: a virtual size of 1 GiB holds the interpreter and its libraries, not the bomb.
    limited = ["sh", "-c", f"ulimit -v 1048576; exec {PYZ} up --bundle -"]
    check_refused(host.machine.run(limited, input=packed, check=False), MALFORMED, "too-large")
    # And one that says how large it is does not fit.
    honest = [{"path": "bin/zeros", "type": "file", "mode": "0755", "size": 4 << 30, "digest": bundles.digest_of(b"")}]
    large = holding([PROGRAM], files=honest, size=(4 << 30) + 2048)
    done = up_with(host, large.build())
    check_refused(done, HOST_REFUSED, "host-refused", "disk-space")


def test_a_bundle_for_another_machine_or_of_an_unknown_kind_is_refused(host: MachineNode, before: Snapshot) -> None:
    foreign = Publisher.demo()
    foreign.platforms = (ARM64,)
    check_refused(up_with(host, foreign.build()), HOST_REFUSED, "wrong-platform", "linux/arm64", "linux/amd64")
    odd = holding([PROGRAM], media_type="application/vnd.oci.image.layer.v1.tar+lzma")
    check_refused(up_with(host, odd.build()), MALFORMED, refusal(up_with(host, odd.build())), "tar+lzma")
    # A layer whose name says gzip and whose bytes say zstd.
    liar = holding([PROGRAM], media_type=LAYER_GZIP, compress=bundles.zstd)
    check_refused(up_with(host, liar.build()), MALFORMED, "media-type-mismatch", "gzip", "zstd")


def test_what_is_no_bundle_at_all_is_refused(host: MachineNode, before: Snapshot) -> None:
    nested = Publisher.demo().build().tar(prefix="img/")
    global_header = bundles.tar([bundles.pax({"comment": "x"}, flag=b"g")])
    for data in (b"", b"\0" * 10240, b"not a tar at all" * 64, b"\x1f\x8b" + bytes(600), nested, global_header):
        done = host.stratum("up", "--bundle", "-", check=False, input=data)
        check_refused(done, MALFORMED, refusal(done))
    for path in ("/root", "/etc/passwd", "/dev/null"):
        done = host.stratum("up", "--bundle", path, check=False)
        assert done.status in (MALFORMED, 14), done.describe()
        refusal(done)


# -- and good ones that look unusual ------------------------------------------------------------------------


def test_layers_in_gzip_and_plain_tar_make_a_node(
    host: MachineNode, before: Snapshot, debian_packages: dict[str, Package], demo_image: Image
) -> None:
    def programs(package: str, place: str, to: str, *names: str) -> list[Entry]:
        tree = debian_packages[package].tree / place
        return [Entry(f"{to}/{name}", (tree / name).read_bytes()) for name in names]

    def fast(data: bytes) -> bytes:
        return gzip.compress(data, compresslevel=1, mtime=0)

    daemon = programs("containerd", "usr/bin", "bin", "containerd", "containerd-shim-runc-v2", "ctr")
    plugins = programs("containernetworking-plugins", "usr/lib/cni", "cni/bin", "bridge", "host-local", "portmap")
    odd_name = Entry("libexec/caf\u00e9.txt", b"x", mode=0o644)
    publisher = Publisher(
        parts=[
            Part("containerd", daemon, version="1.6.20", media_type=LAYER_GZIP, compress=fast),
            Part("runc", programs("runc", "usr/sbin", "bin", "runc"), media_type=LAYER_TAR),
            Part("cni-plugins", [*plugins, odd_name]),
        ],
        images=[(IMAGE, [demo_image.layer])],
    )
    # Members under `./` are fine, and so is a locale that cannot say the name of one of them.
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    host.machine.write("/root/good.tar", publisher.build().tar(prefix="./"))
    host.stratum("up", "--bundle", "/root/good.tar", env=environment)
    assert host.json("status")["ready"]
    assert host.machine.read("/opt/stratum/node/current/libexec/caf\u00e9.txt") == "x"
    assert IMAGE in host.ctr("images", "list", "--quiet").lines
    host.stratum("uninstall", env=environment)
    host.machine.run(["rm", "/root/good.tar"])
