"""keygen, sign, verify, inspect and extract: through their own arguments, with the exit codes of the design."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratum.errors import ExitCode
from stratum.system import Host, HostPath
from stratum.trust import keyring
from stratum.trust.minisign import INTERACTIVE, PublicKey, SecretKey, generate
from tests.unit.building import HEAD, ROOT, Desk, Ended, files_of, sha256

PROGRAM = b"\x7fELF" + bytes(range(256)) * 40
BOTH = HEAD.replace("[linux/amd64]", "[linux/amd64, linux/arm64]")
DEFINITION = """\
  - name: c
    version: 1.6
    source: {directory: tree}
    files: [{from: "bin/*", to: bin/}]
  - name: p
    version: 2
    source: {file: f}
    files: [{to: cni/bin/bridge, mode: 0755}, {to: bin/also}]
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A desk with two keys and a definition."""
    made = Desk(tmp_path)
    made.write("tree/bin/tool", PROGRAM, 0o755)
    made.write("tree/bin/conf", b"x")
    (tmp_path / "tree/bin/link").symlink_to("tool")
    made.write("f", b"bridge")
    made.define(DEFINITION, head=BOTH)
    for name in ("k", "other"):
        assert made.run("keygen", "-o", name, "--no-password").status == 0
    return made


@pytest.fixture
def bundle(desk: Desk) -> bytes:
    """A signed bundle, ``b.tar``."""
    ended = desk.build("-o", "b.tar", "--key", "k.key")
    assert ended.status == 0, ended.err
    return (desk.path / "b.tar").read_bytes()


@pytest.fixture(autouse=True)
def no_keyring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The keys of the machine that runs the tests do not count."""
    directory = tmp_path / "trust.d"
    monkeypatch.setattr(keyring, "TRUST_DIRECTORY", HostPath(str(directory)))
    yield directory


# -- keygen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_secret_key_is_for_its_owner_only_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    desk = Desk(tmp_path)
    before = os.umask(umask)
    try:
        assert desk.run("keygen", "-o", "new", "--no-password").status == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new.pub").stat().st_mode) == 0o644
    secret = SecretKey.parse((tmp_path / "new.key").read_bytes())
    assert secret.public.key == PublicKey.parse((tmp_path / "new.pub").read_bytes()).key


@pytest.mark.parametrize("name", ["new.key", "new.pub"])
def test_a_key_is_never_replaced(tmp_path: Path, name: str) -> None:
    desk = Desk(tmp_path)
    desk.write(name, b"precious")
    ended = desk.run("keygen", "-o", "new", "--no-password")
    assert ended.status == ExitCode.USAGE and "exists already" in ended.err
    assert desk.names() == [name] and (tmp_path / name).read_bytes() == b"precious"


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (tmp_path / "new.key").symlink_to("elsewhere")
    assert desk.run("keygen", "-o", "new", "--no-password").status == ExitCode.USAGE
    assert desk.names() == ["new.key"]


def test_half_a_pair_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    real = Host.link

    def link(self: Host, source: Any, target: Any) -> None:
        if str(target).endswith(".pub"):
            raise OSError(28, "No space left on device")
        real(self, source, target)

    monkeypatch.setattr(Host, "link", link)
    with pytest.raises(OSError, match="No space left"):
        desk.run("keygen", "-o", "new", "--no-password")
    assert desk.names() == []


def test_the_id_is_told_and_the_secret_is_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    ended = desk.run("keygen", "-o", "new", "--no-password", "--output", "json", "--comment", "release key")
    public = PublicKey.parse((tmp_path / "new.pub").read_bytes())
    assert ended.document()["keyId"] == public.key_id and public.comment == "release key"
    secret = (tmp_path / "new.key").read_text().splitlines()[1]
    assert secret not in ended.out + ended.err


