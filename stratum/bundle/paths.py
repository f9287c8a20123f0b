"""Which paths and link targets a bundle may place below a version directory."""

from __future__ import annotations

import itertools
import posixpath
from typing import Optional

__all__ = ["DEPTH_MOST", "safe_relative", "unsafe_target"]

# Far deeper than what anybody ships; finding a path takes time that grows with the square of its depth.
DEPTH_MOST = 100


def safe_relative(path: str) -> Optional[str]:
    """Why ``path`` is no clean relative path below a version directory, or None when it is one."""
    if not path or path.startswith("/"):
        return "absolute or empty"
    if not path.isprintable() or "\\" in path:
        return "has a control character or a backslash"
    if posixpath.normpath(path) != path or path.split("/")[0] in ("..", "."):
        return "not a normal relative path"
    if any(part.startswith(".wh.") for part in path.split("/")):
        # In an OCI layer that is not a file but the removal of one (image-spec, layer.md); other readers obey it.
        return "is a whiteout"
    # NAME_MAX and PATH_MAX of Linux, with room for the version directory before it.
    if any(len(part.encode("utf-8")) > 255 for part in path.split("/")) or len(path.encode("utf-8")) > 3500:
        return "too long"
    if path.count("/") >= DEPTH_MOST:
        return f"more than {DEPTH_MOST} directories deep"
    return None


def unsafe_target(path: str, target: str) -> Optional[str]:
    """Why the link at ``path`` may not lead to ``target``, or None when it stays in the version directory.

    ``..`` is allowed only at the start: after the name of another link it would climb from where that link leads.
    With this rule for every link, and links never being parents, no chain of links leaves the directory.
    """
    if not target or target.startswith("/"):
        return "absolute or empty"
    if not target.isprintable() or len(target.encode("utf-8")) > 4000:
        return "has a control character or is too long"
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = len(parts) - len(list(itertools.dropwhile(lambda part: part == "..", parts)))
    if ".." in parts[up:]:
        return "'..' after a name"
    if up > path.count("/"):
        return "leads out of the version directory"
    return None
