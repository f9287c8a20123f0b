"""Signed bundles of real programs: Debian's containerd, runc and CNI plugins, and a busybox image.

They are made as a release engineer makes them, with the pyz: keygen, build, sign.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab import tools
from tests.lab.image import Image
from tests.lab.packages import Package


@dataclass(frozen=True)
class Publisher:
    """A release engineer's desk: the pyz and a key pair."""

    pyz: Path
    secret: Path
    public: Path

    def run(self, *arguments: str, timeout: float = 300) -> str:
        """Run the pyz on this machine, as it runs anywhere: isolated, without site packages."""
        argv = [sys.executable, "-I", "-S", str(self.pyz), *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def make_publisher(pyz: Path, directory: Path, name: str = "publisher") -> Publisher:
    """Make a key pair in ``directory``."""
    publisher = Publisher(pyz, directory / f"{name}.key", directory / f"{name}.pub")
    publisher.run("bundle", "keygen", "--no-password", "-o", str(directory / name))
    return publisher


#: Debian has neither a kubelet nor a CoreDNS: these stand in for them, and check what they are given as strictly.
STANDINS = Path(__file__).parents[1] / "standins"
KUBELET, COREDNS = "1.34.1", "1.12.1"


def definition(
    version: str,
    serial: int,
    packages: dict[str, Package],
    images: Sequence[tuple[str, Path]],
    *,
    kubelet: bool = False,
) -> str:
    """A bundle definition over unpacked Debian packages; ``kubelet`` adds the stand-ins of a Kubernetes node."""

    def release(name: str) -> str:
        return packages[name].version.partition("~")[0].partition("+")[0].rpartition(":")[2]

    text = f"""name: demo
version: "{version}"
serial: {serial}
platforms: [linux/amd64]
components:
  - name: containerd
    version: "{release("containerd")}"
    source: {{directory: {packages["containerd"].tree}/usr/bin}}
    files:
      - {{from: containerd, to: bin/}}
      - {{from: containerd-shim-runc-v2, to: bin/}}
      - {{from: ctr, to: bin/}}
  - name: runc
    version: "{release("runc")}"
    source: {{directory: {packages["runc"].tree}/usr/sbin}}
    files:
      - {{from: runc, to: bin/}}
  - name: cni-plugins
    version: "{release("containernetworking-plugins")}"
    source: {{directory: {packages["containernetworking-plugins"].tree}/usr/lib/cni}}
    files:
      - {{from: "*", to: cni/bin/}}
"""
    if kubelet:
        text += f"""  - name: kubelet
    version: "{KUBELET}"
    source: {{file: {STANDINS / "kubelet.py"}}}
    files:
      - {{to: bin/kubelet, mode: "0755"}}
  - name: coredns
    version: "{COREDNS}"
    source: {{file: {STANDINS / "coredns.py"}}}
    files:
      - {{to: bin/coredns, mode: "0755"}}
"""
    if images:
        text += "images:\n"
    for name, path in images:
        text += f"  - name: {name}\n    source: {{file: {path}}}\n"
    return text


def build_bundle(
    publisher: Publisher,
    directory: Path,
    packages: dict[str, Package],
    images: Sequence[Image],
    *,
    version: str = "1.0",
    serial: int = 1,
    kubelet: bool = False,
) -> Path:
    """Build and sign a bundle as ``demo-VERSION.tar`` in ``directory``; ``kubelet`` adds stand-ins."""
    work = directory / f"demo-{version}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    named = []
    for number, image in enumerate(images):
        path = work / f"image-{number}.tar"
        path.write_bytes(image.oci_archive())
        named.append((image.reference, path))
    (work / "demo.yaml").write_text(definition(version, serial, packages, named, kubelet=kubelet))
    bundle = directory / f"demo-{version}.tar"
    bundle.unlink(missing_ok=True)
    publisher.run("bundle", "build", str(work / "demo.yaml"), "-o", str(bundle), "--key", str(publisher.secret))
    return bundle


def cached_bundle(
    pyz: Path, packages: dict[str, Package], images: Sequence[Image], *, kubelet: bool = False
) -> tuple[Publisher, Path]:
    """A publisher and its demo bundle, made once for each pyz, set of packages and images."""
    parts = [pyz.parent.name, *(f"{item.name}={item.version}" for item in packages.values())]
    parts += [image.reference for image in images]
    if kubelet:
        parts += [hashlib.sha256((STANDINS / name).read_bytes()).hexdigest() for name in ("kubelet.py", "coredns.py")]
    target = tools.cache_directory() / "bundles" / tools.key("3", *parts)
    with tools.building(target) as new:
        if new is not None:
            new.mkdir()
            made = make_publisher(pyz, new)
            build_bundle(made, new, packages, images, kubelet=kubelet)
    return Publisher(pyz, target / "publisher.key", target / "publisher.pub"), target / "demo-1.0.tar"
