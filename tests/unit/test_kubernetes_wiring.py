"""How the parts of a Kubernetes node work together: from one state of a node to another, and back when that fails."""

from __future__ import annotations

import base64
import datetime
import io
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import UsageError
from stratum.host.notify import Watchdog
from stratum.node import kubelet, kubeletconfig
from stratum.node.containerd import CONFIG_PATH, DATABASE
from stratum.node.layout import Layout
from stratum.node.localdns import COREFILE
from stratum.node.settings import SETTINGS_PATH, read_settings
from stratum.node.stack import STARTED, Stack
from stratum.node.units import (
    KUBELET_CONFIG,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UNIT_LOCALDNS_NETWORK,
)
from stratum.output import Output
from stratum.receipt import Entry, Receipt
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.scripts.watch import Watch
from stratum.trust import certificates
from stratum.trust.validity import valid_until
from tests.fakes import Killed
from tests.kubernodes import (
    OTHER_SETTINGS,
    STANDALONE_WITH_DNS,
    TOKEN,
    NodeMachine,
    authority,
    bring,
    check_node,
    different,
    files_of,
    kubernetes_lab,
    node,
    worker,
)
from tests.nodes import Answer, Lab, boot, tree_of

DNS = STANDALONE_WITH_DNS


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with kubernetes_lab() as lab:
        bring(lab, "host", "bare", None, "up", "--bundle", "host.tar")
        bring(lab, "plain", "bare", None, "up", "--bundle", "old.tar")
        bring(lab, "old", "bare", DNS, "up", "--bundle", "old.tar")
        bring(lab, "worker", "bare", worker(more=DNS), "up", "--bundle", "old.tar")
        bring(lab, "changed", "old", OTHER_SETTINGS, "up")
        yield lab


STATES = {"host": "0.9", "plain": "1.0", "old": "1.0", "worker": "1.0", "changed": "1.0"}


def leave(lab: Lab, machine: NodeMachine) -> None:
    """Uninstall, and find the machine as it was before the first ``up``."""
    answer = lab.ask(machine, "uninstall")
    assert answer.status == 0, answer
    left = tree_of(Path(machine.root))
    changed = {name for name in {*left, *lab.original} if left.get(name) != lab.original.get(name)}
    assert changed <= {"/etc/stratum", "/etc/stratum/stratum.yaml"}
    assert machine.links == {} and machine.tables == {} and machine.on == {"/swap.img": -2}


@pytest.mark.parametrize("state", STATES)
def test_each_kind_of_node_is_whole_stays_so_and_leaves_no_trace(lab: Lab, state: str) -> None:
    with node(lab, state) as machine:
        assert check_node(machine, STATES[state]) == STATES[state]
        before = files_of(machine)
        again = lab.ask(machine, "up")
        assert again.text.startswith("nothing to do\n"), again
        assert different(machine, before) == set()
        leave(lab, machine)


# -- back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "body"),
    [
        ("host", DNS),
        ("host", worker(more=DNS)),
        ("plain", OTHER_SETTINGS),
        ("old", OTHER_SETTINGS),
        ("old", ""),
        ("worker", worker("", more=OTHER_SETTINGS)),
        ("worker", worker("", more="  localDNS: {enabled: false}\n")),
        ("changed", DNS),
    ],
)
def test_an_upgrade_whose_kubelet_never_answers_leaves_every_file_as_it_was(lab: Lab, state: str, body: str) -> None:
    with node(lab, state) as machine:
        before, links, tables = files_of(machine), dict(machine.links), dict(machine.tables)
        machine.configure(body or "  role: standalone\n")
        answer = lab.ask(machine, "upgrade", "--bundle", "bad.tar")
        assert answer.status == 20, answer
        assert answer.error is not None and UNIT_KUBELET in answer.error.message
        assert UNIT_CONTAINERD not in answer.error.message
        assert check_node(machine, STATES[state])
        found = {path for path in different(machine, before) if not path.startswith(PREPARED)}
        # An empty directory of ours does no harm, nor does the CA of a node that may yet be.
        kept = {str(kubeletconfig.CA_FILE)} if state == "host" else set()
        assert {path for path in found if not machine.is_dir(path)} <= kept
        assert (machine.links, machine.tables) == (links, tables)
        assert not machine.lexists(kubeletconfig.BOOTSTRAP)
        assert boot(lab, machine)
        assert check_node(machine, STATES[state])
        leave(lab, machine)


