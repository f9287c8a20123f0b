"""The kubelet's files on a host: whose they are, its proxy, its serving certificate, and its gate's words."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.config import Kubelet, Network, NodeSpec, Proxy
from stratum.errors import StratumError
from stratum.host.finding import REJECT
from stratum.host.kubeletstate import check_kubelet_port, check_kubelet_state
from stratum.node import kubelet, kubeletready, launchcheck
from stratum.node.kubeletroot import KUBELET_TREES, kubelet_mount_roots, plan_kubelet_remains, plan_kubelet_root
from stratum.node.proxy import PROXY_FILE, no_proxy, plan_proxy, proxy_file, render_proxy
from stratum.node.settings import Settings
from stratum.node.units import UNIT_KUBELET, UNIT_KUBELET_LAUNCH_CHECK
from stratum.receipt import RECEIPT_PATH, Receipt
from stratum.removal import plan_removal
from stratum.scripts.footprint import find_place, is_own
from stratum.system import Completed, Host, HostPath
from stratum.trust import certificates
from tests.unit.hosting import content, perform, put, snapshot, work_on
from tests.unit.kubelets import STANDALONE_SETTINGS, KubeletHost, bring, host_in, worker

SECRET = 'p@ss%w"o`r$d\\'


@pytest.fixture
def host(memory: Path) -> KubeletHost:
    (memory / "root").mkdir()
    return host_in(memory / "root")


def remove(host: Host) -> None:
    """What uninstall does with these files: our part of shared directories, then the receipt."""
    perform(host, plan_kubelet_remains)
    work = work_on(host)
    removal = plan_removal(work)
    for action in [*removal.actions, *removal.closing]:
        action.perform(work)


# -- whose the files are -------------------------------------------------------------------------------------


def test_what_is_written_is_ours_or_in_the_footprint(host: KubeletHost) -> None:
    before = set(snapshot(host))
    bring(host, STANDALONE_SETTINGS)
    written = {HostPath(name) for name in set(snapshot(host)) - before} | {entry.path for entry in Receipt.load(host)}
    outside = {path for path in written if not is_own(path)}
    assert {path for path in outside if find_place(path) is None} == set()
    assert set(KUBELET_TREES) <= outside


def test_uninstall_takes_all_that_a_kubelet_made(host: KubeletHost) -> None:
    (Path(host.root) / "var/log").mkdir(parents=True)
    before = snapshot(host)
    bring(host, STANDALONE_SETTINGS)
    put(host, "/var/lib/kubelet/pki/kubelet.key", "key")
    put(host, "/var/lib/kubelet/pods/1/volumes/x", "data")
    put(host, "/var/log/pods/default_a_1/c/0.log", "log")
    remove(host)
    assert snapshot(host) == before
    assert not host.exists("/var/lib/kubelet") and not host.exists("/etc/stratum")


def test_what_was_in_the_kubelets_directory_before_stays(host: KubeletHost) -> None:
    put(host, "/var/lib/kubelet/device-plugins/theirs.sock", "")
    put(host, "/var/lib/kubelet/notes.txt", "mine")
    before = snapshot(host)
    bring(host, STANDALONE_SETTINGS)
    assert bring(host, STANDALONE_SETTINGS) == []
    put(host, "/var/lib/kubelet/pods/1/volumes/x", "data")
    put(host, "/var/lib/kubelet/device-plugins/ours.sock", "")
    assert HostPath("/var/lib/kubelet/pods") in kubelet_mount_roots(work_on(host))
    assert HostPath("/var/lib/kubelet") not in kubelet_mount_roots(work_on(host))
    remove(host)
    found = snapshot(host)
    assert found.pop("/var/lib/kubelet/device-plugins/ours.sock") == b"", "in a directory of theirs"
    assert found == before


def test_a_link_that_a_pod_put_there_leads_uninstall_to_no_mount_of_others(host: KubeletHost) -> None:
    put(host, "/var/lib/kubelet/notes.txt", "mine")
    bring(host, STANDALONE_SETTINGS)
    put(host, "/home/mine.txt", "mine")
    for name in ("/var/lib/kubelet/all", "/var/log/pods", "/var/log/containers"):
        path = Path(host.root + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/")
    assert kubelet_mount_roots(work_on(host)) == ()
    remove(host)
    assert content(host, "/home/mine.txt") == b"mine"
    assert not host.lexists("/var/lib/kubelet/all")


def test_an_empty_directory_that_was_there_is_ours_to_fill_and_to_remove(host: KubeletHost) -> None:
    (Path(host.root) / "var/lib/kubelet").mkdir(parents=True)
    perform(host, plan_kubelet_root)
    assert perform(host, plan_kubelet_root) == []
    entry = Receipt.load(host).get("/var/lib/kubelet")
    assert entry is not None and entry.kind == "tree"


def test_a_mount_below_the_kubelets_directory_is_never_entered(
    host: KubeletHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 47: the canary is on a share that is mounted at a place of a volume plugin."""
    put(host, "/var/lib/kubelet/theirs", "")
    bring(host, STANDALONE_SETTINGS)
    put(host, "/var/lib/kubelet/plugins/x/pv/canary", "alive")
    real = os.path.realpath(f"{host.root}/var/lib/kubelet/plugins/x/pv")
    monkeypatch.setattr(Host, "mount_points", lambda _host: [real])
    with pytest.raises(StratumError) as caught:
        perform(host, plan_kubelet_remains)
    assert caught.value.reference == "mount-in-the-way" and "plugins/x/pv" in caught.value.message
    assert content(host, "/var/lib/kubelet/plugins/x/pv/canary") == b"alive"


