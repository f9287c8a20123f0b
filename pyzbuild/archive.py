"""The zip file: the same members give the same bytes, whatever the directory, the clock and the umask."""

from __future__ import annotations

import os
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["SHEBANG", "TooLargeError", "write_archive"]

SHEBANG = b"#!/usr/bin/python3 -IBS\n"
"""Isolated, no site: starts quickly, and the machine's packages and environment do not matter. No bytecode files."""

_MODE = 0o100644 << 16  # a regular file, in the upper half as Unix zips have it
_FIRST_ZIP_DAY = 315532800  # 1980-01-01, the first that a zip can hold


class TooLargeError(Exception):
    """The archive is larger than it may be."""


def write_archive(members: Mapping[str, bytes], output: Path, *, epoch: int, limit: int) -> None:
    """Write an executable zip with a shebang line to ``output``, atomically. ``epoch`` is every member's time.

    Raises TooLargeError above ``limit`` bytes; what was at ``output`` is then still there.
    """
    date = time.gmtime(max(epoch, _FIRST_ZIP_DAY))[:6]
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with open(handle, "w+b") as stream:
            stream.write(SHEBANG)
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, allowZip64=False) as archive:
                for name in sorted(members):
                    info = zipfile.ZipInfo(name, date)
                    info.create_system = 3  # Unix, also when built elsewhere
                    info.external_attr = _MODE
                    info.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(info, members[name], compresslevel=9)
            stream.flush()
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise TooLargeError(f"{output}: {size} bytes, more than the limit of {limit}")
            os.fchmod(stream.fileno(), 0o755)
            os.fsync(stream.fileno())
        os.rename(temporary, output)
    except BaseException:
        os.unlink(temporary)
        raise
