"""The units: what they say, and that systemd understands every line of it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from stratum.host import localdnsnet, persistence
from stratum.node.units import (
    REFUSED,
    SYSTEMD_DIR,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UNIT_LOCALDNS_NETWORK,
    UnitSpec,
    drop_in_dir,
    render_units,
    stack_units,
)
from stratum.system import SEARCH_PATH, HostPath
from stratum.systemd import quote_argument

BIN = HostPath("/opt/stratum/node/current/bin")
PLAIN = UnitSpec(BIN)
FULL = UnitSpec(
    BIN,
    kubelet=True,
    localdns="/opt/stratum/node/current/libexec/localdns",
    gpu_setup=(
        ("/usr/bin/nvidia-ctk", "cdi", "generate", "--output=/etc/cdi/nvidia.yaml"),
        ("/bin/echo", "100 %", "$x"),
    ),
    launch_check="/usr/bin/true",
)


def files(spec: UnitSpec) -> dict[str, str]:
    return {str(file.path.relative_to(SYSTEMD_DIR)): file.content.decode() for file in render_units(spec)}


def settings(text: str) -> dict[str, list[str]]:
    """The settings of a unit file; a key may stand more than once."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals and section, line
            found.setdefault(f"{section}{key}", []).append(value)
    return found


# -- what they say --------------------------------------------------------------------------------------


def test_a_container_host_has_one_unit_and_its_path() -> None:
    assert list(files(PLAIN)) == [UNIT_CONTAINERD, f"{UNIT_CONTAINERD}.d/10-path.conf"]
    assert stack_units(PLAIN) == (UNIT_CONTAINERD,)


def test_a_full_node_starts_dns_then_containerd_then_kubelet() -> None:
    assert stack_units(FULL) == (UNIT_LOCALDNS, UNIT_CONTAINERD, UNIT_KUBELET)
    assert sorted(files(FULL)) == sorted(
        [
            UNIT_CONTAINERD,
            UNIT_KUBELET,
            UNIT_LOCALDNS,
            UNIT_KUBELET_LAUNCH_CHECK,
            f"{UNIT_CONTAINERD}.d/10-path.conf",
            f"{UNIT_KUBELET}.d/10-path.conf",
            f"{UNIT_LOCALDNS}.d/10-path.conf",
            f"{UNIT_KUBELET_LAUNCH_CHECK}.d/10-path.conf",
            f"{UNIT_CONTAINERD}.d/20-localdns.conf",
            f"{UNIT_KUBELET}.d/20-localdns.conf",
            f"{UNIT_CONTAINERD}.d/30-gpu-setup.conf",
            f"{UNIT_KUBELET}.d/40-launch-check.conf",
        ]
    )


def test_no_unit_has_a_name_of_the_distributions() -> None:
    for name in files(FULL):
        assert name.startswith("stratum-")
    assert persistence.UNIT.startswith("stratum")


def test_every_program_is_run_through_the_current_link() -> None:
    for name in (UNIT_CONTAINERD, UNIT_KUBELET):
        (line,) = settings(files(FULL)[name])["[Service]ExecStart"]
        assert line.startswith(f"{BIN}/")


def test_containers_outlive_a_restart_of_containerd() -> None:
    found = settings(files(PLAIN)[UNIT_CONTAINERD])
    assert found["[Service]KillMode"] == ["process"]
    assert found["[Service]Delegate"] == ["yes"]
    assert found["[Service]Type"] == ["notify"]
    assert found["[Service]Restart"] == ["always"]


def test_a_missing_module_does_not_keep_containerd_from_starting() -> None:
    """Row 17: in a container modprobe fails, and overlay is there all the same."""
    for line in settings(files(PLAIN)[UNIT_CONTAINERD]).get("[Service]ExecStartPre", []):
        assert line.startswith("-")


def test_the_path_of_the_version_comes_first_and_the_hosts_stays() -> None:
    for spec in (PLAIN, FULL):
        for unit in (name for name in files(spec) if "/" not in name):
            found = settings(files(spec)[f"{unit}.d/10-path.conf"])
            assert found == {"[Service]Environment": [f"PATH={BIN}:{':'.join(SEARCH_PATH)}"]}


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "FTP_PROXY")


def test_nothing_of_the_managers_environment_reaches_the_units() -> None:
    """Row 43: a proxy of the manager must not leak into probes: each variable of it is set, to nothing."""
    for text in files(FULL).values():
        assert "PassEnvironment" not in text
    for unit in (UNIT_CONTAINERD, UNIT_KUBELET):
        words = settings(files(FULL)[unit])["[Service]Environment"][0].split()
        assert words == [f"{word}=" for name in PROXIES for word in (name, name.lower())]


