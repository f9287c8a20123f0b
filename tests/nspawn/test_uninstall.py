"""`uninstall` gives back the machine as it was, takes nothing that is not Stratum's, and can be repeated."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from tests.lab.node import IMAGE, Node, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.snapshot import Snapshot, check_same, snapshot

MachineNode = Node[NspawnMachine]

# Ends when it is asked to; the other one has to be killed after a while.
POLITE = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done")
STUBBORN = ("sleep", "1000")


@pytest.fixture
def before(bare: MachineNode) -> Iterator[Snapshot]:
    """The machine before the test, which installs and must give this back."""
    state = snapshot(bare.machine)
    yield state
    check_same(state, snapshot(bare.machine))


def up(node: MachineNode) -> None:
    node.stratum("up", "--quiet")
    node.settle()


def test_uninstall_removes_what_its_dry_run_lists_and_nothing_else(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    installed = snapshot(bare.machine)
    plan = bare.json("uninstall", "--dry-run")
    check_same(installed, snapshot(bare.machine))
    done = bare.json("uninstall")
    assert done["steps"] == plan["steps"]
    assert done["left"] == plan["left"] == []
    actions = [action for step in plan["steps"] for action in step["actions"]]
    trees = {action["subject"] for action in actions if action["verb"] == "remove tree"}
    single = {action["subject"] for action in actions if action["verb"] in ("remove", "remove directory")}
    after = snapshot(bare.machine)
    gone = {path for path in installed["files"] if path not in after["files"] and not path.startswith("/run/systemd/")}
    listed = {path for path in gone if path in single or any((path + "/").startswith(f"{tree}/") for tree in trees)}
    # The link that starts the node at boot goes with `disable stratum.service`; the journal with the record.
    assert gone - listed == {
        "/etc/systemd/system/multi-user.target.wants/stratum.service",
        "/var/lib/stratum/journal.json",
    }
    assert single - gone == set()


def test_uninstall_ends_running_containers_and_leaves_no_trace_of_them(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    for name, command in (("polite", POLITE), ("stubborn", STUBBORN)):
        bare.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, name, *command)
    installed = snapshot(bare.machine)
    assert any("veth" in name for name in installed["interfaces"])
    plan = bare.stratum("uninstall", "--dry-run").stdout
    assert "end every running container" in plan and "remove bridge stratum0" in plan
    bare.stratum("uninstall")


def test_uninstall_ends_containers_whose_containerd_is_dead(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    bare.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "orphan", *STUBBORN)
    bare.machine.run(["systemctl", "stop", "stratum", "stratum-containerd"])
    assert bare.machine.run(["pgrep", "-f", "sleep 1000"]).lines
    bare.stratum("uninstall")


def test_a_second_uninstall_and_one_where_nothing_is_do_nothing(bare: MachineNode, before: Snapshot) -> None:
    assert bare.stratum("uninstall").stdout == "nothing to remove: Stratum is not installed here\n"
    up(bare)
    bare.stratum("uninstall")
    again = bare.stratum("uninstall")
    assert (again.stdout, again.stderr) == ("nothing to remove: Stratum is not installed here\n", "")
    done = bare.json("uninstall")
    assert (done["changed"], done["left"]) == (False, [])
    for command in ("status", "versions", "start", "stop", "restart", "logs"):
        done = bare.stratum(command, check=False)
        assert (done.status, refusal(done, state=False)) == (5, "not-installed"), command
    done = bare.stratum("exec", "--", "true", check=False)
    assert (done.status, refusal(done, state=False)) == (5, "not-installed")


def test_kept_data_still_has_its_images_after_the_next_up(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    bare.ctr("images", "tag", IMAGE, "docker.io/library/mine:1")
    done = bare.json("uninstall", "--keep-data")
    assert done["left"] == [{"path": "/var/lib/stratum/containerd", "why": "kept, as asked"}]
    kept = {path for path in snapshot(bare.machine)["files"] if path not in before["files"]}
    assert all(path.startswith("/var/lib/stratum") for path in kept)
    done = bare.json("up")
    assert "images" not in [step["step"] for step in done["steps"]]
    assert bare.ctr("images", "list", "--quiet").lines == [IMAGE, "docker.io/library/mine:1"]
    # Twice kept, then gone for good, from the stick.
    bare.stratum("uninstall", "--keep-data")
    bare.stratum("uninstall")


def test_a_file_that_somebody_changed_stays_and_is_named(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    configuration, link = "/etc/stratum/containerd/config.toml", "/opt/cni/bin/vlan"
    bare.machine.sh(
        f"echo '# mine' >>{configuration}; ln -sfn /usr/bin/true {link}; touch /opt/stratum/node/1.0/bin/mine;"
        "mkdir -p /opt/stratum/mine; echo x >/opt/stratum/mine/file"
    )
    drop_ins = [f"/etc/systemd/system/{unit}.service.d" for unit in ("stratum", "stratum-containerd")]
    for directory in drop_ins:
        bare.machine.write(f"{directory}/50-mine.conf", "[Service]\nNice=1\n")
    plan = bare.json("uninstall", "--dry-run")
    done = bare.stratum("uninstall")
    left = {item["path"]: item["why"] for item in plan["left"]}
    assert {f"left: {path}: {why}" for path, why in left.items()} <= set(done.lines)
    assert left[configuration] == left[link] == "changed since Stratum wrote it"
    assert left["/opt/stratum/node/1.0/bin"] == "holds what is not Stratum's: mine"
    assert "mine" in left["/opt/stratum"]
    assert all(left[directory] == "holds what is not Stratum's: 50-mine.conf" for directory in drop_ins)
    assert bare.machine.read(configuration).endswith("# mine\n")
    assert bare.machine.run(["readlink", link]).stdout == "/usr/bin/true\n"
    after = snapshot(bare.machine)["files"]
    assert {path for path in after if path not in before["files"]} == {*left, *(
        "/opt/stratum/mine", "/opt/stratum/mine/file", "/opt/stratum/node/1.0/bin/mine"
    ), *(f"{directory}/50-mine.conf" for directory in drop_ins)}
    bare.machine.run(["rm", "-r", "/etc/stratum/containerd", "/opt/cni", "/opt/stratum", *drop_ins])
    bare.machine.run(["systemctl", "daemon-reload"])


def test_a_drop_in_of_the_admin_is_shown_and_kept(bare: MachineNode, before: Snapshot) -> None:
    drop_ins = [
        "/etc/systemd/system/stratum-containerd.service.d/50-mine.conf",
        "/etc/systemd/system/stratum.service.d/mine.conf",
    ]
    up(bare)
    for path in drop_ins:
        bare.machine.write(path, "[Service]\nEnvironment=MINE=1\n")
    bare.machine.run(["systemctl", "daemon-reload"])
    shown = bare.stratum("status").stdout
    assert all(f"drop-in of yours: {path}" in shown for path in drop_ins)
    bare.stratum("restart")
    environment = bare.machine.run(["systemctl", "show", "-P", "Environment", "stratum-containerd"]).stdout
    assert "MINE=1" in environment and "PATH=/opt/stratum/node/current/bin:" in environment
    bare.stratum("uninstall")
    assert all(bare.machine.read(path) == "[Service]\nEnvironment=MINE=1\n" for path in drop_ins)
    bare.machine.sh(f"rm {' '.join(drop_ins)}; rmdir /etc/systemd/system/stratum*.service.d; systemctl daemon-reload")


def test_a_busy_mount_below_the_state_directory_stops_it_and_loses_nothing(
    bare: MachineNode, before: Snapshot
) -> None:
    place = "/var/lib/stratum/containerd/plugins/x/pv"
    up(bare)
    bare.ctr("run", "--detach", "--cpu-shares", "0", IMAGE, "worker", *POLITE)
    bare.machine.sh(
        f"mkdir -p /srv/share {place}; echo canary >/srv/share/canary; mount --bind /srv/share {place};"
        f"cd {place}; setsid sleep 4300 >/dev/null 2>&1 & echo $! >/run/user-of-it; sleep 0.2"
    )
    assert f"    unmount {place}" in bare.stratum("uninstall", "--dry-run").lines
    done = bare.stratum("uninstall", check=False)
    assert (done.status, refusal(done)) == (1, "mount-busy")
    assert "nothing was deleted; the node runs as before" in done.stderr
    assert bare.machine.read("/srv/share/canary") == "canary\n"
    bare.settle()
    status = bare.json("status")
    assert status["ready"] and status["enabled"] and status["drift"] == []
    assert bare.machine.run(["systemctl", "show", "-P", "Restart", "stratum"]).stdout == "always\n"
    # With the user gone the mount goes, and what was mounted stays.
    bare.machine.sh("kill $(cat /run/user-of-it); rm /run/user-of-it")
    bare.stratum("uninstall")
    assert bare.machine.read("/srv/share/canary") == "canary\n"
    bare.machine.run(["rm", "-r", "/srv/share"])


def test_a_link_out_of_the_tree_is_not_followed(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    bare.machine.sh(
        "mkdir -p /srv/data; echo canary >/srv/data/canary; ln -s /srv/data /var/lib/stratum/containerd/out;"
        "mv /opt/cni/bin /srv/bin; ln -s /srv/bin /opt/cni/bin"
    )
    done = bare.json("uninstall")
    assert [item["path"] for item in done["left"]] == ["/opt/cni/bin", "/opt/cni"]
    assert bare.machine.read("/srv/data/canary") == "canary\n"
    assert "vlan" in bare.machine.run(["ls", "/srv/bin"]).lines
    bare.machine.run(["rm", "-r", "/srv/data", "/srv/bin", "/opt/cni"])


def test_shims_of_another_containerd_live_on(bare: MachineNode, before: Snapshot) -> None:
    # Real processes of that name, told apart by the socket that they serve only.
    up(bare)
    theirs, ours = "/run/docker/containerd/containerd.sock", "/run/stratum/containerd/containerd.sock"
    bare.machine.sh(
        "cp /bin/sh /root/containerd-shim-foo-v2; cd /root\n"
        "start() {"
        ' setsid ./containerd-shim-foo-v2 -c "sleep 4400; :" shim -namespace moby -address "$1" >/dev/null 2>&1 & }\n'
        f"start {theirs}; echo $! >/run/theirs; start {ours}; echo $! >/run/ours; sleep 0.3"
    )
    # Both keep their sockets and states side by side in this directory.
    state = {"config": {"labels": ["bundle=/run/docker/containerd/io.containerd.runtime.v2.task/moby/one"]}}
    others = {"/run/containerd/runc/moby/one/state.json": json.dumps(state), "/run/containerd/s/socket": "theirs"}
    for path, content in others.items():
        bare.machine.write(path, content)
    bare.stratum("uninstall")
    assert {path: bare.machine.read(path) for path in others} == others
    bare.machine.run(["rm", "-r", "/run/containerd"])
    assert bare.machine.run(["sh", "-c", "kill -0 $(cat /run/ours)"], check=False).status != 0
    bare.machine.sh("kill -0 $(cat /run/theirs)")
    assert bare.machine.run(["pgrep", "-fc", "sleep [4]400"]).stdout == "2\n", "the shim and its child"
    bare.machine.sh("pkill -f 'sleep [4]400'; rm /root/containerd-shim-foo-v2 /run/ours /run/theirs")


def test_firewall_rules_and_chains_of_the_admin_are_the_same_afterwards(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh(
        "iptables -N ADMIN; iptables -A ADMIN -p tcp --dport 22 -j ACCEPT; iptables -A INPUT -j ADMIN;"
        "iptables -A INPUT -i lo -j ACCEPT; iptables -P INPUT DROP; iptables -P FORWARD DROP;"
        "iptables -t nat -N CNI-ADMIN; iptables -t nat -A POSTROUTING -s 192.0.2.0/24 -j CNI-ADMIN;"
        "nft add table inet stratum_admin; nft add chain inet stratum_admin c; nft add rule inet stratum_admin c accept"
    )
    rules = snapshot(bare.machine)
    up(bare)
    bare.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "one", *POLITE)
    assert rules["firewall"] != snapshot(bare.machine)["firewall"]
    bare.stratum("uninstall")
    check_same(rules, snapshot(bare.machine))
    # Base chains that iptables itself made stay when they are emptied, so the tables go.
    bare.machine.sh("iptables -P INPUT ACCEPT; iptables -P FORWARD ACCEPT; nft flush ruleset")


PORTS = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]


def publish(node: MachineNode, name: str) -> None:
    """Publish a port as containerd does it: ADD of the real portmap plugin, and libcni's file about it."""
    network = json.loads(node.machine.read("/etc/cni/net.d/10-stratum.conflist"))
    namespace = f"/run/netns/{name}"
    result = {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "sandbox": namespace}],
        "ips": [{"interface": 0, "address": "10.215.0.5/16", "gateway": "10.215.0.1"}],
    }
    request = {
        **network["plugins"][1], "name": "stratum", "cniVersion": "1.0.0", "prevResult": result,
        "runtimeConfig": {"portMappings": PORTS},
    }
    node.machine.sh(f"ip netns add {name}")
    environment = {
        "CNI_COMMAND": "ADD", "CNI_CONTAINERID": name, "CNI_IFNAME": "eth0", "CNI_NETNS": namespace,
        "CNI_PATH": "/opt/cni/bin", "PATH": "/usr/sbin:/usr/bin",
    }
    node.machine.run(["/opt/cni/bin/portmap"], env=environment, input=json.dumps(request))
    node.machine.sh(f"ip netns delete {name}; umount /run/netns; rmdir /run/netns")
    memory = {
        "kind": "cniCacheV1", "containerId": name, "ifName": "eth0", "networkName": "stratum", "result": result,
        "config": base64.b64encode(json.dumps(network).encode()).decode(), "capabilityArgs": {"portMappings": PORTS},
    }
    node.machine.write(f"/var/lib/cni/results/stratum-{name}-eth0", json.dumps(memory))


