"""A node on a root that is new enough for all releases, with their bundles at hand, and how to bring it somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.lab.facts import Facts, check_whole, look
from tests.lab.machine import Result
from tests.lab.node import Node
from tests.lab.nspawn import NspawnMachine
from tests.lab.releases import Releases

BUNDLES = "/root/bundles"

#: The containerd of each release, as it says it itself.
CONTAINERDS: Mapping[str, str] = {"1.0": "1.6.20", "1.1": "1.6.20", "2.0": "1.7.24", "3.0": "2.1.9"}


@dataclass(frozen=True)
class Upgrading:
    """A node and the releases that it can be."""

    node: Node[NspawnMachine]
    releases: Releases

    @property
    def machine(self) -> NspawnMachine:
        """The machine that the node is on."""
        return self.node.machine

    def bundle(self, version: str) -> str:
        """Where the bundle of a release is on the machine; it is put there when it is first asked for."""
        path = f"{BUNDLES}/{version}.tar"
        if not self.machine.exists(path):
            self.machine.copy_in(self.releases.bundle(version), path)
        return path

    def stratum(self, *arguments: str, check: bool = True) -> Result:
        """Run the pyz."""
        return self.node.stratum(*arguments, check=check)

    def upgrade(self, version: str, *arguments: str, check: bool = True) -> Result:
        """``stratum upgrade`` to a release, from its bundle."""
        return self.stratum("upgrade", "--bundle", self.bundle(version), *arguments, check=check)

    def bring_to(self, version: str, *others: str) -> Facts:
        """Make a release the active one and ``others`` the only other ones that are installed."""
        facts = look(self.machine)
        for other in (*others, version):
            if other not in facts.versions:
                self.upgrade(other, "--prepare-only", "--allow-downgrade")
        if facts.current != version:
            self.stratum("upgrade", "--to", version, "--allow-downgrade")
        for other in facts.versions:
            if other not in (version, *others):
                self.stratum("remove", other)
        self.node.settle()
        return self.check(version)

    def check(self, *versions: str) -> Facts:
        """Check that the node is wholly one of ``versions``."""
        return check_whole(self.machine, {version: CONTAINERDS[version] for version in versions})