def test_a_proxy_is_named_in_a_file_and_never_in_a_unit() -> None:
    for unit in (UNIT_CONTAINERD, UNIT_KUBELET):
        assert "EnvironmentFile" not in files(FULL)[unit]
        text = files(replace(FULL, proxy_file=HostPath("/etc/stratum/proxy.env")))[unit]
        assert settings(text)["[Service]EnvironmentFile"] == ["/etc/stratum/proxy.env"]


def test_the_kubelets_arguments_and_variables_reach_it_as_they_are() -> None:
    spec = replace(FULL, kubelet_arguments=("--node-labels=a=b c,d=$e%",), kubelet_environment=(("K", 'a "b" $c %d'),))
    found = settings(files(spec)[UNIT_KUBELET])
    assert found["[Service]ExecStart"] == [
        f'{BIN}/kubelet --config=/etc/stratum/kubelet/config.yaml "--node-labels=a=b c,d=$$e%%"'
    ]
    assert found["[Service]Environment"][1:] == ['"K=a \\"b\\" $c %%d"']


def test_kubelet_follows_our_containerd_and_not_the_distributions() -> None:
    found = settings(files(FULL)[UNIT_KUBELET])
    assert UNIT_CONTAINERD in found["[Unit]After"][0].split()
    assert UNIT_CONTAINERD in found["[Unit]Wants"][0].split()
    assert "containerd.service" not in found["[Unit]After"][0].split()


def test_node_units_depend_on_dns_where_there_is_one() -> None:
    for unit in (UNIT_CONTAINERD, UNIT_KUBELET):
        found = settings(files(FULL)[f"{unit}.d/20-localdns.conf"])
        assert found == {"[Unit]After": [UNIT_LOCALDNS], "[Unit]Requires": [UNIT_LOCALDNS]}
    found = settings(files(FULL)[UNIT_LOCALDNS])
    assert found["[Unit]Requires"] == [UNIT_LOCALDNS_NETWORK]
    assert UNIT_LOCALDNS_NETWORK in found["[Unit]After"][0].split()
    assert found["[Service]DynamicUser"] == ["yes"]


def test_dns_runs_as_a_user_that_can_bind_to_its_port_and_change_nothing() -> None:
    found = settings(files(FULL)[UNIT_LOCALDNS])
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert found[f"[Service]{key}"] == ["CAP_NET_BIND_SERVICE"]
    assert found["[Service]ProtectSystem"] == ["strict"]
    assert found["[Service]NoNewPrivileges"] == ["yes"]
    # CoreDNS lists the interfaces when it binds, which takes netlink.
    families = found["[Service]RestrictAddressFamilies"][0].split()
    assert {"AF_INET", "AF_INET6", "AF_NETLINK"} <= set(families)


def test_gpu_set_up_runs_before_each_start_and_its_failure_fails_it() -> None:
    lines = settings(files(FULL)[f"{UNIT_CONTAINERD}.d/30-gpu-setup.conf"])["[Service]ExecStartPre"]
    assert lines == [
        "/usr/bin/nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        '/bin/echo "100 %%" "$$x"',
    ]


def test_a_final_refusal_of_the_launch_check_is_not_tried_again() -> None:
    found = settings(files(FULL)[UNIT_KUBELET_LAUNCH_CHECK])
    assert found["[Service]Type"] == ["oneshot"]
    assert found["[Service]RestartPreventExitStatus"] == [str(REFUSED)]
    assert not [key for key in found if key.startswith("[Install]")]
    drop_in = settings(files(FULL)[f"{UNIT_KUBELET}.d/40-launch-check.conf"])
    assert drop_in == {
        "[Unit]After": [UNIT_KUBELET_LAUNCH_CHECK],
        "[Unit]Requires": [UNIT_KUBELET_LAUNCH_CHECK],
    }


def test_without_a_kubelet_there_is_no_launch_check() -> None:
    assert not [name for name in files(UnitSpec(BIN, launch_check="/x")) if "launch" in name]


def test_rendering_is_the_same_each_time() -> None:
    assert render_units(FULL) == render_units(FULL)


def test_units_wait_for_the_file_systems_that_they_live_on() -> None:
    """Row 26: /opt may be a file system of its own."""
    for text in (files(PLAIN)[UNIT_CONTAINERD], persistence.render_unit(["/usr/bin/python3"]).decode()):
        (line,) = settings(text)["[Unit]RequiresMountsFor"]
        assert {"/opt/stratum", "/var/lib/stratum"} <= set(line.split())