# What the host is prepared with stays: it is what a second try needs.
PREPARED = (
    "/etc/modules-load.d/", "/etc/sysctl.d/", "/etc/fstab", "/etc/NetworkManager", "/etc/systemd/network",
    "/var/lib/kubelet", "/var/lib/stratum/",
)  # fmt: skip


# -- from one kind to another ---------------------------------------------------------------------------------


def test_a_container_host_becomes_a_node_and_a_container_host_again(lab: Lab) -> None:
    with node(lab, "host") as machine:
        machine.configure(DNS)
        assert lab.ask(machine, "upgrade", "--bundle", "old.tar").status == 0
        assert check_node(machine, "1.0")
        machine.configure(OTHER_SETTINGS)
        assert lab.ask(machine, "upgrade", "--bundle", "new.tar").status == 0
        assert check_node(machine, "2.0")
        assert lab.ask(machine, "upgrade", "--bundle", "later-host.tar").status == 0
        assert check_node(machine, "3.0")
        assert not machine.active(UNIT_KUBELET) and not machine.active(UNIT_LOCALDNS)
        assert lab.ask(machine, "rollback", "1.0").status == 0
        assert check_node(machine, "1.0")
        leave(lab, machine)


def test_the_role_follows_the_configuration_both_ways(lab: Lab) -> None:
    with node(lab, "old") as machine:
        machine.configure(worker(more=DNS))
        answer = lab.ask(machine, "up")
        assert answer.status == 0, answer
        assert check_node(machine, "1.0")
        assert machine.exists(kubelet.CLIENT_CERTIFICATE) and not machine.exists(kubeletconfig.BOOTSTRAP)
        machine.configure(DNS)
        answer = lab.ask(machine, "up")
        assert answer.status == 0, answer
        assert check_node(machine, "1.0")
        assert not machine.exists(kubelet.CLIENT_CERTIFICATE), "a node that left a cluster keeps no credential of it"
        leave(lab, machine)


def restarted(machine: NodeMachine) -> set[str]:
    """The units that systemd was told to start, stop or restart."""
    found = [line.split() for line in machine.commands if line.startswith("systemctl ")]
    return {words[-1] for words in found if words[1] in ("start", "stop", "restart")} - {"stratum.service"}


ONLY_KUBELET, BOTH = {UNIT_KUBELET}, {UNIT_KUBELET, UNIT_CONTAINERD}
MIRROR = "  containerd: {registries: [{name: docker.io, mirrors: [{url: 'https://m.example.test'}]}]}\n"


@pytest.mark.parametrize(
    ("state", "body", "touched"),
    [
        ("worker", "  kubelet: {labels: {example.test/rack: r2}}\n", ONLY_KUBELET),
        ("worker", "  kubelet: {taints: [{key: example.test/only}]}\n", ONLY_KUBELET),
        ("plain", "  kubelet: {config: {maxPods: 20}}\n", ONLY_KUBELET),
        ("plain", "  kubelet: {launchCheck: [/bin/true]}\n", ONLY_KUBELET),
        ("plain", "  proxy: {https: 'http://192.0.2.80:3128'}\n", BOTH),
        ("plain", MIRROR, set()),
    ],
)
def test_only_the_units_that_read_what_changed_are_restarted(
    lab: Lab, state: str, body: str, touched: set[str]
) -> None:
    with node(lab, state) as machine:
        base = worker("", more=DNS) if state == "worker" else "  role: standalone\n"
        for text in (base + body, base):
            machine.configure(text)
            machine.commands.clear()
            answer = lab.ask(machine, "up")
            assert answer.status == 0, answer
            assert restarted(machine) - {UNIT_KUBELET_LAUNCH_CHECK} == touched
            assert check_node(machine, "1.0")
            assert lab.ask(machine, "up").text.startswith("nothing to do\n")


