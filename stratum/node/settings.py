"""What was decided when the node was brought up, and holds at each later start (seed 004, ResolveNodeIP).

The unit's command line never repeats an option, so an address or a profile must be on the disk. A node on which
everything is as it comes has no such file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY
from stratum.steps import Action, MakeDirectory, Work, plan_file
from stratum.system import Host

__all__ = ["SETTINGS_PATH", "Settings", "plan_settings", "read_settings"]

SETTINGS_PATH = STATE_DIRECTORY / "settings.json"
_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """The settings of a node. ``node_ip`` is empty until it has one (``v4``, ``v6`` or ``v4,v6``)."""

    profile: str = "default"
    node_ip: str = ""
    cluster_cidrs: tuple[str, ...] = ()
    selinux: bool = True

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
    try:
        value = json.loads(host.read_bytes(SETTINGS_PATH))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r} is not {_FORMAT}")
        return Settings(
            str(value["profile"]),
            str(value["nodeIP"]),
            tuple(str(item) for item in value["clusterCIDRs"]),
            bool(value["selinux"]),
        )
    except FileNotFoundError:
        return Settings()
    except (ValueError, TypeError, KeyError) as error:
        raise StratumError(
            "settings-unreadable",
            f"{SETTINGS_PATH}: not settings that this version reads: {error}",
            hint=f"remove {SETTINGS_PATH}, then run: stratum up --node-ip ADDRESS, with the address that the node had",
        ) from None


def plan_settings(work: Work, settings: Settings) -> list[Action]:
    """What records ``settings``; nothing when they are recorded, or are those of a node without a record."""
    if settings == Settings() and not work.host.lexists(SETTINGS_PATH):
        return []
    content = json.dumps(settings.to_json(), indent=1, sort_keys=True).encode() + b"\n"
    # The state directory is made with the journal, before the first change of any run.
    return [action for action in plan_file(work, SETTINGS_PATH, content) if not isinstance(action, MakeDirectory)]