@pytest.mark.parametrize("name", ["pki/kubelet-client-current.pem", "config.yaml", "kubeconfig", "kubeadm-flags.env"])
def test_another_kubelets_identity_is_refused_before_anything_is_written(host: KubeletHost, name: str) -> None:
    put(host, f"/var/lib/kubelet/{name}", "theirs")
    (finding,) = check_kubelet_state(host, Receipt.load(host))
    assert (finding.check, finding.severity) == ("kubelet-state", REJECT)
    assert f"/var/lib/kubelet/{name.split('/')[0]}" in finding.message and "kubeadm reset" in finding.hint


@pytest.mark.parametrize(
    ("protocol", "line", "taken"),
    [
        ("tcp6", "  1: 00000000000000000000000000000000:280A 00000000000000000000000000000000:0000 0A 0:0", [10250]),
        ("tcp", "  1: 0100007F:2808 00000000:0000 0A 0:0", [10248]),
        ("tcp", "  1: 0A0200C0:280A 00000000:0000 0A 0:0\n  2: 0100007F:2808 00000000:0000 0A 0:0", [10250, 10248]),
        ("tcp", "  1: 00000000:2809 00000000:0000 0A 0:0", []),
        ("tcp", "  1: 0A0200C0:280A 0B0200C0:9C40 01 0:0", []),  # a connection
        ("tcp", "  1: 0A0200C0:9C40 0B0200C0:280A 01 0:0", []),  # to another host's kubelet
        ("tcp", "  1:", []),
    ],
)
def test_a_kubelet_under_another_name_is_found_by_its_ports(
    host: KubeletHost, protocol: str, line: str, taken: list[int]
) -> None:
    """k3s and MicroK8s: no unit, program or process of theirs is called kubelet."""
    put(host, f"/proc/net/{protocol}", f"  sl  local_address rem_address st\n{line}\n")
    found = check_kubelet_port(host, Receipt.load(host), (10250, 10248))
    assert [finding.message.split()[1] for finding in found] == [str(port) for port in taken]
    assert all((finding.check, finding.severity) == ("kubelet-port", REJECT) for finding in found)
    # On a node of ours it is our own.
    bring(host, STANDALONE_SETTINGS)
    assert check_kubelet_port(host, Receipt.load(host), (10250, 10248)) == []


