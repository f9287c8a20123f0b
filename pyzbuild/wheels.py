"""What is taken from a wheel: Python files that are used, compiled modules that are needed, licence texts."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass, field

from pyzbuild.elf import machine_of, without_debug_data
from pyzbuild.lock import LockError, Wheel

__all__ = ["COMPILED_MODULES", "WheelContents", "open_wheel"]

COMPILED_MODULES = frozenset({"_cffi_backend", "cryptography.hazmat.bindings._rust", "zstandard.backend_c"})
"""What has no pure form. The compiled accelerators of PyYAML and others are left out."""

_NOT_USED = re.compile(
    r"""
    cffi/ | zstandard/(_cffi|backend_cffi) | yaml/(cyaml|_yaml) | charset_normalizer/(cli/|__main__)
    | certifi/(__main__|tests/) | idna/(__main__|cli) | _yaml/ | urllib3/contrib/emscripten/
    | tqdm/(contrib/ | (_main|__main__|_tqdm|_tqdm_gui|_tqdm_notebook)\.py
           | (asyncio|auto|autonotebook|dask|keras|notebook|rich|tk)\.py)
    """,
    re.VERBOSE,
)

_SYSTEM_STORE_FIRST = '''\
"""Where the trusted CA certificates are: the machine's own store, else the list that certifi comes with.

Written by the builder of stratum.pyz in place of certifi's core.py, which copies its list out of the zip into a
temporary file as soon as requests is imported. The machine's store also has the CA that a site adds for its mirror.
"""

import atexit
import os
import pkgutil
import tempfile

_STORES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_copied = []


def where():
    for store in _STORES:
        if os.path.isfile(store):
            return store
    if not _copied:
        try:
            handle, path = tempfile.mkstemp(prefix="stratum-", suffix=".pem")
        except OSError:
            return _STORES[0]
        with os.fdopen(handle, "wb") as stream:
            stream.write(pkgutil.get_data("certifi", "cacert.pem"))
        atexit.register(os.unlink, path)
        _copied.append(path)
    return _copied[0]


def contents():
    return pkgutil.get_data("certifi", "cacert.pem").decode("ascii")
'''


@dataclass
class WheelContents:
    """The parts of one wheel that go into the pyz."""

    python: dict[str, bytes] = field(default_factory=dict)
    """File name to bytes, below the vendor directory."""
    compiled: dict[str, bytes] = field(default_factory=dict)
    """Dotted module name to the library, without its debug data."""
    licences: dict[str, bytes] = field(default_factory=dict)


def open_wheel(wheel: Wheel, data: bytes, machine: str) -> WheelContents:
    """Read a wheel for ``machine``. Raises LockError when its compiled code is for another one."""
    contents = WheelContents()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in sorted(archive.namelist()):
            if ".dist-info/" in name:
                if re.search(r"/(LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*$", name, re.IGNORECASE):
                    contents.licences[name] = archive.read(name)
            elif name.endswith(".so"):
                _add_compiled(contents, wheel, name, archive.read(name), machine)
            elif (name.endswith(".py") or name == "certifi/cacert.pem") and not _NOT_USED.match(name):
                contents.python[name] = archive.read(name)
    if "certifi/core.py" in contents.python:
        contents.python["certifi/core.py"] = _SYSTEM_STORE_FIRST.encode("ascii")
    return contents


def _add_compiled(contents: WheelContents, wheel: Wheel, name: str, data: bytes, machine: str) -> None:
    module = name.split(".", 1)[0].replace("/", ".")
    if module not in COMPILED_MODULES:
        return
    try:
        found = machine_of(data)
        contents.compiled[module] = without_debug_data(data)
    except ValueError as error:
        raise LockError(f"{wheel.file}: {name}: {error}") from None
    if found != machine:
        raise LockError(f"{wheel.file}: {name} is for {found}, not for {machine}")