@pytest.mark.parametrize("comment", ["two\nlines", "bell\a", "x" * 2000])
def test_a_comment_that_no_reader_takes_is_refused_before_anything_is_written(tmp_path: Path, comment: str) -> None:
    desk = Desk(tmp_path)
    assert desk.run("keygen", "-o", "new", "--no-password", "--comment", comment).status != 0
    assert desk.names() == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.run("keygen", "-o", "new", "--dry-run").status == 0
    assert desk.names() == []


def test_without_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    process = Desk(tmp_path).spawn("keygen", "-o", "new", stdin=subprocess.DEVNULL, start_new_session=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE
    assert b"no terminal" in err and b"--password-file" in err and b"--no-password" in err
    assert os.listdir(tmp_path) == []


def test_with_closed_standard_input_nothing_is_asked(tmp_path: Path) -> None:
    argv = ["sh", "-c", 'exec "$0" -m stratum bundle keygen -o new <&-', sys.executable]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, timeout=60, start_new_session=True)
    assert run.returncode == ExitCode.USAGE and b"no terminal" in run.stderr


def at_a_terminal(path: Path, *words: str, answers: list[str]) -> tuple[int, str]:
    """Run ``stratum bundle`` at a terminal of its own, give each answer when it asks."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(path)
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-m", "stratum", "bundle", *words], environ)
    shown, given, end = b"", 0, time.monotonic() + 90
    try:
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            shown += data
            if given < len(answers) and shown.count(b": ") > given and shown.rstrip(b" ").endswith(b":"):
                os.write(terminal, answers[given].encode() + b"\n")
                given += 1
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    return os.WEXITSTATUS(status), shown.decode()


def test_a_terminal_is_asked_twice_and_does_not_show_the_password(tmp_path: Path) -> None:
    status, shown = at_a_terminal(tmp_path, "keygen", "-o", "new", answers=["hunter two", "hunter two"])
    assert status == 0, shown
    assert "hunter" not in shown
    assert SecretKey.parse((tmp_path / "new.key").read_bytes()).encrypted


@pytest.mark.parametrize(("answers", "why"), [(["one", "two"], "differ"), ([""], "empty")])
def test_passwords_that_are_empty_or_differ_make_no_key(tmp_path: Path, answers: list[str], why: str) -> None:
    status, shown = at_a_terminal(tmp_path, "keygen", "-o", "new", answers=answers)
    assert status == ExitCode.USAGE and why in shown
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("data", ["", "\nsecond line\n", "\r\n"])
def test_an_empty_password_file_makes_no_key(tmp_path: Path, data: str) -> None:
    desk = Desk(tmp_path)
    desk.write("pw", data, 0o600)
    assert desk.run("keygen", "-o", "new", "--password-file", "pw").status == ExitCode.USAGE
    assert desk.run("keygen", "-o", "new", "--password-file", "missing").status == ExitCode.USAGE
    assert desk.names() == ["pw"]


# -- sign -------------------------------------------------------------------------------------------------


def sealed_key(desk: Desk, password: bytes) -> PublicKey:
    """A key with a password that opens fast."""
    secret, public = generate(password, cost=INTERACTIVE)
    desk.write("sealed.key", secret.to_bytes(), 0o600)
    desk.write("sealed.pub", public.to_bytes())
    return public


def test_a_second_signature_goes_beside_the_first_and_changes_nothing_else(desk: Desk, bundle: bytes) -> None:
    other = PublicKey.parse((desk.path / "other.pub").read_bytes()).key_id
    ended = desk.run("sign", "b.tar", "--key", "other.key")
    assert ended.status == 0, ended.err
    before, after = files_of(bundle), files_of((desk.path / "b.tar").read_bytes())
    name = f"index.json.{other}.minisig"
    assert list(after) == ["oci-layout", "index.json", "index.json.minisig", name, *list(before)[3:]]
    assert {key: value for key, value in after.items() if key != name} == before
    for key in ("k.pub", "other.pub"):
        assert desk.run("verify", "b.tar", "--trust", key).status == 0


def test_signing_again_replaces_the_keys_own_signature(desk: Desk, bundle: bytes) -> None:
    assert desk.run("sign", "b.tar", "--key", "other.key").status == 0
    names = list(files_of((desk.path / "b.tar").read_bytes()))
    for key in ("k.key", "other.key"):
        assert desk.run("sign", "b.tar", "--key", key).status == 0
        assert sorted(files_of((desk.path / "b.tar").read_bytes())) == sorted(names)
    assert desk.run("verify", "b.tar", "--trust", "k.pub", "--trust", "other.pub").status == 0


@pytest.mark.parametrize("output", ["u.tar", "u/"])
def test_an_unsigned_bundle_of_each_form_is_signed(desk: Desk, output: str) -> None:
    assert desk.build("-o", output).status == 0
    assert desk.run("verify", output, "--trust", "k.pub").status == ExitCode.NOT_TRUSTED
    ended = desk.run("sign", output, "--key", "k.key", "--output", "json")
    assert ended.status == 0 and ended.document()["file"] == "index.json.minisig"
    assert desk.run("verify", output, "--trust", "k.pub").status == 0


def test_what_is_said_to_be_signed_is_in_the_trusted_comment(desk: Desk, bundle: bytes) -> None:
    text = files_of(bundle)["index.json.minisig"].decode().splitlines()[2]
    pattern = r"trusted comment: timestamp:\d+\tfile:index\.json\tbundle:demo\tversion:1\.0-1\tserial:7\thashed"
    assert re.fullmatch(pattern, text)


def test_a_bundle_that_is_not_whole_is_not_signed(desk: Desk, bundle: bytes) -> None:
    spoiled = bytearray(bundle)
    spoiled[-2000] ^= 1
    desk.write("b.tar", bytes(spoiled))
    assert desk.run("sign", "b.tar", "--key", "other.key").status == ExitCode.BUNDLE_MALFORMED
    assert (desk.path / "b.tar").read_bytes() == bytes(spoiled)


def test_a_full_disk_while_signing_leaves_the_bundle(
    desk: Desk, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Host, file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Host, "fsync", full)
    before = desk.names()
    with pytest.raises(OSError, match="No space left"):
        desk.run("sign", "b.tar", "--key", "other.key")
    assert desk.names() == before and (desk.path / "b.tar").read_bytes() == bundle


def test_a_dry_run_of_sign_changes_nothing(desk: Desk, bundle: bytes) -> None:
    ended = desk.run("sign", "b.tar", "--key", "other.key", "--dry-run")
    assert ended.status == 0 and "would sign" in ended.out
    assert (desk.path / "b.tar").read_bytes() == bundle


def test_the_mode_of_a_signed_file_is_kept(desk: Desk, bundle: bytes) -> None:
    (desk.path / "b.tar").chmod(0o640)
    assert desk.run("sign", "b.tar", "--key", "other.key").status == 0
    assert stat.S_IMODE((desk.path / "b.tar").stat().st_mode) == 0o640


def test_a_link_to_a_bundle_stays_one_when_it_is_signed(desk: Desk, bundle: bytes) -> None:
    (desk.path / "latest.tar").symlink_to("b.tar")
    assert desk.run("sign", "latest.tar", "--key", "other.key").status == 0
    assert (desk.path / "latest.tar").is_symlink()
    assert desk.run("verify", "b.tar", "--trust", "other.pub").status == 0


def test_a_sealed_key_signs_with_its_password_file(desk: Desk, bundle: bytes) -> None:
    sealed_key(desk, b"hunter two")
    desk.write("pw", "hunter two\r\nnot this\n", 0o600)
    ended = desk.run("sign", "b.tar", "--key", "sealed.key", "--password-file", "pw")
    assert ended.status == 0, ended.err
    assert "hunter" not in ended.out + ended.err and "warning" not in ended.err
    assert desk.run("verify", "b.tar", "--trust", "sealed.pub").status == 0


def test_a_wrong_password_signs_nothing_and_is_not_shown(desk: Desk, bundle: bytes) -> None:
    sealed_key(desk, b"hunter two")
    desk.write("pw", "hunter three\n", 0o600)
    ended = desk.run("sign", "b.tar", "--key", "sealed.key", "--password-file", "pw")
    assert ended.status == ExitCode.FAILED and "error[wrong-password]" in ended.err and "hunter" not in ended.err
    assert (desk.path / "b.tar").read_bytes() == bundle


def test_a_sealed_key_asks_at_a_terminal(desk: Desk, bundle: bytes) -> None:
    sealed_key(desk, b"hunter two")
    status, shown = at_a_terminal(desk.path, "sign", "b.tar", "--key", "sealed.key", answers=["hunter two"])
    assert status == 0, shown
    assert "hunter" not in shown


def test_a_sealed_key_without_a_terminal_says_what_to_give(desk: Desk, bundle: bytes) -> None:
    sealed_key(desk, b"hunter two")
    process = desk.spawn("sign", "b.tar", "--key", "sealed.key", stdin=subprocess.DEVNULL, start_new_session=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE and b"--password-file" in err


def test_secrets_that_others_can_read_are_warned_about(desk: Desk, bundle: bytes) -> None:
    sealed_key(desk, b"x")
    desk.write("pw", "x\n", 0o644)
    (desk.path / "sealed.key").chmod(0o644)
    ended = desk.run("sign", "b.tar", "--key", "sealed.key", "--password-file", "pw")
    assert ended.status == 0
    assert "chmod 600 pw" in ended.err and "chmod 600 sealed.key" in ended.err


@pytest.mark.parametrize("key", ["k.pub", "missing.key", "f"])
def test_what_is_no_secret_key_signs_nothing(desk: Desk, bundle: bytes, key: str) -> None:
    ended = desk.run("sign", "b.tar", "--key", key)
    assert ended.status in (ExitCode.FAILED, ExitCode.USAGE) and f": {key}: " in ended.err
    assert (desk.path / "b.tar").read_bytes() == bundle


def test_a_pipe_is_not_signed(desk: Desk) -> None:
    assert desk.run("sign", "-", "--key", "k.key").status == ExitCode.USAGE


# -- verify -----------------------------------------------------------------------------------------------


def verify(desk: Desk, data: bytes, *words: str) -> Ended:
    desk.write("v.tar", data)
    return desk.run("verify", "v.tar", *words)


def test_a_good_bundle_is_said_to_be_good_and_by_whom(desk: Desk, bundle: bytes) -> None:
    public = PublicKey.parse((desk.path / "k.pub").read_bytes())
    ended = verify(desk, bundle, "--trust", "k.pub")
    assert ended.status == 0
    assert f"signature: good, by key {public.key_id}" in ended.out
    assert f"index: sha256:{sha256(files_of(bundle)['index.json'])}" in ended.out
    document = verify(desk, bundle, "--trust", "k.pub", "--output", "json").document()
    assert document["kind"] == "BundleVerification" and document["verified"] is True
    assert document["signers"][0]["keyId"] == public.key_id
    assert document["platforms"] == ["linux/amd64", "linux/arm64"]
    assert document["blobs"] == 6


def test_a_pipe_is_verified(desk: Desk, bundle: bytes) -> None:
    assert desk.run("verify", "-", "--trust", "k.pub", stdin=io.BytesIO(bundle)).status == 0
    ended = desk.run("verify", "-", "--trust", "k.pub", stdin=io.BytesIO(bundle[:-5000]))
    assert ended.status == ExitCode.BUNDLE_MALFORMED


def test_a_directory_is_verified(desk: Desk) -> None:
    assert desk.build("-o", "d/", "--key", "k.key").status == 0
    assert desk.run("verify", "d", "--trust", "k.pub").status == 0


def test_a_key_that_did_not_sign_gives_13(desk: Desk, bundle: bytes) -> None:
    ended = verify(desk, bundle, "--trust", "other.pub")
    assert ended.status == ExitCode.NOT_TRUSTED and "error[unknown-key]" in ended.err


def test_the_hosts_keys_count_only_without_trust(desk: Desk, bundle: bytes, no_keyring: Path) -> None:
    assert verify(desk, bundle).status == ExitCode.NOT_TRUSTED
    no_keyring.mkdir(0o755)
    (no_keyring / "k.pub").write_bytes((desk.path / "k.pub").read_bytes())
    (no_keyring / "k.pub").chmod(0o644)
    assert verify(desk, bundle).status == (0 if os.geteuid() == 0 else ExitCode.NOT_TRUSTED)
    assert verify(desk, bundle, "--trust", "other.pub").status == ExitCode.NOT_TRUSTED


def test_the_signature_of_another_bundle_gives_13(desk: Desk, bundle: bytes) -> None:
    desk.define(DEFINITION, head=BOTH.replace("serial: 7", "serial: 8"))
    assert desk.build("-o", "d/", "--key", "k.key").status == 0
    (desk.path / "d/index.json.minisig").write_bytes(files_of(bundle)["index.json.minisig"])
    ended = desk.run("verify", "d", "--trust", "k.pub")
    assert ended.status == ExitCode.NOT_TRUSTED and "error[bad-signature]" in ended.err


def test_a_flipped_bit_in_any_file_of_the_bundle_is_found(desk: Desk) -> None:
    assert desk.build("-o", "d/", "--key", "k.key").status == 0
    files = [path for path in (desk.path / "d").rglob("*") if path.is_file()]
    assert len(files) == 3 + 6
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        ended = desk.run("verify", "d", "--trust", "k.pub")
        expected = ExitCode.NOT_TRUSTED if path.name.startswith("index.json") else ExitCode.BUNDLE_MALFORMED
        if path.name == "index.json.minisig":
            assert ended.status in (ExitCode.NOT_TRUSTED, 0)  # byte 20 is in the comment that nobody signs
        else:
            assert ended.status == expected, (path, ended.err)
        path.write_bytes(data)
    assert desk.run("verify", "d", "--trust", "k.pub").status == 0


def test_a_bundle_cut_short_at_any_member_is_found(desk: Desk, bundle: bytes) -> None:
    for end in [*range(0, len(bundle) - 1024, 512), len(bundle) - 1024, len(bundle) - 1]:
        ended = verify(desk, bundle[:end], "--trust", "k.pub")
        assert ended.status in (ExitCode.BUNDLE_MALFORMED, ExitCode.NOT_TRUSTED), (end, ended.err)


def test_a_bundle_that_is_not_there_gives_14(desk: Desk) -> None:
    assert desk.run("verify", "missing.tar", "--trust", "k.pub").status == ExitCode.NOT_FOUND


@pytest.mark.parametrize("key", ["missing.pub", "f"])
def test_a_key_that_cannot_be_used_is_named(desk: Desk, bundle: bytes, key: str) -> None:
    ended = verify(desk, bundle, "--trust", "k.pub", "--trust", key)
    assert ended.status in (ExitCode.USAGE, ExitCode.NOT_TRUSTED) and key in ended.err


# -- inspect ----------------------------------------------------------------------------------------------


def test_inspect_says_plainly_whether_anybody_vouches(desk: Desk, bundle: bytes) -> None:
    ended = desk.run("inspect", "b.tar", "--trust", "k.pub")
    assert ended.status == 0 and "signature: good, by key" in ended.out
    for words in ((), ("--trust", "other.pub")):
        ended = desk.run("inspect", "b.tar", *words)
        assert ended.status == 0 and "signature: NOT verified (1 there)" in ended.out
    document = desk.run("inspect", "b.tar", "--output", "json").document()
    assert document["verified"] is False and document["signers"] == [] and document["notVerifiedBecause"]


def test_inspect_shows_components_and_files(desk: Desk, bundle: bytes) -> None:
    out = desk.run("inspect", "b.tar", "--files").out
    assert "bundle: demo 1.0-1 (serial 7)" in out and "platforms: linux/amd64, linux/arm64" in out
    assert "  c 1.6: 3 files" in out
    assert f"    0755 {len(PROGRAM):>10} bin/tool" in out
    assert "bin/link -> tool" in out
    document = desk.run("inspect", "b.tar", "--output", "json", "--files").document()
    (first, second) = document["platforms"]
    assert (first["platform"], second["platform"]) == ("linux/amd64", "linux/arm64")
    assert [item["name"] for item in first["components"]] == ["c", "p"]
    assert first["components"][1]["files"][-1]["path"] == "cni/bin/bridge"
    short = desk.run("inspect", "b.tar", "--output", "json").document()
    assert "files" not in short["platforms"][0]["components"][0]


def test_inspect_reads_a_pipe(desk: Desk, bundle: bytes) -> None:
    ended = desk.run("inspect", "-", stdin=io.BytesIO(bundle))
    assert ended.status == 0 and "linux/amd64:" in ended.out and "linux/arm64:" not in ended.out


# -- extract ----------------------------------------------------------------------------------------------


def tree_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in sorted(path.rglob("*")):
        name = str(item.relative_to(path))
        mode = stat.S_IMODE(item.lstat().st_mode)
        if item.is_symlink():
            found[name] = os.readlink(item)
        else:
            found[name] = (mode, None if item.is_dir() else item.read_bytes())
    return found


WHOLE = {
    "bin": (0o755, None),
    "bin/also": (0o644, b"bridge"),
    "bin/conf": (0o644, b"x"),
    "bin/link": "tool",
    "bin/tool": (0o755, PROGRAM),
    "cni": (0o755, None),
    "cni/bin": (0o755, None),
    "cni/bin/bridge": (0o755, b"bridge"),
}


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("form", ["tar", "pipe", "directory"])
def test_extract_makes_the_tree_of_a_version(desk: Desk, bundle: bytes, form: str, umask: int) -> None:
    source, stdin = "b.tar", None
    if form == "pipe":
        source, stdin = "-", io.BytesIO(bundle)
    if form == "directory":
        assert desk.build("-o", "d/", "--key", "k.key").status == 0
        source = "d"
    before = os.umask(umask)
    try:
        words = ("-o", "out", "--trust", "k.pub", "--platform", "linux/arm64")
        ended = desk.run("extract", source, *words, stdin=stdin)
    finally:
        os.umask(before)
    assert ended.status == 0, ended.err
    assert tree_of(desk.path / "out") == WHOLE
    assert stat.S_IMODE((desk.path / "out").stat().st_mode) == 0o755


def test_extract_takes_one_component(desk: Desk, bundle: bytes) -> None:
    words = ("--component", "p", "--trust", "k.pub", "--platform", "linux/amd64", "--output", "json")
    ended = desk.run("extract", "b.tar", "-o", "out", *words)
    assert ended.status == 0 and ended.document()["components"] == ["p"]
    assert sorted(tree_of(desk.path / "out")) == ["bin", "bin/also", "cni", "cni/bin", "cni/bin/bridge"]
    ended = desk.run(
        "extract", "b.tar", "-o", "out2", "--component", "x", "--trust", "k.pub", "--platform", "linux/amd64"
    )
    assert ended.status == ExitCode.USAGE and "c, p" in ended.err


def test_extract_verifies_unless_told_not_to_and_then_says_so(desk: Desk, bundle: bytes) -> None:
    ended = desk.run("extract", "b.tar", "-o", "out", "--trust", "other.pub", "--platform", "linux/amd64")
    assert ended.status == ExitCode.NOT_TRUSTED and "out" not in desk.names()
    ended = desk.run("extract", "b.tar", "-o", "out", "--insecure-skip-verify", "--platform", "linux/amd64")
    assert ended.status == 0 and "NOT verified" in ended.err
    assert tree_of(desk.path / "out") == WHOLE


@pytest.mark.parametrize("make", ["file", "directory", "link"])
def test_extract_writes_to_a_new_directory_only(desk: Desk, bundle: bytes, make: str) -> None:
    path = desk.path / "out"
    if make == "file":
        path.write_bytes(b"x")
    elif make == "directory":
        path.mkdir()
    else:
        path.symlink_to("/nonexistent")
    ended = desk.run("extract", "b.tar", "-o", "out", "--trust", "k.pub", "--platform", "linux/amd64")
    assert ended.status == ExitCode.USAGE


def test_extract_of_a_damaged_bundle_leaves_nothing(desk: Desk, bundle: bytes) -> None:
    before = desk.names()
    for position in range(len(bundle) - 1500, 6000, -1700):
        spoiled = bytearray(bundle)
        spoiled[position] ^= 1
        for source, stdin in (("s.tar", None), ("-", io.BytesIO(bytes(spoiled)))):
            desk.write("s.tar", bytes(spoiled))
            ended = desk.run(
                "extract", source, "-o", "out", "--trust", "k.pub", "--platform", "linux/amd64", stdin=stdin
            )
            (desk.path / "s.tar").unlink()
            if ended.status == 0:  # a byte of the other platform's, or of padding
                assert tree_of(desk.path / "out") == WHOLE
                subprocess.run(["rm", "-r", str(desk.path / "out")], check=True)
            else:
                assert ended.status == ExitCode.BUNDLE_MALFORMED, ended.err
            assert desk.names() == before


def test_extract_of_a_platform_that_is_not_there(desk: Desk, bundle: bytes) -> None:
    ended = desk.run("extract", "b.tar", "-o", "out", "--trust", "k.pub", "--platform", "linux/riscv64")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and "only for linux/amd64, linux/arm64" in ended.err
    assert desk.run("extract", "b.tar", "-o", "out", "--platform", "arm64").status == ExitCode.USAGE


def test_a_dry_run_of_extract_writes_nothing(desk: Desk, bundle: bytes) -> None:
    before = desk.names()
    ended = desk.run("extract", "b.tar", "-o", "out", "--trust", "k.pub", "--platform", "linux/amd64", "--dry-run")
    assert ended.status == 0 and "would unpack c 1.6" in ended.out
    assert desk.names() == before


# -- the whole command line -------------------------------------------------------------------------------


def cli(desk: Desk, *words: str) -> subprocess.CompletedProcess[bytes]:
    process = desk.spawn(*words)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.parametrize("words", [("--help",), *((name, "--help") for name in ("keygen", "build", "sign", "verify"))])
def test_help_names_the_exit_codes(desk: Desk, words: tuple[str, ...]) -> None:
    run = cli(desk, *words)
    assert run.returncode == 0 and b"exit status:" in run.stdout and b"bundle not trusted" in run.stdout


def test_an_error_is_json_too(desk: Desk, bundle: bytes) -> None:
    run = cli(desk, "verify", "b.tar", "--trust", "other.pub", "--output", "json")
    assert run.returncode == ExitCode.NOT_TRUSTED
    assert json.loads(run.stdout)["error"]["reference"] == "unknown-key"


def test_quiet_and_debug_may_stand_behind_the_subcommand(desk: Desk, bundle: bytes) -> None:
    assert cli(desk, "verify", "b.tar", "--trust", "k.pub", "--quiet").returncode == 0
    assert b"Traceback" in cli(desk, "verify", "b.tar", "--trust", "other.pub", "--debug").stderr


def test_a_missing_subcommand_is_a_usage_error(desk: Desk) -> None:
    assert cli(desk).returncode == ExitCode.USAGE
    assert cli(desk, "frobnicate").returncode == ExitCode.USAGE