def test_our_own_state_and_harmless_leftovers_are_no_finding(host: KubeletHost) -> None:
    assert check_kubelet_state(host, Receipt.load(host)) == []
    put(host, "/var/lib/kubelet/device-plugins/x", "")
    assert check_kubelet_state(host, Receipt.load(host)) == []
    bring(host, STANDALONE_SETTINGS)
    put(host, "/var/lib/kubelet/pki/kubelet.crt", "ours")
    assert check_kubelet_state(host, Receipt.load(host)) == []


def test_a_record_of_what_was_there_that_cannot_be_read_is_an_error_and_no_guess(host: KubeletHost) -> None:
    put(host, "/var/lib/kubelet/theirs", "")
    perform(host, plan_kubelet_root)
    put(host, "/var/lib/stratum/kubelet-before.json", "[")
    for plan in (plan_kubelet_root, plan_kubelet_remains):
        with pytest.raises(StratumError) as caught:
            perform(host, plan)
        assert caught.value.reference == "kubelet-record-unreadable"


# -- the node's own CA ------------------------------------------------------------------------------------------


def test_a_ca_that_ran_out_or_lost_its_key_is_made_anew(host: KubeletHost) -> None:
    bring(host, STANDALONE_SETTINGS)
    first = content(host, "/etc/stratum/kubelet/ca.crt")
    host.clock = time.time() + 11 * 365 * 86400
    (said,) = [line for line in bring(host, STANDALONE_SETTINGS) if line.startswith("make /etc")]
    assert "expired at" in said
    assert content(host, "/etc/stratum/kubelet/ca.crt") != first
    os.unlink(f"{host.root}{kubelet.ADMIN_KEY}")
    assert len(bring(host, STANDALONE_SETTINGS)) == 1
    assert bring(host, STANDALONE_SETTINGS) == []


def test_a_crash_while_the_ca_is_made_is_mended_by_the_next_run(host: KubeletHost) -> None:
    bring(host, STANDALONE_SETTINGS)
    other = certificates.make_authority(time.time(), "stratum-admin", "x")
    work = work_on(host)
    kubelet.WriteFile(kubelet.ADMIN_KEY, other.key, 0o600).perform(work)
    (said,) = bring(host, STANDALONE_SETTINGS)
    assert "do not belong together" in said
    ca, pem = (content(host, path) for path in ("/etc/stratum/kubelet/ca.crt", str(kubelet.ADMIN_CERTIFICATE)))
    assert certificates.issued_by(pem, ca)


def test_the_mode_of_a_key_is_put_right(host: KubeletHost) -> None:
    bring(host, STANDALONE_SETTINGS)
    os.chmod(f"{host.root}{kubelet.ADMIN_KEY}", 0o644)
    bring(host, STANDALONE_SETTINGS)
    assert stat.S_IMODE(os.stat(f"{host.root}{kubelet.ADMIN_KEY}").st_mode) == 0o600


def test_a_file_of_somebody_else_is_not_replaced(host: KubeletHost) -> None:
    put(host, "/etc/stratum/kubelet/ca.crt", "theirs")
    with pytest.raises(StratumError, match="that Stratum did not write"):
        bring(host, STANDALONE_SETTINGS)
    assert content(host, "/etc/stratum/kubelet/ca.crt") == b"theirs"