def test_localdns_comes_and_goes_with_the_configuration(lab: Lab) -> None:
    with node(lab, "plain") as machine:
        before = files_of(machine)
        machine.configure(DNS)
        assert lab.ask(machine, "up").status == 0
        assert check_node(machine, "1.0")
        assert machine.active(UNIT_LOCALDNS) and machine.active(UNIT_LOCALDNS_NETWORK)
        machine.configure("  role: standalone\n")
        assert lab.ask(machine, "up").status == 0
        assert check_node(machine, "1.0")
        assert not machine.active(UNIT_LOCALDNS) and not machine.active(UNIT_LOCALDNS_NETWORK)
        assert "NeedDaemonReload=yes" not in machine._show(UNIT_LOCALDNS_NETWORK)
        assert different(machine, before) <= {"/etc/stratum", "/etc/stratum/localdns", str(SETTINGS_PATH)}
        assert lab.ask(machine, "up").text.startswith("nothing to do\n")


# -- dry runs -------------------------------------------------------------------------------------------------

CHANGES = {
    "first": ("bare", DNS, ("up", "--bundle", "old.tar")),
    "join": ("bare", worker(more=DNS), ("up", "--bundle", "old.tar")),
    "localdns on": ("plain", DNS, ("up",)),
    "localdns off": ("old", "  role: standalone\n", ("up",)),
    "everything": ("plain", OTHER_SETTINGS, ("up",)),
    "nothing any more": ("changed", "  role: standalone\n", ("up",)),
    "leave": ("worker", DNS, ("up",)),
    "become a worker": ("old", worker(more=DNS), ("up",)),
    "upgrade": ("old", OTHER_SETTINGS, ("upgrade", "--bundle", "new.tar")),
    "upgrade without": ("changed", "  role: standalone\n", ("upgrade", "--bundle", "new.tar")),
    "upgrade from a container host": ("host", DNS, ("upgrade", "--bundle", "old.tar")),
    "upgrade to a container host": ("changed", DNS, ("upgrade", "--bundle", "later-host.tar")),
}


def plan_of(answer: Answer) -> list[tuple[str, str]]:
    assert answer.status == 0, answer
    document = json.loads(answer.text)
    return [
        (step["step"], f"{action['verb']} {action['subject']}")
        for step in document["steps"]
        for action in step["actions"]
        # On a node with a kubelet the images are imported behind containerd's gate, before the kubelet starts.
        if step["step"] != "images"
    ]


@pytest.mark.parametrize("name", CHANGES)
def test_a_dry_run_lists_what_the_real_run_does_and_writes_nothing(lab: Lab, name: str) -> None:
    state, body, command = CHANGES[name]
    with node(lab, state) as machine:
        machine.configure(body)
        if state != "bare":
            lab.ask(machine, "up", "--dry-run")
        before = tree_of(Path(machine.root))
        planned = plan_of(lab.ask(machine, *command, "--dry-run", "--output", "json"))
        assert tree_of(Path(machine.root)) == before
        done = plan_of(lab.ask(machine, *command, "--output", "json"))
        assert planned == done


def test_a_standalone_kubelet_is_stopped_before_it_would_trust_the_clients_of_a_cluster(lab: Lab) -> None:
    """It allows its clients everything, and reads the file of their CA as soon as it changes."""
    with node(lab, "plain") as machine:
        machine.configure(worker(more=DNS))
        actions = [action for _, action in plan_of(lab.ask(machine, "up", "--output", "json"))]
        stopped, trusted = actions.index(f"stop {UNIT_KUBELET}"), actions.index(f"write {kubeletconfig.CA_FILE}")
        assert stopped < trusted < actions.index(f"start {UNIT_KUBELET}")
        assert check_node(machine, "1.0")


# -- joining --------------------------------------------------------------------------------------------------


def test_a_first_join_that_is_refused_is_taken_back_whole_and_names_the_cause(lab: Lab) -> None:
    with node(lab, "bare") as machine:
        theirs = Path(machine.root, "var/lib/kubelet/theirs")
        theirs.parent.mkdir(parents=True)
        theirs.write_text("theirs\n")
        machine.configure(worker(more=DNS))
        before = tree_of(Path(machine.root))
        machine.refused = True
        answer = lab.ask(machine, "up", "--bundle", "old.tar")
        assert answer.error is not None and "the token is expired or wrong" in answer.error.message
        assert answer.error.state == "everything that was done is taken back"
        now = tree_of(Path(machine.root))
        assert {name for name in {*now, *before} if now.get(name) != before.get(name)} == set()
        assert machine.links == {} and machine.tables == {} and machine.on == {"/swap.img": -2}


