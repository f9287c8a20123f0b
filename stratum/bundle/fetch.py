"""Downloads: over HTTP(S) into a cache whose file names are the SHA-256 of what is in them.

A download is streamed to a temporary file in the cache, hashed on its way, and gets its name only when it is
whole: nobody ever finds half a file under a digest. What is in the cache is hashed again before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional, TypeVar
from urllib.parse import urlsplit

from stratum.errors import BundleError, BundleNotFoundError, DigestMismatchError, StratumError
from stratum.system import Host, HostPath

if TYPE_CHECKING:
    import requests

__all__ = ["Fetched", "Fetcher", "default_cache", "hash_file"]

SIZE_LIMIT = 8 << 30
_CHUNK = 1 << 20
_TIMEOUT = (15.0, 60.0)  # seconds: to connect, between two pieces of the answer
_TRIES = 4
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_BACKOFF_MOST = 30.0
_STALE = 86_400.0  # seconds after which a temporary file belongs to nobody

_T = TypeVar("_T")


def _silent(_text: str) -> None:
    """Tell nobody."""


def _never() -> None:
    """Never stop."""


@dataclass(frozen=True)
class Fetched:
    """A file in the cache."""

    path: HostPath
    sha256: str
    size: int


class _TryAgainError(Exception):
    """A failure that may not happen again; ``after`` is how long the server asks to wait, in seconds."""

    def __init__(self, why: str, after: Optional[float] = None) -> None:
        super().__init__(why)
        self.after = after


def default_cache(environ: Mapping[str, str]) -> HostPath:
    """``$XDG_CACHE_HOME/stratum``, else ``.cache/stratum`` in the user's home directory, HOME set or not."""
    configured = environ.get("XDG_CACHE_HOME", "")
    if configured.startswith("/"):
        return HostPath(configured) / "stratum"
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        import pwd

        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            raise StratumError(
                "no-cache", f"user {os.geteuid()} has no home directory for a cache", hint="give one with --cache DIR"
            ) from None
    return HostPath(home) / ".cache" / "stratum"