# -- the kubelet's serving certificate ----------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "removed"), [(-30 * 86400, True), (0, False), (11 * 365 * 86400, True)])
def test_a_serving_certificate_of_the_future_or_the_past_is_removed_so_that_a_new_one_is_made(
    host: KubeletHost, offset: float, removed: bool
) -> None:
    """Row 46: made while the clock was ahead; the kubelet would keep it for ever."""
    bring(host, STANDALONE_SETTINGS)
    pair = certificates.make_authority(time.time(), "node-1", "x")
    put(host, str(kubelet.SERVING_CERTIFICATE), pair.certificate)
    put(host, str(kubelet.SERVING_KEY), pair.key)
    host.clock = time.time() + offset
    done = [line for line in bring(host, STANDALONE_SETTINGS) if str(kubelet.SERVING_CERTIFICATE) in line]
    assert len(done) == removed and all("and the clock says" in line for line in done)
    assert host.exists(kubelet.SERVING_CERTIFICATE) is not removed
    assert host.exists(kubelet.SERVING_KEY) is not removed


# -- the proxy -----------------------------------------------------------------------------------------------------


def behind(proxy: Proxy) -> Settings:
    network = Network(cluster_cidrs=("10.244.0.0/16", "10.96.0.0/12"))
    return Settings(NodeSpec(proxy=proxy, network=network), "192.0.2.10,2001:db8::10", "node-1")


def test_what_is_the_nodes_own_never_goes_through_the_proxy() -> None:
    """Row 43."""
    words = no_proxy(behind(Proxy("http://p:3128", no_proxy=("registry.example", "10.96.0.0/12")))).split(",")
    for word in (
        "127.0.0.1",
        "::1",
        "localhost",
        "192.0.2.10",
        "2001:db8::10",
        "10.244.0.0/16",
        ".svc",
        ".cluster.local",
    ):
        assert word in words
    assert words[-1] == "registry.example" and len(words) == len(set(words))


