"""The pyz that tests run: built once, and again only when something that goes into it has changed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

KEPT_SECONDS = 2 * 3600.0
"""A file that no session has asked for in this time is removed; it is built again in seconds."""

USE_EVERYTHING = """
from stratum import boot
boot.require_compiled(persist={persist})
import yaml, requests, zstandard, tqdm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(
    "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))
# RFC 8032, section 7.1, test 1: the signature of the empty message.
signature = bytes.fromhex("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bac"
                          "c61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b")
key.verify(signature, b"")
try:
    key.verify(signature, b"x")
except Exception as error:
    assert type(error).__name__ == "InvalidSignature"
else:
    raise AssertionError("a wrong signature was accepted")
frame = bytes.fromhex("28b52ffd2005290000") + b"hello"
assert zstandard.ZstdDecompressor().decompress(frame) == b"hello"
assert yaml.safe_load("a: [1, {{b: c}}]") == {{"a": [1, {{"b": "c"}}]}}
assert requests.Request("GET", "http://localhost/").prepare().url == "http://localhost/"
import sys
for module in list(sys.modules.values()):
    place = getattr(module, "__file__", None) or ""
    assert "site-packages" not in place and "dist-packages" not in place, place
print(sys.modules["zstandard.backend_c"].__file__)
"""
"""Code for an interpreter that has the pyz on its path: really uses all that is vendored, says from where."""


def default_cache() -> Path:
    """Return the directory that built files are kept in from session to session."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stratum-build", "pyz")


def built_pyz(cache_dir: Path, arguments: Sequence[str] = ()) -> Path:
    """Return a pyz of the present sources, built with the given arguments of build_zipapp.py."""
    inputs = hashlib.sha256(repr(tuple(arguments)).encode())
    for path in _inputs():
        inputs.update(f"{path.relative_to(ROOT)}\0".encode())
        inputs.update(hashlib.sha256(path.read_bytes()).digest())
    directory = cache_dir / inputs.hexdigest()[:16]
    pyz = directory / "stratum.pyz"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        # Two test sessions may want it at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not pyz.is_file():
            command = [sys.executable, str(ROOT / "build_zipapp.py"), "--output", str(pyz), *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        os.utime(pyz)
    _forget_old(cache_dir)
    return pyz


def _forget_old(cache_dir: Path) -> None:
    for pyz in cache_dir.glob("*/stratum.pyz"):
        # Another session may remove it at the same moment.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - pyz.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(pyz.parent, ignore_errors=True)


def _inputs() -> list[Path]:
    files = [ROOT / "build_zipapp.py", ROOT / "zipapp.lock"]
    for name in ("stratum", "pyzbuild", "man"):
        files += [p for p in (ROOT / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(files)