def hash_file(host: Host, path: HostPath) -> tuple[str, int]:
    """SHA-256 (hexadecimal) and size of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with host.open(path) as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


class Fetcher:
    """Gets files by URL. ``offline``: only what is in the cache. Safe to use from several threads."""

    def __init__(
        self,
        host: Host,
        cache: HostPath,
        *,
        offline: bool = False,
        warn: Callable[[str], None] = _silent,
        stop: Callable[[], None] = _never,
    ) -> None:
        self.host = host
        self.cache = cache
        self.offline = offline
        self._warn = warn
        self._stop = stop
        self._guard = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}

    def cached(self, sha256: str) -> Optional[Fetched]:
        """The file with that digest, if it is in the cache and still what its name says."""
        path = self.cache / "sha256" / sha256
        if not self.host.lexists(path):
            return None
        found, size = hash_file(self.host, path)
        if found == sha256:
            return Fetched(path, sha256, size)
        self._warn(f"{path}: damaged in the cache, removed")
        with contextlib.suppress(FileNotFoundError):
            self.host.unlink(path)
        return None

    def fetch(self, url: str, sha256: Optional[str], *, limit: int = SIZE_LIMIT) -> Fetched:
        """The file at ``url``, out of the cache when ``sha256`` is known and there.

        Raises :class:`DigestMismatchError` when the bytes are others, :class:`BundleNotFoundError` when there
        is no such file, :class:`StratumError` when it cannot be had.
        """
        with self._guard:
            turn = self._busy.setdefault(url, threading.Lock())
        with turn:
            # Whoever waited for another thread finds its file in the cache.
            found = self.cached(sha256) if sha256 else None
            return found or self._fetch(url, sha256, limit)

    def _fetch(self, url: str, sha256: Optional[str], limit: int) -> Fetched:
        directory = self._directory()
        temporary = directory / f".{secrets.token_hex(8)}.part"
        try:
            digest, size = self._retrying(url, lambda: self._download(url, temporary, limit))
            if sha256 and digest != sha256:
                raise DigestMismatchError(
                    url,
                    f"sha256:{sha256}",
                    f"sha256:{digest}",
                    hint="the server sent something else (an error page, a changed release); look at what it sends",
                )
            self.host.rename(temporary, directory / digest)
            self.host.fsync_dir(directory)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.host.unlink(temporary)
        return Fetched(directory / digest, digest, size)

    def text(self, url: str, *, limit: int) -> bytes:
        """The content of a small file (a checksum file) at ``url``. It is not kept: its like are few and change."""
        if urlsplit(url).scheme != "https":
            self._warn(f"{url}: fetched without TLS; compare the lock with what the publisher announces")
        return self._retrying(url, lambda: b"".join(self._stream(url, limit)))

    # -- one try ------------------------------------------------------------------------------------

    def _download(self, url: str, path: HostPath, limit: int) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0
        with contextlib.suppress(FileNotFoundError):
            self.host.unlink(path)
        with self.host.open_new(path, 0o600) as file:
            for chunk in self._stream(url, limit):
                self._stop()
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
            self.host.fsync(file)
        return digest.hexdigest(), size

    def _stream(self, url: str, limit: int) -> Iterator[bytes]:
        import requests

        with self._session() as session:
            try:
                # identity: what is hashed must be the file, not an encoding that a server chose for the way.
                answer = session.get(
                    url, stream=True, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity", "User-Agent": "stratum"}
                )
                with answer:
                    _check_answer(url, answer, limit)
                    yield from _body(answer, limit, url)
            except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as error:
                raise _failed(url, _reason(error)) from None
            except requests.exceptions.RequestException as error:
                raise _TryAgainError(_reason(error)) from None

    def _session(self) -> requests.Session:
        import requests

        session = requests.Session()
        session.max_redirects = 10
        paths = ssl.get_default_verify_paths()
        # The machine's own authorities, where a company's are too; certifi's would be unpacked to /tmp from a zip.
        session.verify = next((path for path in (paths.cafile, paths.capath) if path and os.path.exists(path)), True)
        return session

    def _retrying(self, url: str, attempt: Callable[[], _T]) -> _T:
        if self.offline:
            raise BundleNotFoundError(
                "not-cached",
                f"{url}: not in the cache {self.cache}",
                hint="run once without --offline on a connected machine",
            )
        for number in range(1, _TRIES + 1):
            self._stop()
            try:
                return attempt()
            except _TryAgainError as error:
                if number == _TRIES:
                    raise _failed(url, f"{error} (tried {_TRIES} times)") from None
                wait = min(error.after if error.after is not None else 0.5 * 2**number, _BACKOFF_MOST)
                self._warn(f"{url}: {error}; next try in {wait:g} s")
                self.host.sleep(wait)
        raise AssertionError("the loop ends by return or raise")

    def _directory(self) -> HostPath:
        directory = self.cache / "sha256"
        with self._guard:
            try:
                self.host.makedirs(directory, 0o700)
            except FileExistsError:
                # Another process made a part of it at the same moment; or there is a file in the way.
                self.host.makedirs(directory, 0o700)
            self._reap(directory)
        return directory

    def _reap(self, directory: HostPath) -> None:
        # A killed run leaves its part behind. A live one writes to its own all the time.
        oldest = self.host.now() - _STALE
        for name in self.host.listdir(directory):
            if name.endswith(".part"):
                with contextlib.suppress(FileNotFoundError):
                    if self.host.lstat(directory / name).st_mtime < oldest:
                        self.host.unlink(directory / name)


def _failed(url: str, why: str) -> StratumError:
    return StratumError("fetch-failed", f"{url}: {why}", hint="check the network, the proxy settings and the URL")


def _reason(error: Exception) -> str:
    # urllib3 packs its reasons into each other; the innermost one is the one that says something.
    inner: object = error
    while True:
        deeper = getattr(inner, "reason", None) or (
            inner.args[0] if isinstance(inner, Exception) and inner.args else None
        )
        if not isinstance(deeper, Exception):
            break
        inner = deeper
    text = " ".join(str(inner).split())
    return text.encode("ascii", "backslashreplace").decode("ascii")[:300] or type(error).__name__


def _check_answer(url: str, answer: requests.Response, limit: int) -> None:
    for hop in [*answer.history, answer]:
        if urlsplit(url).scheme == "https" and urlsplit(hop.url).scheme != "https":
            raise _failed(url, f"redirected away from https, to {hop.url}")
    if answer.status_code in (404, 410):
        raise BundleNotFoundError(
            "source-not-found",
            f"{url}: HTTP status {answer.status_code}",
            hint="check version and URL in the definition",
        )
    if answer.status_code in _RETRY_STATUS:
        after = answer.headers.get("Retry-After", "")
        raise _TryAgainError(f"HTTP status {answer.status_code}", float(after) if after.isdecimal() else None)
    if answer.status_code != 200:
        raise _failed(url, f"HTTP status {answer.status_code}")
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) > limit:
        raise BundleError("source-too-long", f"{url}: {length} bytes, the limit is {limit}")


def _body(answer: requests.Response, limit: int, url: str) -> Iterator[bytes]:
    import urllib3

    size = 0
    length = answer.headers.get("Content-Length", "")
    try:
        while True:
            chunk = answer.raw.read(_CHUNK, decode_content=False)
            if not chunk:
                break
            size += len(chunk)
            if size > limit:
                raise BundleError("source-too-long", f"{url}: more than {limit} bytes")
            yield chunk
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _TryAgainError(f"broken off after {size} bytes: {_reason(error)}") from None
    # Not every version of urllib3 notices a body that is shorter than announced.
    if length.isdecimal() and size != int(length):
        raise _TryAgainError(f"broken off after {size} of {length} bytes")
