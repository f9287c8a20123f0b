"""containerd's configuration, ours alone, and talking to it with its own client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import BundleError, CommandError, StratumError
from stratum.node import containerd
from stratum.node.containerd import Ctr, ImageState, Task, config_version, quote_toml, render_config
from stratum.node.criimages import find_sandbox_image
from stratum.system import Completed, HostPath, command_failure
from tests.fakes import MachineHost, make_tree

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def parsed(version: str) -> dict[str, Any]:
    return tomllib.loads(render_config(version).decode())


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("1.6.20~ds1-1+deb12u1", 2),
        ("1.6.0", 2),
        ("1.7.24", 2),
        ("v1.7.0-rc.1", 2),
        ("2.0.0", 3),
        ("v2.1.4", 3),
        ("2.3", 3),
        ("2.10.1", 3),
    ],
)
def test_each_release_gets_the_format_that_it_reads(release: str, version: int) -> None:
    assert config_version(release) == version
    assert parsed(release)["version"] == version


@pytest.mark.parametrize("release", ["1.5.9", "1.8.0", "3.0.0", "20.1.0", "0.9", "", "latest", "1", "x1.7.2", "-1.7"])
def test_an_unknown_release_is_refused(release: str) -> None:
    with pytest.raises(BundleError) as caught:
        render_config(release)
    assert caught.value.reference == "containerd-version"


@pytest.mark.parametrize("release", ["1.6.20", "1.7.24", "2.0.5", "2.1.0", "2.2.1"])
def test_nothing_is_shared_with_another_containerd_of_the_host(release: str) -> None:
    """Row 38: own socket, root, state and configuration."""
    value = parsed(release)
    assert value["root"] == "/var/lib/stratum/containerd"
    assert value["state"] == "/run/stratum/containerd"
    assert value["grpc"]["address"] == "/run/stratum/containerd/containerd.sock"
    assert value["plugins"]["io.containerd.internal.v1.opt"]["path"].startswith("/var/lib/stratum/")
    text = render_config(release).decode()
    for foreign in ("/run/containerd/", "/var/lib/containerd", "/etc/containerd", "/opt/containerd"):
        assert foreign not in text
    assert containerd.CONFIG_PATH.parent != HostPath("/etc/containerd")


@pytest.mark.parametrize(
    ("release", "plugin"),
    [("1.6.20", "io.containerd.grpc.v1.cri"), ("1.7.24", "io.containerd.grpc.v1.cri"),
     ("2.0.5", "io.containerd.cri.v1.runtime"), ("2.1.0", "io.containerd.cri.v1.runtime")],
)  # fmt: skip
def test_cri_is_on_and_uses_systemds_cgroups(release: str, plugin: str) -> None:
    value = parsed(release)
    assert "disabled_plugins" not in value
    runc = value["plugins"][plugin]["containerd"]["runtimes"]["runc"]
    assert runc["runtime_type"] == "io.containerd.runc.v2"
    assert runc["options"]["SystemdCgroup"] is True
    network = value["plugins"][plugin]["cni"]
    assert network["conf_dir"] == "/etc/cni/net.d"
    assert (network.get("bin_dirs") or [network["bin_dir"]]) == ["/opt/cni/bin"]
    assert ("bin_dirs" in network) == (release >= "2.1")


@pytest.mark.parametrize("release", ["1.6.20", "1.7.24", "2.0.5", "2.1.0"])
def test_the_socket_of_nri_is_our_own_where_there_is_one(release: str) -> None:
    nri = parsed(release)["plugins"].get("io.containerd.nri.v1.nri", {})
    assert release < "2" or nri["socket_path"].startswith("/run/stratum/")


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_is_read_back_as_it_was(text: str) -> None:
    assert tomllib.loads(f"x = {quote_toml(text)}") == {"x": text}


@given(st.text())
def test_any_names_hold_a_sandbox_or_none(name: str) -> None:
    assert find_sandbox_image([name]) in (name, None)


def test_the_socket_has_a_name_that_fits_into_an_address() -> None:
    assert len(str(containerd.ADDRESS)) < 104  # sun_path is 108 bytes, and containerd adds .ttrpc


# -- the client -----------------------------------------------------------------------------------------


class CtrHost(MachineHost):
    """Answers ctr's calls from a table, by the words behind ``--address``."""

    answers: dict[str, Any]

    def run(self, argv: Any, *, timeout: float, check: bool = True, env: Any = None, feed: Any = None) -> Completed:
        line = " ".join(argv[3:])
        self.commands.append(line)
        answer = self.answers.get(line, "")
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        status = answer if isinstance(answer, int) else 0
        text = answer if isinstance(answer, str) else ""
        done = Completed(tuple(argv), status, text.encode(), b"")
        if check and status:
            raise command_failure(done)
        return done

    def listens(self, path: Any) -> bool:
        return True


@pytest.fixture
def host(tmp_path: Path) -> CtrHost:
    host = CtrHost(str(make_tree(tmp_path / "root", live=True)), {})
    host.answers = {}
    return host