def test_a_join_that_was_cut_off_before_the_token_was_written_asks_for_it_again(lab: Lab) -> None:
    with node(lab, "bare") as machine:
        machine.configure(worker(more=DNS))
        machine.arm(None)
        with node(lab, "bare") as other:
            other.configure(worker(more=DNS))
            other.arm(None)
            assert lab.run(other, "up", "--bundle", "old.tar") == 0
            moment = next(n for n, text in enumerate(other.mutations) if "bootstrap-kubeconfig" in text)
        machine.arm(moment)
        with pytest.raises(Killed):
            lab.run(machine, "up", "--bundle", "old.tar")
        assert machine.dead and machine.exists(SETTINGS_PATH)
        machine.revive()
        machine.configure(worker("", more=DNS))
        machine.commands.clear()
        answer = lab.ask(machine, "up", "--bundle", "old.tar")
        assert answer.error is not None and answer.error.reference == "join-missing"
        assert "has not joined" in answer.error.message and "--token-file" in (answer.error.hint or "")
        assert not any(line.startswith("systemctl start") for line in machine.commands)
        machine.configure(worker(more=DNS))
        assert lab.run(machine, "up", "--bundle", "old.tar") == 0
        assert check_node(machine, "1.0")


def test_the_token_is_nowhere_but_in_the_configuration(lab: Lab) -> None:
    with node(lab, "bare") as machine:
        machine.configure(worker(more=DNS))
        answers = [
            lab.ask(machine, "up", "--bundle", "old.tar", *more) for more in (("--dry-run",), ("--output", "json"))
        ]
        answers += [lab.ask(machine, name, "--output", "json") for name in ("status",)]
        said = "".join(answer.text + answer.said + repr(answer.error) for answer in answers)
        found = [
            path
            for path in Path(machine.root).rglob("*")
            if path.is_file() and not path.is_symlink() and TOKEN.split(".")[1].encode() in path.read_bytes()
        ]
        assert [path.name for path in found] == ["stratum.yaml"]
        assert TOKEN.split(".")[1] not in said + "\n".join(machine.commands)


# -- status ---------------------------------------------------------------------------------------------------


def status(lab: Lab, machine: NodeMachine) -> tuple[int, dict[str, Any], list[str]]:
    answer = lab.ask(machine, "status", "--output", "json")
    return answer.status, json.loads(answer.text), lab.ask(machine, "status").text.splitlines()


def test_the_status_shows_what_kind_of_node_it_is_and_until_when_a_workers_certificate_holds(lab: Lab) -> None:
    with node(lab, "worker") as machine:
        code, document, lines = status(lab, machine)
        assert (code, document["ready"], document["notReady"]) == (0, True, [])
        assert (document["role"], document["nodeName"]) == ("worker", "node")
        assert document["kubeletAnswers"] and document["localDNSAnswers"]
        until = certificates._load(authority("system:node:node").certificate).not_valid_after_utc
        assert document["certificateValidUntil"] == until.strftime("%Y-%m-%d %H:%M:%S UTC")
        assert f"identity   valid until {document['certificateValidUntil']}" in lines
        assert {"role       worker", "kubelet    answers", "LocalDNS   answers at 169.254.20.10"} <= set(lines)
        machine.clock += 20 * 365 * 86400
        code, document, lines = status(lab, machine)
        assert code == 1 and "expired" in document["notReady"][0]
        Path(machine.real(kubelet.CLIENT_CERTIFICATE)).unlink()
        assert "has not joined its cluster yet" in status(lab, machine)[2][-1]


def test_the_status_says_why_a_node_is_not_ready(lab: Lab) -> None:
    with node(lab, "old") as machine:
        program, *rest = machine.running[UNIT_KUBELET]
        machine.running[UNIT_KUBELET] = (program + b"silent", rest[0], rest[1])
        machine.links["stratum-dns0"].clear()
        code, document, lines = status(lab, machine)
        assert code == 1
        assert [line.partition(":")[0] for line in document["notReady"]] == [
            "the kubelet does not answer",
            "LocalDNS does not answer",
        ]
        assert document["certificateValidUntil"] is None and lines[-1].startswith("ready      no: the kubelet")
    with node(lab, "host") as machine:
        assert "role" not in status(lab, machine)[1]