def read_environment_file(text: str) -> dict[str, str]:
    """systemd.exec(5), EnvironmentFile: in double quotes a backslash takes the next character as it is."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.partition("=")
        assert value[0] == value[-1] == '"'
        plain, rest = "", iter(value[1:-1])
        for char in rest:
            assert char != '"'
            plain += next(rest) if char == "\\" else char
        found[name] = plain
    return found


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30))
def test_any_password_reaches_the_programs_as_it_is(password: str) -> None:
    address = f"http://user:{password}@p:3128"
    found = read_environment_file(render_proxy(behind(Proxy(https=address))).decode())
    assert found["HTTPS_PROXY"] == found["https_proxy"] == address
    assert found["HTTP_PROXY"] == found["http_proxy"] == ""
    assert found["NO_PROXY"] == found["no_proxy"]


def test_a_password_is_in_one_file_for_root_alone_and_goes_with_the_proxy(host: KubeletHost) -> None:
    settings = behind(Proxy(http=f"http://u:{SECRET}@p:3128"))
    assert proxy_file(settings) == PROXY_FILE
    done = perform(host, lambda work: plan_proxy(work, settings))
    assert stat.S_IMODE(os.stat(f"{host.root}{PROXY_FILE}").st_mode) == 0o600
    assert SECRET not in "".join(done) and SECRET.encode() not in content(host, str(RECEIPT_PATH))
    assert perform(host, lambda work: plan_proxy(work, settings)) == []
    assert perform(host, lambda work: plan_proxy(work, behind(Proxy()))) == [f"remove {PROXY_FILE}"]
    assert perform(host, lambda work: plan_proxy(work, behind(Proxy()))) == []
    assert proxy_file(behind(Proxy())) is None and not host.exists(PROXY_FILE)


# -- the gate's words --------------------------------------------------------------------------------------------------


CHECKED = dataclasses.replace(STANDALONE_SETTINGS, spec=NodeSpec(kubelet=Kubelet(launch_check=("/bin/true",))))


class Answering(KubeletHost):
    """Answers for healthz and for systemctl as the test says."""

    status, body = 200, b"ok"
    shown = ""

    def get_local(self, port: int, path: str, timeout: float) -> tuple[int, bytes]:
        assert (port, path) == (10248, "/healthz")
        return self.status, self.body

    def run(self, argv: Any, **options: Any) -> Completed:
        if argv[0] == "systemctl":
            return Completed(tuple(argv), 0, self.shown.encode(), b"")
        return super().run(argv, **options)


def test_a_kubelet_that_is_not_well_says_so(memory: Path) -> None:
    host = Answering(str(memory))
    kubeletready.wait_kubelet(host, STANDALONE_SETTINGS, 1.0)
    host.status, host.body = 500, b"[-]syncloop failed\n"
    host.journal = ["I1130 10:00:00.000000    1 server.go:1] started", 'E1130 10:00:01.000000    1 pleg.go:9] "relist"']
    with pytest.raises(StratumError) as caught:
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS, 0.0)
    assert "healthz says 500: [-]syncloop failed" in caught.value.message
    assert caught.value.message.endswith('"relist"') and "E1130" not in caught.value.message
    assert UNIT_KUBELET in (caught.value.hint or "")


def test_a_final_refusal_of_the_launch_check_ends_the_wait_at_once(memory: Path) -> None:
    host = Answering(str(memory))
    host.status = 500
    host.shown = "ExecMainStatus=78\nActiveState=failed\nLoadState=loaded\n"
    host.journal = ["the node is not allocated to you", f"{UNIT_KUBELET_LAUNCH_CHECK}: Failed with result 'exit-code'."]
    with pytest.raises(StratumError) as caught:
        kubeletready.wait_kubelet(host, CHECKED, 600.0)
    assert caught.value.reference == "launch-refused"
    assert "not allocated to you" in caught.value.message and UNIT_KUBELET_LAUNCH_CHECK in caught.value.message


@pytest.mark.parametrize(
    "shown", ["", "ExecMainStatus=1\nActiveState=failed\n", "ExecMainStatus=78\nActiveState=activating\n"]
)
def test_any_other_end_of_the_launch_check_is_no_refusal(memory: Path, shown: str) -> None:
    host = Answering(str(memory))
    host.shown = shown
    assert not launchcheck.read_launch_check(host).refused


def test_a_launch_check_that_goes_on_trying_is_what_the_gate_says(memory: Path) -> None:
    host = Answering(str(memory))
    host.status = 500
    host.shown = "ExecMainStatus=1\nActiveState=activating\n"
    host.journal = ["no allocation yet"]
    with pytest.raises(StratumError) as caught:
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS, 0.0)
    assert caught.value.reference == "launch-check-failing" and "no allocation yet" in caught.value.message


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nX-Slow: "])
def test_who_answers_a_byte_at_a_time_is_waited_for_no_longer_than_who_is_silent(head: bytes) -> None:
    """While the kubelet is down, any user of the host may listen at its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            channel, _ = server.accept()
            with channel, contextlib.suppress(OSError):
                channel.sendall(head)
                for _ in range(200):
                    channel.sendall(b"x")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            Host().get_local(server.getsockname()[1], "/healthz", 0.5)
        assert time.monotonic() - begun < 5
        thread.join()


def test_a_local_question_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 44: urllib would send 127.0.0.1 through it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert Host().get_local(server.server_address[1], "/healthz", 10.0) == (200, b"/healthz")
    with pytest.raises(OSError):
        Host().get_local(9, "/healthz", 1.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tls: failed to verify certificate: x509: certificate has expired or is not yet valid: current time", "clock"),
        ("x509: certificate signed by unknown authority", "not signed by the CA"),
        ("x509: certificate is valid for 10.96.0.1, 192.0.2.1, not 127.0.0.1", "not for the name or address"),
        ('"Failed" err="Unauthorized"', "token is expired or wrong"),
        ("dial tcp 192.0.2.1:6443: connect: connection refused", "cannot be reached"),
        ("dial tcp: lookup api.example: no such host", "cannot be reached"),
        ("unable to load bootstrap kubeconfig: stat /etc/x: no such file or directory", "no certificate that is valid"),
        ("running with swap on is not supported", "swap is on"),
    ],
)  # fmt: skip
def test_the_cause_is_named_and_the_kubelets_own_words_are_quoted(memory: Path, line: str, words: str) -> None:
    host = host_in(memory)
    host.journal = ["E1130 10:00:00.000000    1 run.go:72] " + line, "I1130 10:00:00.000000    1 x.go:1] later"]
    error = kubeletready.explain(host, "no answer", 5.0)
    assert words in error.message and line in error.message and error.hint


