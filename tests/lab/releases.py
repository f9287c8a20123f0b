"""Three releases of one bundle with the real programs of Debian 12, 13 and unstable, and broken ones.

The releases are signed by one publisher, made once and cached: compressing them takes half a minute each. The
broken ones are small and made for each test.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab import demo, packages, tools
from tests.lab.demo import Publisher
from tests.lab.image import Image
from tests.lab.packages import Package
from tests.pyz import ROOT

#: Version and serial of each release, and the suite that each of its components comes from.
SUITES: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "1.0": (1, dict.fromkeys(packages.STACK, "bookworm")),
    "1.1": (1, {**dict.fromkeys(packages.STACK, "bookworm"), "runc": "trixie"}),
    "2.0": (2, dict.fromkeys(packages.STACK, "trixie")),
    "3.0": (3, dict.fromkeys(packages.STACK, "unstable")),
}

#: Counted up when the way of making releases changes.
_FORMAT = "1"


@dataclass(frozen=True)
class Releases:
    """The publisher and a directory with the bundles that were made so far."""

    publisher: Publisher
    directory: Path
    image: Image

    def packages(self, version: str) -> dict[str, Package]:
        """The unpacked Debian packages that a release is made of."""
        return {name: packages.fetch(suite)[name] for name, suite in SUITES[version][1].items()}

    def program(self, version: str, name: str) -> Path:
        """A program of a release, as Debian has it."""
        package = "runc" if name == "runc" else "containerd"
        return self.packages(version)[package].tree / ("usr/sbin" if name == "runc" else "usr/bin") / name

    def bundle(self, version: str) -> Path:
        """The signed bundle of a release."""
        target = self.directory / version
        with tools.building(target) as new:
            if new is not None:
                new.mkdir()
                serial = SUITES[version][0]
                demo.build_bundle(
                    self.publisher, new, self.packages(version), [self.image], version=version, serial=serial
                )
        return target / f"demo-{version}.tar"

    def broken(self, directory: Path, version: str, serial: int, programs: Mapping[str, str | Path]) -> Path:
        """Build and sign a bundle of its own kind in ``directory``.

        :param programs: name below ``bin`` to a file, or to the text of a script.
        """
        work = directory / f"broken-{version}"
        (work / "bin").mkdir(parents=True)
        for name, program in programs.items():
            if isinstance(program, Path):
                shutil.copyfile(program, work / "bin" / name)
            else:
                (work / "bin" / name).write_text(program)
            os.chmod(work / "bin" / name, 0o755)
        # The version of containerd decides about the form of its configuration.
        text = f"""name: demo
version: "{version}"
serial: {serial}
platforms: [linux/amd64]
components:
  - name: containerd
    version: "1.7.24"
    source: {{directory: {work}/bin}}
    files:
      - {{from: "*", to: bin/}}
"""
        (work / "demo.yaml").write_text(text)
        bundle = work / f"demo-{version}.tar"
        self.publisher.run(
            "bundle", "build", str(work / "demo.yaml"), "-o", str(bundle), "--key", str(self.publisher.secret)
        )
        return bundle


def releases(pyz: Path, image: Image) -> Releases:
    """The releases; what is missing of them is made when it is asked for."""
    versions = [f"{suite}:{item.version}" for suite in ("bookworm", "trixie", "unstable")
                for item in packages.fetch(suite).values()]
    target = tools.cache_directory() / "releases" / tools.key(_FORMAT, _builder(), image.reference, *versions)
    with tools.building(target) as new:
        if new is not None:
            new.mkdir()
            demo.make_publisher(pyz, new)
    publisher = Publisher(pyz, target / "publisher.key", target / "publisher.pub")
    return Releases(publisher, target, image)


def _builder(parts: Sequence[str] = ("stratum/bundle", "stratum/trust", "tests/lab/demo.py")) -> str:
    """A digest of the sources that decide about a bundle's bytes; the rest may change without a new one."""
    digest = hashlib.sha256()
    for part in parts:
        place = ROOT / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()