@given(st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2100, 1, 1)))
def test_the_end_of_a_certificate_is_read_as_the_library_reads_it(moment: datetime.datetime) -> None:
    made = certificates.make_authority(moment.replace(tzinfo=datetime.timezone.utc).timestamp(), "x", "y")
    for pem in (made.ca, made.certificate, b"words\n" + made.key + made.certificate):
        first = b"-----BEGIN CERTIFICATE-----" + pem.split(b"-----BEGIN CERTIFICATE-----")[1]
        assert valid_until(pem) == certificates._load(first).not_valid_after_utc.timestamp()


@given(st.binary(max_size=60))
def test_what_is_no_certificate_has_no_end(data: bytes) -> None:
    armoured = b"-----BEGIN CERTIFICATE-----" + base64.b64encode(b"\x30" + data) + b"-----END CERTIFICATE-----"
    for pem in (data, armoured, b"-----BEGIN CERTIFICATE-----" + data + b"-----END CERTIFICATE-----"):
        with pytest.raises(ValueError):
            valid_until(pem)


# -- the supervisor -------------------------------------------------------------------------------------------


def watch_of(machine: NodeMachine) -> tuple[Watch, io.StringIO]:
    said = io.StringIO()
    context, stack = Context(machine, Output(stdout=io.StringIO(), stderr=said)), Stack(Layout(machine))
    bring_up, put_right = supervise.bring_up, supervise.put_right
    watch = Watch(
        context, stack, lambda: bring_up(context, stack), lambda: put_right(context, stack), Watchdog(machine)
    )
    for _ in range(3):
        watch.look()
        machine.clock += 400
    return watch, said


def change(machine: NodeMachine, path: object) -> None:
    Path(machine.root + str(path)).write_text("somebody else's\n")


def remove(machine: NodeMachine, path: object) -> None:
    Path(machine.root + str(path)).unlink()


def leave_token(machine: NodeMachine, _: object) -> None:
    path = Path(machine.root + str(kubeletconfig.BOOTSTRAP))
    path.write_text(TOKEN)
    path.chmod(0o600)


def lose_link(machine: NodeMachine, _: object) -> None:
    machine.links.clear()
    Path(machine.root, "sys/class/net/stratum-dns0").rmdir()


def kill_kubelet(machine: NodeMachine, _: object) -> None:
    machine.running.pop(UNIT_KUBELET)
    machine.units[UNIT_KUBELET].active = "inactive"


@pytest.mark.parametrize(
    ("state", "happens", "path", "words"),
    [
        ("old", change, KUBELET_CONFIG, f"{KUBELET_CONFIG}: it was changed: put right"),
        ("old", remove, KUBELET_CONFIG, f"{KUBELET_CONFIG}: it is gone: put right"),
        ("old", change, CONFIG_PATH, f"{CONFIG_PATH}: it was changed: put right"),
        ("old", change, COREFILE, f"{COREFILE}: it was changed: put right"),
        ("old", remove, COREFILE, f"{COREFILE}: it is gone: put right"),
        ("old", lose_link, "", "not in force for LocalDNS: stratum-dns0: put right"),
        ("worker", leave_token, "", "the token that the node joined with is still on the disk: put right"),
        ("changed", kill_kubelet, "", f"{UNIT_KUBELET} was down and has been started again"),
    ],
)
def test_the_supervisor_puts_right_what_came_undone_on_a_node(
    lab: Lab, state: str, happens: Callable[[NodeMachine, object], None], path: object, words: str
) -> None:
    with node(lab, state) as machine:
        watch, said = watch_of(machine)
        before = files_of(machine)
        happens(machine, path)
        for _ in range(4):
            watch.look()
            machine.clock += 60
        assert words in said.getvalue()
        assert different(machine, before) == set()
        assert not machine.exists(kubeletconfig.BOOTSTRAP)
        assert check_node(machine, "1.0")