def test_what_a_running_kubelet_depends_on_is_named() -> None:
    found = kubelet.kubelet_inputs(worker())
    assert HostPath("/var/lib/stratum/join.json") in found
    assert HostPath("/etc/stratum/kubelet/bootstrap-kubeconfig") not in found
    given = dataclasses.replace(worker(client_certificate_file="/x"))
    assert kubelet.GIVEN_KEY in kubelet.kubelet_inputs(given)
    assert kubelet.kubelet_inputs(STANDALONE_SETTINGS) == (kubelet.KUBELET_CONFIG, kubelet.CA_FILE)


# -- a kubelet that ends again and again ----------------------------------------------------------------------


@dataclasses.dataclass
class LoopingHost(KubeletHost):
    """A machine whose kubelet ends every five seconds; time passes at once."""

    since: float = 0.0
    every: float = 5.0

    def monotonic(self) -> float:
        return self.since

    def sleep(self, seconds: float) -> None:
        self.since += seconds

    def run(self, argv: Any, **options: Any) -> Completed:
        if "--property=NRestarts" in argv:
            return Completed(tuple(argv), 0, f"NRestarts={7 + int(self.since / self.every)}\n".encode(), b"")
        return super().run(argv, **options)

    def get_local(self, port: int, path: str, timeout: float) -> tuple[int, bytes]:
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("line", "patience"),
    [
        ('E1130 10:00:00.000000  1 run.go:72] "command failed" err="unknown flag: --nonsense"', 30),
        ("stratum-kubelet.service: Failed at step EXEC spawning /opt/x/kubelet: Exec format error", 30),
        ('E1130 10:00:00.000000  1 run.go:72] "command failed" err="failed to run Kubelet: Unauthorized"', 30),
        ('"command failed" err="failed to run Kubelet: dial tcp 192.0.2.1:6443: connect: connection refused"', 181),
        ('"command failed" err="failed to run Kubelet: timed out waiting for the condition"', 181),
    ],
)
def test_a_kubelet_that_ends_again_and_again_is_waited_for_only_where_that_may_pass(
    memory: Path, line: str, patience: float
) -> None:
    (memory / "root").mkdir()
    host = LoopingHost(str(memory / "root"), programs={"systemctl": lambda _: 0}, journal=[line])
    with pytest.raises(StratumError) as caught:
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS)
    assert caught.value.reference == "kubelet-not-ready"
    assert patience - 12 <= host.since <= patience
    assert line.rpartition("] ")[2][-30:] in caught.value.message


def test_a_kubelet_whose_last_words_are_not_of_the_network_is_not_waited_for_because_others_were(memory: Path) -> None:
    (memory / "root").mkdir()
    noise = "W1130 reflector.go:569] failed to list *v1.Node: dial tcp 192.0.2.1:6443: connect: connection refused"
    words = 'E1130 10:00:00.000000  1 run.go:72] "command failed" err="unknown flag: --nonsense"'
    host = LoopingHost(str(memory / "root"), programs={"systemctl": lambda _: 0}, journal=[noise, words, noise])
    with pytest.raises(StratumError, match="unknown flag: --nonsense"):
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS)
    assert host.since <= 30


def test_a_kubelet_that_ends_now_and_then_is_waited_for(memory: Path) -> None:
    (memory / "root").mkdir()
    host = LoopingHost(str(memory / "root"), programs={"systemctl": lambda _: 0}, journal=["x"], every=50.0)
    with pytest.raises(StratumError, match="not ready within 180 s"):
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS)
