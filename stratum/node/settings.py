"""What was decided when the node was brought up, and holds at each later start (seed 004, ResolveNodeIP).

The unit's command line never repeats an option, so an address or a profile must be on the disk. A node on which
everything is as it comes has no such file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from stratum.config import Network, NodeSpec
from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY
from stratum.steps import Action, MakeDirectory, Work, plan_file, withdraw
from stratum.system import Host, HostPath

__all__ = [
    "EARLIER_PATH",
    "SETTINGS_PATH",
    "Settings",
    "forget_earlier",
    "keep_earlier",
    "plan_settings",
    "read_earlier",
    "read_settings",
]

SETTINGS_PATH = STATE_DIRECTORY / "settings.json"
# While a switch of versions is under way: the settings to go back to.
EARLIER_PATH = STATE_DIRECTORY / "settings.earlier.json"
_FORMAT = 1
_DEFAULT = NodeSpec()


@dataclass(frozen=True)
class Settings:
    """What is in force on a node: the configuration that the last ``up`` or ``upgrade`` took, and what was resolved.

    ``node_ip`` is empty until the node has one (``v4``, ``v6`` or ``v4,v6``), and so is ``node_name``. ``sources`` says
    of each field of the configuration that is not at its default where its value came from.
    """

    spec: NodeSpec = _DEFAULT
    node_ip: str = ""
    node_name: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def profile(self) -> str:
        """The profile's name."""
        return self.spec.profile

    @property
    def cluster_cidrs(self) -> tuple[str, ...]:
        """The networks of pods and services."""
        return self.spec.network.cluster_cidrs

    @property
    def selinux(self) -> bool:
        """Whether files get labels where SELinux is on."""
        return self.spec.selinux

    def to_json(self) -> dict[str, object]:
        """The form on the disk."""
        return {
            "format": _FORMAT,
            "profile": self.profile,
            "nodeIP": self.node_ip,
            "clusterCIDRs": list(self.cluster_cidrs),
            "selinux": self.selinux,
        }


def read_settings(host: Host) -> Settings:
    """The recorded settings; the defaults without a record. Raises :class:`StratumError` when it cannot be read.

    It is never passed over: a node would get another address than the one that others know it by.
    """
    return _read(host, SETTINGS_PATH)


def _read(host: Host, path: HostPath) -> Settings:
    try:
        value = json.loads(host.read_bytes(path))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r} is not {_FORMAT}")
        cidrs = tuple(str(item) for item in value["clusterCIDRs"])
        spec = NodeSpec(
            profile=str(value["profile"]), selinux=bool(value["selinux"]), network=Network(cluster_cidrs=cidrs)
        )
        return Settings(spec, str(value["nodeIP"]))
    except FileNotFoundError:
        return Settings()
    except (ValueError, TypeError, KeyError) as error:
        raise StratumError(
            "settings-unreadable",
            f"{path}: not settings that this version reads: {error}",
            hint=f"remove {path}, then run: stratum up --node-ip ADDRESS, with the address that the node had",
        ) from None


def plan_settings(work: Work, settings: Settings) -> list[Action]:
    """What records ``settings``; nothing when they are recorded, or are those of a node without a record."""
    if settings == Settings() and not work.host.lexists(SETTINGS_PATH):
        return []
    content = _to_bytes(settings)
    # The state directory is made with the journal, before the first change of any run.
    return [action for action in plan_file(work, SETTINGS_PATH, content) if not isinstance(action, MakeDirectory)]


def _to_bytes(settings: Settings) -> bytes:
    return json.dumps(settings.to_json(), indent=1, sort_keys=True).encode() + b"\n"


def keep_earlier(work: Work, settings: Settings) -> None:
    """Keep what is in force before a switch to ``settings``, as long as it is under way. Raises OSError."""
    now = read_settings(work.host)
    if now != settings and not work.host.exists(EARLIER_PATH):
        for action in plan_file(work, EARLIER_PATH, _to_bytes(now)):
            action.perform(work)


def read_earlier(host: Host) -> Settings:
    """The settings that a switch goes back to: those kept, else those in force. Raises :class:`StratumError`."""
    return _read(host, EARLIER_PATH) if host.exists(EARLIER_PATH) else read_settings(host)


def forget_earlier(work: Work) -> None:
    """The switch is over, one way or the other. Raises OSError."""
    if work.receipt.get(EARLIER_PATH) is not None:
        withdraw(work, EARLIER_PATH)