def test_the_kubelet_waits_for_the_file_system_of_its_volumes() -> None:
    (line,) = settings(files(FULL)[UNIT_KUBELET])["[Unit]RequiresMountsFor"]
    assert {"/opt/stratum", "/var/lib/stratum", "/var/lib/kubelet"} == set(line.split())


# -- the supervisor -------------------------------------------------------------------------------------


def test_the_supervisor_comes_back_after_a_crash_without_end_and_leaves_the_node_alone() -> None:
    found = settings(persistence.render_unit(["/usr/bin/python3", "-IS", "/opt/stratum.pyz"]).decode())
    assert found["[Service]Restart"] == ["always"]
    assert found["[Service]KillMode"] == ["process"]
    assert found["[Service]Type"] == ["notify"]
    assert found["[Unit]StartLimitIntervalSec"] == ["0"]
    assert found["[Service]SuccessExitStatus"] == ["143"]
    assert found["[Install]WantedBy"] == ["multi-user.target"]


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", "plain"),
        ("--option=/a/b", "--option=/a/b"),
        ("", '""'),
        ("a b", '"a b"'),
        ("tab\there", '"tab\\there"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ("it's", '"it\'s"'),
        (";", '";"'),
        ("two\nlines", '"two\\nlines"'),
        ("cr\r", '"cr\\r"'),
        ("bell\x07", '"bell\\x07"'),
        ("é", "é"),
    ],
)
def test_an_argument_reaches_the_program_as_it_is(word: str, quoted: str) -> None:
    assert quote_argument(word) == quoted


# -- systemd's own opinion ------------------------------------------------------------------------------


def verify(directory: Path, *names: str) -> str:
    """What ``systemd-analyze verify`` has to say; it exits 0 for an unknown key, so every line counts."""
    argv = ["systemd-analyze", "verify", "--man=no", *(str(directory / name) for name in names)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if str(directory) in line or "stratum" in line]
    if done.returncode != 0 and not lines:
        lines = done.stderr.splitlines()
    return "\n".join(lines)


def install(directory: Path, spec_of: type[UnitSpec] = UnitSpec, **options: object) -> UnitSpec:
    """Render into a directory, with programs that exist where the units look for them."""
    programs = directory / "bin"
    programs.mkdir()
    for name in ("containerd", "kubelet", "localdns", "check", "setup", "python3"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    spec = spec_of(HostPath(str(programs)), **options)  # type: ignore[arg-type]
    for file in render_units(spec, HostPath(str(directory))):
        path = Path(str(file.path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.content)
    return spec


def test_systemd_understands_the_units_of_a_container_host(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / persistence.UNIT).write_bytes(persistence.render_unit([str(tmp_path / "bin/python3"), "-IS", "a b%$"]))
    assert verify(tmp_path, UNIT_CONTAINERD, persistence.UNIT) == ""


def test_systemd_understands_the_units_of_a_full_node(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    install(
        tmp_path,
        kubelet=True,
        localdns=str(programs / "localdns"),
        gpu_setup=((str(programs / "setup"), "a b", "%", "$x", 'quo"te'),),
        launch_check=str(programs / "check"),
    )
    network = localdnsnet.render_network_unit([str(programs / "python3"), "-IS", "/x"], "169.254.20.10")
    (tmp_path / UNIT_LOCALDNS_NETWORK).write_bytes(network)
    names = (UNIT_CONTAINERD, UNIT_KUBELET, UNIT_LOCALDNS, UNIT_LOCALDNS_NETWORK, UNIT_KUBELET_LAUNCH_CHECK)
    assert verify(tmp_path, *names) == ""


@pytest.mark.parametrize(
    "line", ["NoSuchKey=1", "Restart=sometimes", "ExecStart=relative", "KillMode=nobody", "TimeoutStartSec=soon"]
)
def test_the_check_would_see_a_mistake(tmp_path: Path, line: str) -> None:
    install(tmp_path)
    path = tmp_path / UNIT_CONTAINERD
    path.write_text(path.read_text().replace("[Service]\n", f"[Service]\n{line}\n"))
    assert verify(tmp_path, UNIT_CONTAINERD) != ""


def test_the_check_would_see_a_mistake_in_a_drop_in(tmp_path: Path) -> None:
    install(tmp_path)
    path = drop_in_dir(UNIT_CONTAINERD, HostPath(str(tmp_path))) / "10-path.conf"
    Path(str(path)).write_text("[Service]\nNoSuchKey=1\n")
    assert verify(tmp_path, UNIT_CONTAINERD) != ""
