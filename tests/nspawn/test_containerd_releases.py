"""The configuration that is rendered for each release, read back by the real containerd of that release.

Its ``config dump`` only reads; no machine is needed for it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stratum.node import containerd
from stratum.node.containerd import ContainerdOptions, overriding_fragments, render_config
from stratum.system import Host
from tests.lab import packages
from tests.unit.hosting import put

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

SUITES = ("bookworm", "trixie", "unstable")
PAUSE = "registry.example.test/pause:3.10"
NVIDIA = "/usr/bin/nvidia-container-runtime"


@dataclass
class Release:
    """A containerd of Debian's, and a place for its configuration."""

    program: Path
    version: str
    place: Path

    @property
    def fragments(self) -> Path:
        return self.place / "conf.d"

    def dump(self, options: ContainerdOptions) -> dict[str, Any]:
        """What containerd makes of the file; it has nothing to say about it."""
        text = render_config(self.version, options).decode().replace(str(containerd.FRAGMENT_DIR), str(self.fragments))
        (self.place / "config.toml").write_text(text)
        done = subprocess.run(
            [str(self.program), "--config", str(self.place / "config.toml"), "config", "dump"],
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == b""
        return tomllib.loads(done.stdout.decode())

    def cri(self, dumped: dict[str, Any], part: str) -> dict[str, Any]:
        name = f"io.containerd.cri.v1.{part}" if self.version >= "2" else "io.containerd.grpc.v1.cri"
        found: dict[str, Any] = dumped["plugins"][name]
        return found


@pytest.fixture(params=SUITES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Release:
    package = packages.fetch(request.param)["containerd"]
    (tmp_path / "conf.d").mkdir()
    return Release(package.tree / "usr/bin/containerd", package.version, tmp_path)


def test_containerd_takes_each_setting_where_it_was_put(release: Release) -> None:
    dumped = release.dump(ContainerdOptions(PAUSE, NVIDIA))
    runtime, images = release.cri(dumped, "runtime"), release.cri(dumped, "images")
    sandbox = images["pinned_images"]["sandbox"] if release.version >= "2" else runtime["sandbox_image"]
    assert sandbox == PAUSE
    assert images["registry"]["config_path"] == str(containerd.REGISTRY_DIR)
    assert runtime["cni"]["conf_dir"] == "/etc/cni/net.d"
    assert runtime["containerd"]["default_runtime_name"] == "runc"
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    nvidia = runtime["containerd"]["runtimes"]["nvidia"]
    assert nvidia["runtime_type"] == "io.containerd.runc.v2"
    assert nvidia["options"]["BinaryName"] == NVIDIA
    assert nvidia["options"]["SystemdCgroup"] is True
    if release.version >= "1.7":
        assert runtime["enable_cdi"] is True
        assert runtime["cdi_spec_dirs"] == list(containerd.CDI_SPEC_DIRS)
    else:
        assert "enable_cdi" not in runtime
    assert dumped["root"] == str(containerd.DATA_ROOT)
    assert dumped["grpc"]["address"] == str(containerd.ADDRESS)
    if release.version >= "2":
        nri = dumped["plugins"]["io.containerd.nri.v1.nri"]
        verifier = dumped["plugins"]["io.containerd.image-verifier.v1.bindir"]
        for path in (nri["socket_path"], nri["plugin_path"], nri["plugin_config_path"], verifier["bin_dir"]):
            assert "/stratum/" in path


def test_no_setting_is_made_that_the_release_does_not_have(release: Release) -> None:
    """Every key that we write is in the dump, which is made from what the program knows."""

    def names(value: Any, prefix: str = "") -> set[str]:
        if not isinstance(value, dict):
            return {prefix}
        return {name for key, item in value.items() for name in names(item, f"{prefix}/{key}")}

    rendered = tomllib.loads(render_config(release.version, ContainerdOptions(PAUSE, NVIDIA)).decode())
    assert names(rendered) - names(release.dump(ContainerdOptions(PAUSE, NVIDIA))) == set()


def test_without_a_sandbox_image_and_gpus_their_settings_are_containerds_own(release: Release) -> None:
    dumped = release.dump(ContainerdOptions())
    assert "nvidia" not in release.cri(dumped, "runtime")["containerd"]["runtimes"]
    assert "registry.k8s.io/pause" in str(release.cri(dumped, "images"))


def test_a_fragment_of_the_admins_is_merged(release: Release) -> None:
    (release.fragments / "debug.toml").write_text(
        f'version = {containerd.config_version(release.version)}\noom_score = -500\n[debug]\n  level = "debug"\n'
    )
    (release.fragments / "ignored.txt").write_text("not read")
    dumped = release.dump(ContainerdOptions(PAUSE))
    assert dumped["debug"]["level"] == "debug"
    assert dumped["oom_score"] == -500
    assert PAUSE in str(release.cri(dumped, "images"))


def test_what_a_fragment_with_settings_of_cri_does_is_known_for_each_release(release: Release, tmp_path: Path) -> None:
    version = containerd.config_version(release.version)
    plugin = "io.containerd.grpc.v1.cri" if version == 2 else "io.containerd.cri.v1.images"
    text = f'version = {version}\n[plugins."{plugin}"]\n  max_concurrent_downloads = 7\n'
    (release.fragments / "own.toml").write_text(text)
    dumped = release.dump(ContainerdOptions(PAUSE))
    assert release.cri(dumped, "images")["max_concurrent_downloads"] == 7
    tree = Host(str(tmp_path / "tree"))
    put(tree, f"{containerd.FRAGMENT_DIR}/own.toml", text)
    lost = PAUSE not in str(release.cri(dumped, "images"))
    assert bool(overriding_fragments(tree, release.version)) == lost
    assert lost == (version == 2)
