"""The one thing that only libselinux knows: which label the installed policy wants for a path.

systemd and restorecon ask the same function, selabel_lookup(3), so we never differ from them. The library is on
each host that runs SELinux, because systemd loads the policy with it; no program is needed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Optional

__all__ = ["FileContexts"]

_LIBRARY = "libselinux.so.1"
_BACKEND_FILES = 0  # SELABEL_CTX_FILE, selabel_open(3)
_OPTION_PATH = 3  # SELABEL_OPT_PATH


class _Option(ctypes.Structure):
    """``struct selinux_opt`` of selinux/label.h."""

    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_char_p))


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    library.selabel_open.restype = ctypes.c_void_p
    library.selabel_open.argtypes = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    library.selabel_lookup_raw.restype = ctypes.c_int
    library.selabel_lookup_raw.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_int,
    )
    library.selabel_close.argtypes = (ctypes.c_void_p,)
    library.freecon.argtypes = (ctypes.c_void_p,)
    return library


class FileContexts:
    """The file contexts of the installed policy, or those in ``file``; raises OSError when they cannot be read."""

    def __init__(self, file: Optional[str] = None) -> None:
        self._library = _load()
        options = _Option(_OPTION_PATH, file.encode() if file else None)
        handle = self._library.selabel_open(_BACKEND_FILES, ctypes.byref(options) if file else None, 1 if file else 0)
        if not handle:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), file)
        self._handle: Optional[int] = handle

    def lookup(self, path: str, mode: int) -> Optional[str]:
        """The label for ``path``, whose file type is in ``mode`` (``st_mode``); None when the policy wants none."""
        if self._handle is None:
            raise ValueError("the file contexts are closed")
        context = ctypes.c_void_p()
        if self._library.selabel_lookup_raw(self._handle, ctypes.byref(context), os.fsencode(path), mode) != 0:
            return None
        try:
            return ctypes.string_at(context.value or 0).decode("ascii", "replace")
        finally:
            self._library.freecon(context)

    def close(self) -> None:
        """Give the memory back."""
        if self._handle is not None:
            self._library.selabel_close(self._handle)
            self._handle = None
