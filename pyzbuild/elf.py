"""ELF shared libraries: what machine they are for, and how to leave out what is not loaded.

The layout is that of elf(5), 64-bit, little-endian, which both of our machines are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["MACHINES", "machine_of", "without_debug_data"]

MACHINES = {62: "x86_64", 183: "aarch64"}
"""The values of e_machine that we build for."""

_PT_LOAD = 1


def machine_of(data: bytes) -> str:
    """Return the architecture of an ELF file as ``uname -m`` says it. Raises ValueError if it is another."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine not in MACHINES:
        raise ValueError(f"ELF machine {machine} is not one that is built for")
    return MACHINES[machine]


def without_debug_data(data: bytes) -> bytes:
    """Return the library cut behind the last byte that its program headers name, with no section headers.

    The dynamic linker reads program headers only. Wheels carry symbol tables and debug sections behind the loaded
    part: nine tenths of zstandard's module. ``strip`` would need binutils for both machines, and its output would
    change with the version of binutils.
    """
    machine_of(data)
    headers = list(_program_headers(data))
    # A header that is not PT_LOAD (dynamic, notes, relro) lies inside a loaded one, but nothing is lost by asking.
    end = max(offset + size for _, offset, size in headers)
    kept = bytearray(data[:end])
    struct.pack_into("<Q", kept, 40, 0)  # e_shoff
    struct.pack_into("<HHH", kept, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    return bytes(kept)


def _program_headers(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield type, file offset and size in the file of each segment."""
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, count = struct.unpack_from("<HH", data, 54)
    if not count:
        raise ValueError("the ELF file has no program headers")
    for index in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, table + index * entry_size)
        yield kind, offset, size
    yield _PT_LOAD, table, entry_size * count