@pytest.mark.parametrize("owner", ["ours alone", "there before", "others too"])
def test_chains_for_published_ports_go_where_they_are_ours_alone(
    bare: MachineNode, before: Snapshot, owner: str
) -> None:
    machine = bare.machine
    rules = ["iptables", "--table", "nat", "--list-rules"]
    # An admin's rule first: the table and its base chains, which iptables makes, are there then in any case.
    machine.sh("iptables -t nat -A POSTROUTING -s 192.0.2.0/24 -j RETURN")
    if owner == "there before":
        machine.sh("iptables -t nat -N CNI-HOSTPORT-DNAT; iptables -t nat -A OUTPUT -j CNI-HOSTPORT-DNAT")
    clean, theirs = machine.run(rules).stdout, "/etc/cni/net.d/87-theirs.conflist"
    try:
        up(bare)
        publish(bare, "web")
        if owner == "others too":
            machine.write(theirs, "{}")
        assert "--dports 8080" in machine.run(rules).stdout
        plan = bare.json("uninstall", "--dry-run")
        listed = [action["subject"] for step in plan["steps"] for action in step["actions"]]
        assert "--dports 8080" in machine.run(rules).stdout
        done = bare.json("uninstall")
        after = machine.run(rules).stdout
        assert "8080" not in after and "-s 192.0.2.0/24" in after
        named = {item["path"]: item["why"] for item in done["left"]}
        assert done["left"] == plan["left"]
        chains = "CNI-HOSTPORT-* in the table nat of iptables"
        assert (chains in listed) == (owner == "ours alone")
        if owner == "ours alone":
            assert (after, named) == (clean, {})
        elif owner == "there before":
            # The plugin has completed what was there, which nobody can tell from it any more.
            assert "CNI-HOSTPORT-DNAT" in after and named == {}
        else:
            assert "CNI-HOSTPORT-DNAT" in after and "others use CNI" in named["CNI-HOSTPORT-*"]
    finally:
        machine.sh(f"rm -f {theirs}; rmdir /etc/cni/net.d /etc/cni 2>/dev/null || true; nft flush ruleset")


def test_uninstall_says_in_json_what_stays(bare: MachineNode, before: Snapshot) -> None:
    up(bare)
    bare.machine.sh("echo x >/etc/cni/net.d/99-mine.conf")
    done = bare.stratum("uninstall", "--output", "json")
    value = json.loads(done.stdout)
    assert (value["kind"], value["command"], value["changed"]) == ("Result", "uninstall", True)
    assert [item["path"] for item in value["left"]] == ["/etc/cni/net.d", "/etc/cni"]
    bare.machine.run(["rm", "-r", "/etc/cni"])