def test_a_kubelet_whose_launch_check_refused_is_left_alone_and_starts_once_it_agrees(lab: Lab) -> None:
    with node(lab, "changed") as machine:
        watch, said = watch_of(machine)
        kill_kubelet(machine, "")
        machine.verdict, machine.units[UNIT_KUBELET_LAUNCH_CHECK].active = 78, "failed"
        machine.commands.clear()
        watch.look()
        assert "refused this node for good" in said.getvalue() and restarted(machine) == set()
        machine.verdict, machine.units[UNIT_KUBELET_LAUNCH_CHECK].active = 0, "inactive"
        watch.look()
        assert check_node(machine, "1.0")


def test_a_token_that_a_crash_left_on_the_disk_goes_at_the_next_start(lab: Lab) -> None:
    for state in ("worker", "old", "host"):
        with node(lab, state) as machine:
            Path(machine.root, "etc/stratum/kubelet").mkdir(exist_ok=True, parents=True)
            leave_token(machine, "")
            Receipt.load(machine).record(Entry(kubeletconfig.BOOTSTRAP, "file", ("sha256:0",)))
            assert boot(lab, machine)
            assert not machine.exists(kubeletconfig.BOOTSTRAP), state


def test_images_that_vanish_from_a_node_are_imported_again(lab: Lab) -> None:
    with node(lab, "old") as machine:
        watch, _ = watch_of(machine)
        database = Path(machine.root + str(DATABASE))
        database.parent.mkdir(parents=True, exist_ok=True)
        database.write_text("one")
        watch.look()
        machine.images.clear()
        database.write_text("other")
        for _ in range(3):
            machine.clock += 100
            watch.look()
        assert "example.test/demo:1.0" in machine.images


# -- secrets --------------------------------------------------------------------------------------------------

WORD = TOKEN.replace(".", "")
MALFORMED = [
    f"  cluster: {{server: 'https://x', token:{TOKEN}}}\n",
    "  cluster: {server: 'https://x', token:hunter2}\n",
    f"  cluster:\n    server: https://x\n    token {TOKEN}\n",
    f"  cluster:\n    token: [{TOKEN}]\n",
    f"  cluster:\n    token: {{{TOKEN}: x}}\n",
    f"  cluster:\n    token: {TOKEN} x\n",
    f"  cluster:\n    token: {TOKEN}\u00e9\n",
    f"  cluster:\n    token: '{TOKEN}\n",
    f"  cluster:\n    token: *{WORD}\n",
    f"  cluster:\n    token: !a{WORD}!b x\n",
    f"  cluster:\n    a: &{WORD} x\n    token: &{WORD} x\n",
    f"  cluster:\n    token:{TOKEN}\n",
    f"  cluster:\n    token:{TOKEN}: \n",
    f"  cluster:\n    ? {TOKEN}\n",
]


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_token_is_quoted_in_no_error_and_no_traceback(lab: Lab, body: str) -> None:
    with node(lab, "bare") as machine:
        machine.configure(body)
        with pytest.raises(UsageError) as caught:
            lab.desk.up(machine, lab.desk.directory / "old.tar")
        said = "".join(traceback.format_exception(caught.type, caught.value, caught.tb)) + (caught.value.hint or "")
        assert not any(secret in said for secret in (TOKEN, WORD, TOKEN.split(".")[1], "hunter2"))
        assert not any(secret in caught.value.message for secret in (TOKEN, WORD, "hunter2"))


def test_records_that_others_can_read_have_no_secret_and_no_digest_of_one(lab: Lab) -> None:
    with node(lab, "bare") as machine:
        proxy = "  proxy: {https: 'http://user:hunter2@192.0.2.80:3128'}\n"
        header = "  kubelet: {config: {staticPodURLHeader: {Authorization: [hunter2]}}}\n"
        machine.configure(worker(more=proxy + header))
        machine.refused = True
        assert lab.ask(machine, "up", "--bundle", "old.tar").status != 0
        machine.refused = False
        assert lab.ask(machine, "up", "--bundle", "old.tar").status == 0
        assert Path(machine.root + str(STARTED)).stat().st_mode & 0o077 == 0
        for path in Path(machine.root).rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o077:
                data = path.read_bytes()
                assert not any(secret in data for secret in (b"hunter2", TOKEN.split(".")[1].encode())), path
        assert "hunter2" not in "\n".join(machine.commands)


