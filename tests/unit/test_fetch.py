"""Downloads: hashed, whole or not at all, tried again where it helps."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from stratum.bundle import fetch
from stratum.bundle.fetch import Fetcher, default_cache
from stratum.errors import BundleError, BundleNotFoundError, DigestMismatchError, ExitCode, StratumError
from stratum.system import Host, HostPath
from tests.unit.building import PROXY_VARIABLES, Server, certificate_for, cut_short, send, serving, sha256

DATA = b"runc\n" * 50_000


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_VARIABLES, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


class Patient(Host):
    """A host whose sleep only counts."""

    slept: list[float]

    def sleep(self, seconds: float) -> None:
        self.__dict__.setdefault("slept", []).append(seconds)


@pytest.fixture
def fetcher(tmp_path: Path) -> Fetcher:
    return Fetcher(Patient(), HostPath(str(tmp_path / "cache")))


def cached(fetcher: Fetcher) -> list[str]:
    return sorted(os.listdir(str(fetcher.cache / "sha256")))


def test_a_file_is_fetched_once_and_kept_under_its_digest(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", send(DATA))
    found = fetcher.fetch(url, sha256(DATA))
    assert Path(str(found.path)).read_bytes() == DATA and found.size == len(DATA)
    assert fetcher.fetch(url, sha256(DATA)) == found
    assert server.asked == ["/runc"] and cached(fetcher) == [sha256(DATA)]


def test_without_a_known_digest_the_found_one_is_told(server: Server, fetcher: Fetcher) -> None:
    assert fetcher.fetch(server.put("/runc", send(DATA)), None).sha256 == sha256(DATA)


def test_a_page_with_status_200_and_another_content_is_a_digest_error_that_names_the_url(
    server: Server, fetcher: Fetcher
) -> None:
    url = server.put("/runc", send(b"<html>please log in</html>", Content_Type="text/html"))
    with pytest.raises(DigestMismatchError) as caught:
        fetcher.fetch(url, sha256(DATA))
    assert caught.value.exit_code == ExitCode.BUNDLE_MALFORMED
    assert url in caught.value.message and sha256(DATA) in caught.value.message
    assert cached(fetcher) == []


@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_is_not_there_is_not_asked_for_again(server: Server, fetcher: Fetcher, status: int) -> None:
    url = server.put("/gone", send(b"", status))
    with pytest.raises(BundleNotFoundError, match=f"HTTP status {status}"):
        fetcher.fetch(url, sha256(DATA))
    assert server.asked == ["/gone"]


@pytest.mark.parametrize("status", [401, 403, 204, 206])
def test_another_status_is_no_file(server: Server, fetcher: Fetcher, status: int) -> None:
    url = server.put("/x", send(b"", status))
    with pytest.raises(StratumError, match=f"HTTP status {status}"):
        fetcher.fetch(url, None)
    assert len(server.asked) == 1 and cached(fetcher) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server: Server, fetcher: Fetcher, status: int) -> None:
    url = server.put("/runc", send(b"", status), send(b"", status), send(DATA))
    assert fetcher.fetch(url, sha256(DATA)).size == len(DATA)
    assert len(server.asked) == 3


def test_the_wait_is_what_the_server_asks_for_within_reason(server: Server, fetcher: Fetcher) -> None:
    url = server.put(
        "/runc", send(b"", 503, Retry_After="7"), send(b"", 503, Retry_After="86400"), send(b"", 503), send(DATA)
    )
    fetcher.fetch(url, None)
    assert fetcher.host.slept == [7.0, 30.0, 4.0]  # type: ignore[attr-defined]


def test_a_body_that_is_cut_short_is_fetched_again(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", cut_short(DATA[:1000], len(DATA)), send(DATA))
    assert fetcher.fetch(url, sha256(DATA)).size == len(DATA)


def test_it_gives_up_and_says_why(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", cut_short(DATA[:1000], len(DATA)))
    with pytest.raises(StratumError, match=r"1000.*tried 4 times") as caught:
        fetcher.fetch(url, sha256(DATA))
    assert caught.value.reference == "fetch-failed" and url in caught.value.message
    assert cached(fetcher) == []


def test_nobody_listening_is_one_line(fetcher: Fetcher) -> None:
    with pytest.raises(StratumError) as caught:
        fetcher.fetch("http://127.0.0.1:9/x", None)
    assert "refused" in caught.value.message and "\n" not in caught.value.message and "0x" not in caught.value.message


def test_a_content_encoding_is_not_undone(server: Server, fetcher: Fetcher) -> None:
    packed = gzip.compress(DATA)
    url = server.put("/runc.gz", send(packed, Content_Encoding="gzip"))
    assert fetcher.fetch(url, None).sha256 == sha256(packed)


@pytest.mark.parametrize("announced", [True, False])
def test_more_than_the_limit_is_not_stored(server: Server, fetcher: Fetcher, announced: bool) -> None:
    def without_length(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(DATA)

    url = server.put("/big", send(DATA) if announced else without_length)
    with pytest.raises(BundleError, match=r"the limit|more than"):
        fetcher.fetch(url, None, limit=1000)
    assert cached(fetcher) == []


def test_a_redirect_is_followed(server: Server, fetcher: Fetcher) -> None:
    server.put("/real", send(DATA))
    url = server.put("/latest", send(b"", 302, Location="/real"))
    assert fetcher.fetch(url, sha256(DATA)).size == len(DATA)


def test_a_redirect_loop_ends(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/loop", send(b"", 302, Location="/loop"))
    with pytest.raises(StratumError):
        fetcher.fetch(url, None)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    hop = SimpleNamespace(url="https://example.org/a")
    answer: Any = SimpleNamespace(url="http://example.org/b", history=[hop], status_code=200, headers={})
    with pytest.raises(StratumError, match="redirected away from https"):
        fetch._check_answer("https://example.org/a", answer, 1)


def test_a_damaged_file_in_the_cache_is_fetched_again(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", send(DATA))
    path = Path(str(fetcher.fetch(url, sha256(DATA)).path))
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + b"X")
    fetcher.fetch(url, sha256(DATA))
    assert path.read_bytes() == DATA and len(server.asked) == 2


def test_offline_takes_the_cache_only(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", send(DATA))
    offline = Fetcher(fetcher.host, fetcher.cache, offline=True)
    with pytest.raises(BundleNotFoundError, match="not in the cache"):
        offline.fetch(url, sha256(DATA))
    fetcher.fetch(url, sha256(DATA))
    server.asked.clear()
    assert offline.fetch(url, sha256(DATA)).size == len(DATA)
    assert server.asked == []


def test_a_leftover_of_a_killed_run_is_removed_and_a_live_one_is_not(server: Server, fetcher: Fetcher) -> None:
    directory = Path(str(fetcher.cache / "sha256"))
    directory.mkdir(parents=True)
    old, live = directory / ".old.part", directory / ".live.part"
    for path in (old, live):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    fetcher.fetch(server.put("/runc", send(DATA)), None)
    assert cached(fetcher) == sorted([".live.part", sha256(DATA)])


def test_threads_that_want_the_same_file_fetch_it_once(server: Server, fetcher: Fetcher) -> None:
    url = server.put("/runc", send(DATA))
    failures: list[BaseException] = []

    def once() -> None:
        try:
            fetcher.fetch(url, sha256(DATA))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and cached(fetcher) == [sha256(DATA)]
    assert server.asked == ["/runc"]


def test_a_full_disk_leaves_nothing_under_the_digest(
    server: Server, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Host, file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Host, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fetcher.fetch(server.put("/runc", send(DATA)), sha256(DATA))
    assert cached(fetcher) == []


def test_stopping_ends_a_download(server: Server, tmp_path: Path) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt

    fetcher = Fetcher(Patient(), HostPath(str(tmp_path)), stop=stop)
    with pytest.raises(KeyboardInterrupt):
        fetcher.fetch(server.put("/runc", send(DATA)), None)
    assert cached(fetcher) == []


def test_a_proxy_of_the_environment_is_used(server: Server, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.put("http://files.test/runc", send(DATA))
    assert fetcher.fetch("http://files.test/runc", sha256(DATA)).size == len(DATA)
    assert server.asked == ["http://files.test/runc"]


def test_a_checksum_file_without_tls_is_warned_about(server: Server, tmp_path: Path) -> None:
    warned: list[str] = []
    fetcher = Fetcher(Patient(), HostPath(str(tmp_path)), warn=warned.append)
    assert fetcher.text(server.put("/sums", send(b"x")), limit=10) == b"x"
    assert len(warned) == 1 and "without TLS" in warned[0]


def test_the_machines_own_authorities_are_preferred(fetcher: Fetcher, tmp_path: Path, monkeypatch: Any) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    paths = SimpleNamespace(cafile=str(bundle), capath=None)
    monkeypatch.setattr(fetch.ssl, "get_default_verify_paths", lambda: paths)
    assert fetcher._session().verify == str(bundle)
    paths.cafile = None
    assert fetcher._session().verify is True


def test_a_private_authority_is_trusted_only_when_it_is_named(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certificate_for(tmp_path / "server.pem")
    with serving(certificate) as server:
        url = server.put("/runc", send(DATA))
        with pytest.raises(StratumError, match=r"(?i)certificate") as caught:
            fetcher.fetch(url, sha256(DATA))
        assert "\n" not in caught.value.message
        assert not hasattr(fetcher.host, "slept"), "a certificate does not get better by waiting"
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        assert fetcher.fetch(url, sha256(DATA)).size == len(DATA)
        monkeypatch.delenv("REQUESTS_CA_BUNDLE")
        paths = SimpleNamespace(cafile=str(certificate), capath=None)
        monkeypatch.setattr(fetch.ssl, "get_default_verify_paths", lambda: paths)
        assert fetcher.text(url, limit=len(DATA)) == DATA


def test_a_real_redirect_from_https_to_http_is_refused(
    server: Server, fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certificate_for(tmp_path / "server.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with serving(certificate) as secure:
        url = secure.put("/sums", send(b"", 302, Location=server.put("/sums", send(b"x"))))
        with pytest.raises(StratumError, match="redirected away from https"):
            fetcher.text(url, limit=10)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/stratum"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/stratum"),
        ({"HOME": "/h"}, "/h/.cache/stratum"),
        ({}, None),
    ],
)
def test_the_cache_is_found_with_and_without_home(environ: dict[str, str], expected: Optional[str]) -> None:
    import pwd

    wanted = expected or f"{pwd.getpwuid(os.geteuid()).pw_dir}/.cache/stratum"
    assert str(default_cache(environ)) == wanted
