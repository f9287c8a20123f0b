"""The launch check's verdict, as systemd shows it: what a start of the kubelet that failed comes to (seed 000).

The check is a unit of its own that each start of the kubelet waits for (stratum.node.units). A final refusal is not
tried again until somebody asks for a start; after any other failure the check tries again and starts the kubelet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from stratum import systemd
from stratum.errors import CommandError, StratumError
from stratum.node.units import REFUSED, UNIT_KUBELET_LAUNCH_CHECK
from stratum.system import Host

__all__ = ["LaunchCheck", "last_words", "read_launch_check", "refusal", "start_failure"]

_CALL_TIMEOUT = 30.0


@dataclass(frozen=True)
class LaunchCheck:
    """The state of the check's unit."""

    active: str
    status: str  # exit status of its last run

    @property
    def refused(self) -> bool:
        """Whether it has said no for good: no start of the kubelet will come of itself."""
        return self.active == "failed" and self.status == str(REFUSED)

    @property
    def trying(self) -> bool:
        """Whether it runs, or waits for its next try: the kubelet comes up by itself once it agrees."""
        return self.active == "activating"


def read_launch_check(host: Host) -> LaunchCheck:
    """Ask systemd; a check that there is none of is neither refused nor trying."""
    argv = ["systemctl", "show", "--property=ExecMainStatus,ActiveState", UNIT_KUBELET_LAUNCH_CHECK]
    try:
        text = host.run(argv, timeout=_CALL_TIMEOUT).text
    except CommandError:
        return LaunchCheck("", "")
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    return LaunchCheck(values.get("ActiveState", ""), values.get("ExecMainStatus", ""))


def last_words(host: Host) -> str:
    """What the check itself said last, without systemd's own lines about it."""
    lines = systemd.journal_tail(host, UNIT_KUBELET_LAUNCH_CHECK, 20)
    own = [line for line in lines if not line.startswith((UNIT_KUBELET_LAUNCH_CHECK, "Starting ", "Failed to start "))]
    return own[-1] if own else "it said nothing"


def refusal(host: Host) -> StratumError:
    """The error for a final refusal, with the check's own words."""
    return StratumError(
        "launch-refused",
        f"{UNIT_KUBELET_LAUNCH_CHECK}: the launch check refused this node for good: {last_words(host)}",
        hint="settle what it says, then run: stratum start",
    )


def start_failure(host: Host, error: StratumError) -> Optional[StratumError]:
    """What a start of the kubelet that failed with ``error`` comes to; None when it will start by itself."""
    check = read_launch_check(host)
    if check.refused:
        return refusal(host)
    return None if check.trying else error
