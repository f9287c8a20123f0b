"""Versions in directories, chosen by one link (seed 000, type Layout).

``/opt/stratum/node/<version>/{bin,libexec,cni/bin}`` holds hard links to the unpacked components under
``/opt/stratum/components/<digest>``; ``/opt/stratum/node/current`` names the active version. A version
appears by one rename and becomes active by another.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass
from typing import Optional

from stratum import atomicfile
from stratum.errors import BundleNotFoundError, StratumError
from stratum.steps import remove_at_once, remove_tree
from stratum.system import Host, HostPath

__all__ = ["DEFAULT_BASE", "Layout", "VersionActiveError", "make_traversable"]

DEFAULT_BASE = HostPath("/opt/stratum/node")
# What a version directory says of itself: the bundle's description and who signed it.
VERSION_FILE = "bundle.json"


class VersionActiveError(StratumError):
    """The active version cannot be removed."""

    def __init__(self, version: str) -> None:
        super().__init__("version-active", f"{version}: is the active version", hint="activate another version first")


def make_traversable(host: Host, directory: HostPath) -> list[HostPath]:
    """Make ``directory`` and its missing parents 0755 whatever the umask; return those made.

    A unit with a dynamic user has to traverse them. ``directory`` itself gets 0755 in any case, a parent
    that existed keeps its mode: it is not ours to change (seed 000, MkdirTraversable). Raises OSError.
    """
    made = host.makedirs(directory, 0o755)
    if stat.S_IMODE(host.stat(directory).st_mode) != 0o755:
        host.chmod(directory, 0o755)
    return made


@dataclass(frozen=True)
class Layout:
    """The arrangement of versions below one base directory of a host."""

    host: Host
    base: HostPath = DEFAULT_BASE

    @property
    def current_link(self) -> HostPath:
        """The link that selects the active version."""
        return self.base / "current"

    @property
    def bin_dir(self) -> HostPath:
        """Where the active version's programs are, through the link: a flip changes what units run."""
        return self.current_link / "bin"

    @property
    def cni_bin_dir(self) -> HostPath:
        """Where the active version's CNI plugins are, through the link."""
        return self.current_link / "cni" / "bin"

    def version_dir(self, version: str) -> HostPath:
        """The directory of one version."""
        return self.base / version

    def plugins(self, version: str) -> tuple[str, ...]:
        """The names of the CNI plugins of an installed version; none when it has no directory of them."""
        directory = self.version_dir(version) / "cni/bin"
        return tuple(self.host.listdir(directory)) if self.host.is_dir(directory) else ()

    def ensure(self, version: str) -> HostPath:
        """Make the version directory and its bin directory, all 0755, and return it. Raises OSError."""
        make_traversable(self.host, self.base)
        directory = self.version_dir(version)
        make_traversable(self.host, directory)
        make_traversable(self.host, directory / "bin")
        return directory

    def current(self) -> Optional[str]:
        """The active version, or None when none is.

        Raises :class:`StratumError` when the link is not a link, dangles or leads out of the base.
        """
        link = self.current_link
        try:
            target = self.host.readlink(link)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise StratumError(
                    "current-not-a-link", f"{link}: is not a symbolic link", hint=f"move {link} away, then run again"
                ) from None
            raise
        name = HostPath(target).name
        if HostPath(target) not in (HostPath(name), self.version_dir(name)) or name in ("", "..", "current"):
            raise StratumError(
                "current-outside",
                f"{link}: leads to {target}, which is no version of {self.base}",
                hint=f"remove {link}, then run again",
            )
        if self.host.is_link(self.version_dir(name)):
            raise StratumError(
                "current-outside",
                f"{link}: leads to {target}, which is a link and no version of {self.base}",
                hint=f"remove {link}, then run again",
            )
        if not self.host.is_dir(self.version_dir(name)):
            raise StratumError(
                "current-dangles",
                f"{link}: leads to {target}, which does not exist",
                hint=f"remove {link}, then run again",
            )
        return name

    def flip(self, version: str) -> Optional[str]:
        """Point the link at ``version`` at once; return the version it replaced, None if there was none.

        Raises :class:`BundleNotFoundError` for a version that is not installed; OSError.
        """
        if version not in self.versions():
            raise BundleNotFoundError("version-missing", f"{version}: not installed under {self.base}")
        previous = self.current()
        atomicfile.replace_link(self.host, self.current_link, version)
        return previous

    def versions(self) -> list[str]:
        """The installed versions, sorted by name."""
        if not self.host.is_dir(self.base):
            return []
        return [
            name
            for name in self.host.listdir(self.base)
            if not name.startswith(".")
            and not self.host.is_link(self.base / name)
            and self.host.is_dir(self.base / name)
        ]

    def remove(self, version: str) -> None:
        """Delete one version. Raises :class:`VersionActiveError` for the active one, OSError."""
        if version == self.current():
            raise VersionActiveError(version)
        if version not in self.versions():
            raise BundleNotFoundError("version-missing", f"{version}: not installed under {self.base}")
        # A removal that is cut off must not leave half a version. The next run finds the rest.
        remove_at_once(self.host, self.version_dir(version))

    def remove_all(self) -> None:
        """Delete the base directory, the active version included. Raises OSError."""
        if self.host.lexists(self.base):
            remove_tree(self.host, self.base)
