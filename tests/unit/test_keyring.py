"""Which keys a host trusts, and which files it refuses to take keys from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratum import boot
from stratum.errors import NotTrustedError
from stratum.system import Host
from stratum.trust.keyring import TRUST_DIRECTORY, load_keyring
from stratum.trust.minisign import PublicKey
from tests.bundles import key_pair

ALICE = PublicKey.parse(key_pair("alice")[1].to_bytes())
BOB = PublicKey.parse(key_pair("bob")[1].to_bytes())


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    directory = tmp_path / str(TRUST_DIRECTORY).lstrip("/")
    directory.mkdir(parents=True)
    return directory


class LiveHost(Host):
    """Believes that its tree is the running machine."""

    live = True  # type: ignore[assignment]

    def real(self, path: object, *, follow: bool = False) -> str:
        return self.root + str(path)


def put(directory: Path, name: str, data: bytes, mode: int = 0o644) -> Path:
    path = directory / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_no_directory_means_no_keys(tmp_path: Path) -> None:
    assert load_keyring(Host(str(tmp_path))) == []


def test_every_pub_file_is_read_and_nothing_else(trust: Path, tmp_path: Path) -> None:
    put(trust, "a.pub", ALICE.to_bytes())
    put(trust, "b.pub", BOB.text.encode() + b"\n")
    put(trust, "README", b"not a key")
    put(trust, ".c.pub", b"not a key")
    put(trust, "c.pub.bak", b"not a key")
    assert [item.key_id for item in load_keyring(Host(str(tmp_path)))] == [ALICE.key_id, BOB.key_id]


def test_a_key_is_trusted_once_however_often_it_is_given(
    trust: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(trust, "a.pub", ALICE.to_bytes())
    put(trust, "copy.pub", ALICE.text.encode())
    monkeypatch.setattr(boot, "builtin_keys", lambda: [ALICE.to_bytes()])
    keys = load_keyring(Host(str(tmp_path)), [ALICE.to_bytes(), BOB.to_bytes()])
    assert [item.key_id for item in keys] == [ALICE.key_id, BOB.key_id]


def test_keys_of_the_pyz_and_of_the_command_line_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "builtin_keys", lambda: [ALICE.to_bytes()])
    assert load_keyring(Host(str(tmp_path)), [BOB.to_bytes()]) == [ALICE, BOB]


def test_a_malformed_key_is_an_error_that_names_its_file(trust: Path, tmp_path: Path) -> None:
    put(trust, "a.pub", ALICE.to_bytes())
    put(trust, "broken.pub", ALICE.to_bytes()[:-9])
    with pytest.raises(NotTrustedError, match=r"/etc/stratum/trust.d/broken\.pub: not a minisign public key"):
        load_keyring(Host(str(tmp_path)))


def test_a_malformed_key_on_the_command_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotTrustedError, match="command line"):
        load_keyring(Host(str(tmp_path)), [b""])


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_key_that_others_can_change_is_refused(trust: Path, tmp_path: Path, mode: int) -> None:
    put(trust, "a.pub", ALICE.to_bytes(), mode)
    with pytest.raises(NotTrustedError, match=r"a\.pub: can be changed by others") as caught:
        load_keyring(Host(str(tmp_path)))
    assert "chmod" in str(caught.value.hint)


def test_a_directory_that_others_can_change_is_refused(trust: Path, tmp_path: Path) -> None:
    put(trust, "a.pub", ALICE.to_bytes())
    trust.chmod(0o777)
    with pytest.raises(NotTrustedError, match=r"trust\.d: can be changed by others"):
        load_keyring(Host(str(tmp_path)))


def test_on_the_running_machine_a_key_must_belong_to_root(trust: Path, tmp_path: Path) -> None:
    path = put(trust, "a.pub", ALICE.to_bytes())
    if os.geteuid() == 0:  # otherwise it is not root's anyway
        os.chown(path, 65534, 65534)
    with pytest.raises(NotTrustedError, match="belongs to user"):
        load_keyring(LiveHost(str(tmp_path)))
    # The tree of a machine to be may belong to whoever builds it.
    assert load_keyring(Host(str(tmp_path))) == [ALICE]


@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
def test_what_is_no_regular_file_is_refused(trust: Path, tmp_path: Path, kind: str) -> None:
    path = trust / "a.pub"
    if kind == "link":
        path.symlink_to(put(tmp_path, "elsewhere", ALICE.to_bytes()))
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(NotTrustedError, match="not a regular file"):
        load_keyring(Host(str(tmp_path)))


def test_a_huge_key_file_is_not_read(trust: Path, tmp_path: Path) -> None:
    with open(put(trust, "a.pub", b""), "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotTrustedError, match="over 4096 bytes"):
        load_keyring(Host(str(tmp_path)))


def test_a_directory_full_of_keys_is_refused(trust: Path, tmp_path: Path) -> None:
    for number in range(257):
        put(trust, f"{number}.pub", ALICE.to_bytes())
    with pytest.raises(NotTrustedError, match="257 keys"):
        load_keyring(Host(str(tmp_path)))
