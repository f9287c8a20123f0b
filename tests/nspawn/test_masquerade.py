"""Our table or chain among an admin's rules: it comes, is found again, and goes alone."""

from __future__ import annotations

import pytest

from tests.lab.nspawn import NspawnMachine
from tests.sources import sources_zip

DRIVE = """
import sys
from stratum.host import masquerade
from stratum.system import Host

host = Host()
apply = sys.argv[1] == "apply"
actions = masquerade.plan_masquerade(host, "10.215.0.0/16") if apply else masquerade.plan_removal(host)
for action in actions:
    action.perform(None)
print(len(actions))
"""

# A host that only ssh reaches, with rules of several kinds; a blanket flush of any of them would be seen.
ADMIN = """
nft -f - <<'END'
table inet admin {
    chain input {
        type filter hook input priority 0; policy drop;
        tcp dport 22 accept
        ip saddr 10.215.0.0/24 accept
    }
}
table ip admin_nat {
    chain postrouting {
        type nat hook postrouting priority 90; policy accept;
        ip saddr 10.215.0.0/16 oifname "vpn0" masquerade
    }
}
END
iptables -P INPUT DROP
iptables -A INPUT -p tcp --dport 22 -j ACCEPT
iptables -t nat -A POSTROUTING -s 198.51.100.0/24 -j MASQUERADE
iptables -t nat -N ADMINS-OWN
iptables -t nat -A ADMINS-OWN -j RETURN
"""

RULES = "{ nft list ruleset; iptables-save | sed -e '/^#/d'; }"


@pytest.mark.parametrize("tool", ["nft", "iptables"])
def test_only_our_rules_go_and_an_admins_stay_as_they_were(shared_machine: NspawnMachine, tool: str) -> None:
    shared_machine.write("/root/sources.zip", sources_zip())
    shared_machine.write("/root/drive.py", DRIVE)
    # A host without nft: the program is hidden from us, not from the test's own look at the rules.
    hide = "mount --bind /dev/null /usr/sbin/nft" if tool == "iptables" else "true"
    drive = "PYTHONPATH=/root/sources.zip python3 -S /root/drive.py"
    script = f"""
    cp -L /usr/sbin/nft /run/nft-of-the-test
    {ADMIN}
    nft() {{ /run/nft-of-the-test "$@"; }}
    {RULES} >/run/before
    {hide}
    {drive} apply; {drive} apply
    {RULES} >/run/during
    {drive} undo; {drive} undo
    {RULES} >/run/after
    """
    done = shared_machine.run(["unshare", "--net", "--mount", "sh", "-euc", script])
    before, during, after = (shared_machine.read(f"/run/{name}") for name in ("before", "during", "after"))
    assert done.stdout.split() == ["1", "0", "1", "0"]
    assert "masquerade" in "".join(set(during.splitlines(True)) - set(before.splitlines(True))).lower()
    assert ("table ip stratum" in during) == (tool == "nft")
    assert ("STRATUM-POSTROUTING" in during) == (tool == "iptables")
    assert after == before
    assert "tcp dport 22 accept" in after
    shared_machine.run(["rm", *(f"/run/{name}" for name in ("before", "during", "after", "nft-of-the-test"))])
