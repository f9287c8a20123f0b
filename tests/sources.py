"""Stratum's sources as one file that Python imports from, for tests that drive a library in a machine."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

_SOURCES = Path(__file__).resolve().parents[1] / "stratum"


def sources_zip() -> bytes:
    """The package as a zip; put it on PYTHONPATH. What needs no compiled part works."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for path in sorted(_SOURCES.rglob("*.py")):
            target.write(path, f"stratum/{path.relative_to(_SOURCES)}")
    return archive.getvalue()
