"""``stratum config``: schema, check and show; they look only, and show no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stratum import cli
from stratum.config import CONFIG_PATH, Cluster, NodeSpec, Proxy
from stratum.configcodec import field_paths
from stratum.configschema import read_schema
from stratum.errors import ExitCode, UsageError
from stratum.node.settings import SETTINGS_PATH, Settings
from stratum.system import Host
from tests.bundles import snapshot
from tests.fakes import Desk, Ran
from tests.pyz import ROOT
from tests.unit.hosting import TreeMachine, put
from tests.unit.test_config import EVERYTHING, HEAD, TOKEN, WORKER


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "root").mkdir()
    return Host(str(tmp_path / "root"), {})


def write(host: Host, body: str) -> str:
    put(host, str(CONFIG_PATH), HEAD + body)
    Path(f"{host.root}{CONFIG_PATH}").chmod(0o600)
    return f"{host.root}{CONFIG_PATH}"


def document(ran: Ran) -> Any:
    return json.loads(ran.text)


# -- check ----------------------------------------------------------------------------------------------------


def test_a_good_file_is_valid(desk: Desk, host: Host) -> None:
    name = write(host, WORKER)
    ran = desk.run(host, "config", "check", name)
    assert (ran.status, ran.text) == (ExitCode.DONE, f"checked: {name}: valid\n")
    ran = desk.run(host, "config", "check", "--output", "json")
    assert (document(ran)["file"], document(ran)["valid"], document(ran)["problems"]) == (str(CONFIG_PATH), True, [])


def test_everything_that_is_wrong_is_said_at_once_with_file_line_path_and_reason(desk: Desk, host: Host) -> None:
    name = write(host, "  role: worker\n  profile: cxs\n  network:\n    nodeIP: 127.0.0.1\n  proxy: {noProxy: [a]}\n")
    ran = desk.run(host, "config", "check", name)
    assert ran.status == ExitCode.USAGE
    loopback = "node IP '127.0.0.1' is a loopback address: no other host can reach a node by it"
    assert [line for line in ran.text.splitlines() if not line.startswith("    do: ")] == [
        f"{name}:7: spec.network.nodeIP: {loopback}",
        f"{name}:5: spec.profile: 'cxs' is not known (did you mean cis?)",
        f"{name}:3: spec.cluster.server: a worker needs the API server's URL",
        f"{name}:3: spec.cluster.caFile: a worker needs the cluster's CA",
        f"{name}:8: spec.proxy.noProxy: warning: has no effect without proxy.http or proxy.https",
        f"{name}:3: spec.cluster.tokenFile: warning: a worker needs a credential to join with",
        f"checked: {name}: 4 to correct",
    ]
    found = document(desk.run(host, "config", "check", name, "--output", "json"))
    assert [(item["line"], item["severity"]) for item in found["problems"]][:2] == [(7, "reject"), (5, "reject")]


def test_what_is_only_odd_is_a_warning_and_the_file_valid(desk: Desk, host: Host) -> None:
    ran = desk.run(host, "config", "check", write(host, "  proxy: {noProxy: [a]}\n"))
    assert ran.status == ExitCode.DONE and ": warning: has no effect" in ran.text and ran.text.endswith(": valid\n")


def test_what_no_kubelet_takes_is_found_without_knowing_which_it_will_be(desk: Desk, host: Host) -> None:
    def said(fields: str) -> list[str]:
        name = write(host, f"  kubelet:\n    config: {{{fields}}}\n")
        lines = desk.run(host, "config", "check", name).text.splitlines()
        return [line[len(name) :] for line in lines if line.startswith(name)]

    assert said("maxPods: many") == [":5: spec.kubelet.config.maxPods: must be a whole number"]
    (odd,) = said("maxpods: 5")
    assert odd.startswith(":5: spec.kubelet.config.maxpods: warning: not a field that Stratum knows of any kubelet")
    assert "did you mean maxPods?" in odd
    (owned,) = said("cgroupDriver: cgroupfs")
    assert "is Stratum's to set" in owned
    assert said("maxPods: 5, memorySwap: {swapBehavior: NoSwap}, authentication: {webhook: {cacheTTL: 2m}}") == []


@pytest.mark.parametrize("body", ["  rol: worker\n", "  role: [\n", f"  cluster: {{token: [{TOKEN}]}}\n"])
def test_what_cannot_be_read_is_one_line(desk: Desk, host: Host, body: str) -> None:
    name = write(host, body)
    ran = desk.run(host, "config", "check", name)
    assert ran.status == ExitCode.USAGE
    assert ran.text.startswith(f"{name}:") and ran.text.endswith("1 to correct\n")
    assert TOKEN not in ran.text


def test_a_file_that_gives_its_token_away_is_refused(desk: Desk, host: Host) -> None:
    name = write(host, WORKER.replace("tokenFile: /root/token", f"token: {TOKEN}"))
    assert desk.run(host, "config", "check", name).status == ExitCode.DONE
    Path(name).chmod(0o644)
    ran = desk.run(host, "config", "check", name)
    assert ran.status == ExitCode.USAGE and "mode 0644" in ran.text and "chmod 0600" in ran.text


def test_a_worker_that_has_joined_needs_no_credential(desk: Desk, host: Host) -> None:
    name = write(host, WORKER.replace("    tokenFile: /root/token\n", ""))
    assert "a credential" in desk.run(host, "config", "check", name).text
    joined = Settings(NodeSpec(role="worker", cluster=Cluster(server="https://192.0.2.1:6443")))
    put(host, str(SETTINGS_PATH), json.dumps(joined.to_json()))
    assert desk.run(host, "config", "check", name).text == f"checked: {name}: valid\n"


def test_where_there_is_no_file_that_is_said(desk: Desk, host: Host, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every field has its default"):
        desk.run(host, "config", "check")
    ran = desk.run(host, "config", "check", str(tmp_path / "none"))
    assert ran.status == ExitCode.USAGE and "No such file" in ran.text


# -- show -----------------------------------------------------------------------------------------------------


def test_without_a_node_the_files_values_are_shown_with_their_sources(desk: Desk, host: Host) -> None:
    assert "no node here" in desk.run(host, "config", "show").text
    write(host, EVERYTHING)
    shown = document(desk.run(host, "config", "show", "--output", "json"))
    assert shown["installed"] is False and set(shown["fields"]) == set(field_paths())
    assert shown["fields"]["profile"] == {"value": "cis", "source": f"file {CONFIG_PATH}"}
    assert shown["fields"]["cluster.tokenFile"] == {"value": "", "source": "default"}
    assert shown["fields"]["network.clusterCIDRs"]["value"] == ["10.244.0.0/16", "10.96.0.0/12", "fd00:1::/56"]
    lines = desk.run(host, "config", "show").text.splitlines()
    assert f"  network.bridge = true  (file {CONFIG_PATH})" in lines
    assert len(lines) == 1 + len(list(field_paths())), "each value is one line"


def test_of_a_node_what_is_in_force_is_shown_whatever_the_file_says(desk: Desk, host: Host) -> None:
    write(host, "  profile: default\n")
    settings = Settings(
        NodeSpec(profile="cis", selinux=False),
        "192.0.2.10",
        "node-1",
        {"profile": "option --profile", "selinux": f"file {CONFIG_PATH}", "nodeIP": "detected: x", "nodeName": "y"},
    )
    put(host, str(SETTINGS_PATH), json.dumps(settings.to_json()))
    text = desk.run(host, "config", "show").text
    assert text.startswith("in force on this node:\n")
    assert "  profile = cis  (option --profile)\n" in text
    assert f"  selinux = false  (file {CONFIG_PATH})\n" in text
    assert "  gpu.nvidia = auto  (default)\n" in text
    assert "  the node's nodeIP = 192.0.2.10  (detected: x)\n" in text
    shown = document(desk.run(host, "config", "show", "--output", "json"))
    assert shown["nodeName"] == {"value": "node-1", "source": "y"}


def test_no_secret_is_shown(desk: Desk, host: Host) -> None:
    write(host, EVERYTHING.replace('A: "", B: "x y"', "KEY: topsecret"))
    for words in ((), ("--output", "json")):
        text = desk.run(host, "config", "show", *words).text
        assert "user:" not in text and "topsecret" not in text
        assert "http://(secret)@proxy.example:3128" in text and "KEY" in text
    write(host, WORKER.replace("tokenFile: /root/token", f"token: {TOKEN}"))
    for words in ((), ("--output", "json")):
        text = desk.run(host, "config", "show", *words).text
        assert TOKEN not in text and "(secret)" in text
    write(host, "  kubelet: {config: {staticPodURLHeader: {Authorization: [topsecret]}}}\n")
    text = desk.run(host, "config", "show").text
    assert "topsecret" not in text and "staticPodURLHeader" in text
    put(host, str(SETTINGS_PATH), json.dumps(Settings(NodeSpec(proxy=Proxy("http://u:p@h"))).to_json()))
    assert "u:p" not in desk.run(host, "config", "show").text


# -- all three ------------------------------------------------------------------------------------------------


def test_the_schema_is_printed_as_it_ships(desk: Desk, host: Host) -> None:
    assert desk.run(host, "config", "schema").text == read_schema()


def test_nothing_is_written(desk: Desk, host: Host) -> None:
    name = write(host, WORKER)
    before = snapshot(Path(host.root))
    for words in (("schema",), ("check", name), ("show",)):
        desk.run(host, "config", *words)
    assert snapshot(Path(host.root)) == before


class UsersMachine(TreeMachine):
    """A running machine, seen by a user who is not root."""

    @property
    def euid(self) -> int:
        return 1000


def test_no_root_is_needed(desk: Desk, host: Host) -> None:
    name = write(host, "  profile: cis\n")
    for words in (("schema",), ("check", name), ("show",)):
        assert desk.run(UsersMachine(host.root, {}), "config", *words).status == ExitCode.DONE


@pytest.mark.parametrize("words", [["schema"], ["show"], ["check"]], ids=" ".join)
def test_no_compiled_part_is_imported(host: Host, words: list[str]) -> None:
    write(host, "  profile: cis\n")
    place = [] if words == ["schema"] else ["--root", host.root]
    code = (
        "import sys\nfrom stratum.cli import main\n"
        f"status = main({['config', *words, *place]!r})\n"
        "print([name for name in sys.modules if name in ('requests', 'zstandard', 'cryptography', 'tqdm')], status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[] 0\n"), done.stderr


def test_a_subcommand_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["config"], ["config", "sho"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == ExitCode.USAGE
    assert "usage: stratum config" in capsys.readouterr().err