# -- others' files --------------------------------------------------------------------------------------------

FOREIGN = (
    "/var/lib/kubelet/theirs",
    "/opt/cni/bin/calico",
    "/etc/cni/net.d/05-theirs.conflist",
    "/etc/stratum/containerd/conf.d/theirs.toml",
    "/etc/stratum/containerd/certs.d/theirs.example.test/hosts.toml",
    "/etc/stratum/kubelet/manifests/theirs.yaml",
    f"/etc/systemd/system/{UNIT_KUBELET}.d/90-theirs.conf",
)
NAMED = {
    "/opt/cni/bin", "/etc/cni/net.d", "/etc/stratum/containerd/conf.d", "/etc/stratum/kubelet/manifests",
    f"/etc/systemd/system/{UNIT_KUBELET}.d",
}  # fmt: skip


@pytest.mark.parametrize("state", ["changed", "worker"])
def test_files_of_others_in_our_directories_stay_and_are_named(lab: Lab, state: str) -> None:
    with node(lab, "bare") as machine:
        theirs = Path(machine.root + FOREIGN[0])
        theirs.parent.mkdir(parents=True)
        theirs.write_text("theirs\n")
        machine.configure(OTHER_SETTINGS if state == "changed" else worker(more=DNS))
        assert lab.ask(machine, "up", "--bundle", "old.tar").status == 0
        for name in FOREIGN[1:]:
            path = Path(machine.root + name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[Service]\n" if name.endswith(".conf") else "# theirs\n")
        answer = lab.ask(machine, "uninstall", "--output", "json")
        assert answer.status == 0, answer
        assert {item["path"] for item in json.loads(answer.text)["left"]} >= NAMED
        left = {name for name in tree_of(Path(machine.root)) if name not in lab.original}
        kept = {name for name in left if Path(machine.root + name).is_file()}
        assert kept == {*FOREIGN, "/etc/stratum/stratum.yaml"}


# -- other ways -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "body"), [("old", worker(more=DNS)), ("worker", DNS)])
def test_an_upgrade_does_not_change_the_cluster_of_a_node_which_could_not_go_back(
    lab: Lab, state: str, body: str
) -> None:
    with node(lab, state) as machine:
        before = files_of(machine)
        machine.configure(body)
        answer = lab.ask(machine, "upgrade", "--bundle", "new.tar")
        assert (answer.status, answer.error and answer.error.reference) == (2, "other-cluster")
        assert different(machine, before) == set()
        assert lab.ask(machine, "up").status == 0
        assert lab.ask(machine, "upgrade", "--bundle", "new.tar").status == 0
        assert check_node(machine, "2.0")


def test_a_rollback_to_a_node_that_never_ran_gives_it_a_name_and_an_address(lab: Lab) -> None:
    with node(lab, "host") as machine:
        assert lab.ask(machine, "upgrade", "--bundle", "new.tar", "--prepare-only").status == 0
        assert lab.ask(machine, "rollback", "2.0").status == 0
        settings = read_settings(machine)
        assert (settings.node_name, settings.node_ip) == ("node", "192.0.2.10")
        assert check_node(machine, "2.0")
        leave(lab, machine)


def test_a_way_back_that_lacks_one_part_does_all_the_others(lab: Lab) -> None:
    with node(lab, "worker") as machine:
        before = files_of(machine)
        machine.configure(worker("", more=OTHER_SETTINGS))
        machine.hooks[f"systemctl start {UNIT_KUBELET}"] = lambda: Path(
            machine.real(kubelet.CLIENT_CERTIFICATE)
        ).unlink(missing_ok=True)
        answer = lab.ask(machine, "upgrade", "--bundle", "bad.tar")
        assert answer.status in (20, 21), answer
        changed = {path for path in different(machine, before) if not machine.is_dir(path)}
        assert changed - {str(kubelet.CLIENT_CERTIFICATE), "/var/lib/stratum/settings.earlier.json"} <= {
            path for path in changed if path.startswith(PREPARED)
        }
        assert Layout(machine).current() == "1.0"