@pytest.fixture
def ctr(host: CtrHost) -> Ctr:
    return Ctr(host, HostPath("/opt/stratum/node/current/bin"))


TASKS = "TASK    PID     STATUS    \none     4242    RUNNING\ntwo     0       STOPPED\nthree   77      PAUSED\n"


def test_tasks_and_images_are_read_from_the_clients_tables(host: CtrHost, ctr: Ctr) -> None:
    host.answers = {
        "--namespace default tasks list": TASKS,
        "--namespace default images list": (
            "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
            "example.test/a:1 application/vnd.oci.image.manifest.v1+json sha256:aa 1.1 MiB linux/amd64 -\n"
            "broken\n\n"
        ),
        "namespaces list --quiet": "default\nk8s.io\n",
    }
    assert ctr.tasks("default") == [
        Task("default", "one", 4242, "RUNNING"),
        Task("default", "two", 0, "STOPPED"),
        Task("default", "three", 77, "PAUSED"),
    ]
    assert ctr.images("default") == {"example.test/a:1": ImageState("sha256:aa")}
    assert ctr.namespaces() == ["default", "k8s.io"]


@pytest.mark.parametrize("text", ["", "TASK PID STATUS\n", "TASK PID STATUS\nshort\n", "x\none abc RUNNING\n"])
def test_an_empty_or_odd_table_holds_no_task(host: CtrHost, ctr: Ctr, text: str) -> None:
    host.answers = {"--namespace default tasks list": text}
    assert ctr.tasks("default") == []


def test_containers_are_asked_to_end_before_they_are_killed(host: CtrHost, ctr: Ctr) -> None:
    running = {"one": "RUNNING", "stubborn": "RUNNING", "frozen": "PAUSED"}

    def table() -> str:
        return "TASK PID STATUS\n" + "".join(f"{name} 7 {state}\n" for name, state in running.items())

    def end(name: str) -> Any:
        return lambda: running.update({name: "STOPPED"}) or ""

    kill = "--namespace default tasks kill --all --signal"
    host.answers = {
        "--namespace default tasks list": table,
        f"{kill} SIGTERM one": end("one"),
        f"{kill} SIGTERM frozen": end("frozen"),
        f"{kill} SIGKILL stubborn": end("stubborn"),
    }
    start = host.clock
    assert ctr.end_tasks("default", 10.0) == []
    lines = [line for line in host.commands if "tasks list" not in line]
    assert lines.index("--namespace default tasks resume frozen") < lines.index(f"{kill} SIGTERM frozen")
    assert f"{kill} SIGKILL one" not in lines
    assert lines.index(f"{kill} SIGTERM stubborn") < lines.index(f"{kill} SIGKILL stubborn")
    assert 10 <= host.clock - start < 15, "it had its grace, and no more"
    deleted = [line for line in lines if "tasks delete" in line]
    assert len(deleted) == 3


def test_what_ended_by_itself_is_not_waited_for(host: CtrHost, ctr: Ctr) -> None:
    host.answers = {"--namespace default tasks list": "TASK PID STATUS\ntwo 0 STOPPED\n"}
    start = host.clock
    ctr.end_tasks("default", 10.0)
    assert host.clock == start
    assert not [line for line in host.commands if "kill" in line]


def test_every_container_is_tried_and_each_failure_is_reported(host: CtrHost, ctr: Ctr) -> None:
    host.answers = {
        "--namespace default tasks list": TASKS.replace("RUNNING", "STOPPED").replace("PAUSED", "STOPPED"),
        "--namespace default tasks delete --force one": 1,
        "--namespace default tasks delete --force three": 1,
        "--namespace default containers list --quiet": "one\ntwo\n",
        "--namespace default containers delete one": 1,
    }
    assert len(ctr.end_tasks("default", 1.0)) == 2
    assert len(ctr.delete_containers("default")) == 1
    assert "--namespace default containers delete two" in host.commands


@pytest.mark.parametrize(
    "answer",
    [1, CommandError("command-timeout", "x", status=None), CommandError("command-missing", "x", status=None),
     CommandError("command-not-started", "x", status=None)],
    ids=["fails", "hangs", "missing", "cut short"],
)  # fmt: skip
def test_a_client_that_fails_is_no_answer(host: CtrHost, ctr: Ctr, answer: Any) -> None:
    host.answers = {"version": answer}
    assert not ctr.answers()
    start = host.clock
    with pytest.raises(StratumError) as caught:
        ctr.wait_until_answers(5.0)
    assert caught.value.reference == "containerd-silent"
    assert 5 <= host.clock - start < 7
    assert "5 s" in caught.value.message


def test_the_wait_ends_with_the_first_answer(host: CtrHost, ctr: Ctr) -> None:
    answers = iter([1, 1, ""])
    host.answers = {"version": lambda: next(answers)}
    ctr.wait_until_answers(60.0)
    assert host.commands == ["version"] * 3
