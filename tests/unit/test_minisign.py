"""minisign's formats, against the ``minisign`` program in both directions, and against malformed input."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.errors import NotTrustedError, StratumError
from stratum.trust.minisign import (
    INTERACTIVE,
    SENSITIVE,
    PublicKey,
    SecretKey,
    Signature,
    generate,
    sign,
    verify_legacy,
    verify_signature,
)
from stratum.trust.scrypt import Cost
from tests.bundles import key_pair

DATA = b"the bytes of an index\n"
PASSWORD = b"correct horse"


def minisign(directory: Path, *arguments: str, feed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("minisign")
    assert program, "the minisign program is needed for these tests: apt-get install minisign"
    return subprocess.run(
        [program, *arguments], cwd=directory, input=feed, capture_output=True, timeout=120, check=False
    )


def must(result: subprocess.CompletedProcess[bytes]) -> bytes:
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


class Keys:
    """A key pair in files ``k.key`` and ``k.pub``, and the open secret key."""

    def __init__(self, directory: Path, password: Optional[bytes]) -> None:
        self.directory = directory
        self.feed = b"" if password is None else password + b"\n"
        self.public = PublicKey.parse((directory / "k.pub").read_bytes())
        self.secret = SecretKey.parse((directory / "k.key").read_bytes()).decrypt(password or b"")


def their_keys(directory: Path, password: Optional[bytes]) -> Keys:
    if password is None:
        must(minisign(directory, "-G", "-W", "-p", "k.pub", "-s", "k.key"))
    else:
        must(minisign(directory, "-G", "-p", "k.pub", "-s", "k.key", feed=(password + b"\n") * 2))
    return Keys(directory, password)


def our_keys(directory: Path, password: Optional[bytes], cost: Cost = INTERACTIVE) -> Keys:
    secret, public = generate(password, cost=cost)
    (directory / "k.key").write_bytes(secret.to_bytes())
    (directory / "k.pub").write_bytes(public.to_bytes())
    return Keys(directory, password)


# Module-wide: a password of the program's costs a second and 1 GiB each time.
@pytest.fixture(scope="module", params=["ours", "ours, password", "theirs", "theirs, password"])
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    make = our_keys if request.param.startswith("ours") else their_keys
    return make(tmp_path_factory.mktemp("keys"), PASSWORD if "password" in request.param else None)


@pytest.mark.parametrize("legacy", [False, True], ids=["prehashed", "legacy"])
def test_the_program_verifies_what_we_sign(keys: Keys, tmp_path: Path, legacy: bool) -> None:
    (tmp_path / "index.json").write_bytes(DATA)
    made = sign(keys.secret, DATA, trusted_comment="demo\tserial:7", legacy=legacy)
    (tmp_path / "index.json.minisig").write_bytes(made)
    public = str(keys.directory / "k.pub")
    assert b"demo\tserial:7" in must(minisign(tmp_path, "-V", "-p", public, "-m", "index.json"))
    assert must(minisign(tmp_path, "-V", "-Q", "-P", keys.public.text, "-m", "index.json"))
    strict = minisign(tmp_path, "-V", "-H", "-p", public, "-m", "index.json")
    assert (strict.returncode == 0) is not legacy


@pytest.mark.parametrize("legacy", [False, True], ids=["prehashed", "legacy"])
def test_we_verify_what_the_program_signs(keys: Keys, tmp_path: Path, legacy: bool) -> None:
    (tmp_path / "index.json").write_bytes(DATA)
    options = ["-S", "-s", str(keys.directory / "k.key"), "-m", "index.json", "-t", "from the program"]
    must(minisign(tmp_path, *options, *(["-l"] if legacy else []), feed=keys.feed))
    signature = Signature.parse((tmp_path / "index.json.minisig").read_bytes())
    assert (signature.hashed, signature.trusted_comment) == (not legacy, "from the program")
    verify_signature(keys.public, signature, DATA)
    if legacy:
        verify_legacy(keys.public, signature, DATA)
    else:
        with pytest.raises(NotTrustedError):
            verify_legacy(keys.public, signature, DATA)
    with pytest.raises(NotTrustedError, match="bad-signature"):
        verify_signature(keys.public, signature, DATA + b"\n")


def test_the_program_opens_our_key_of_its_own_cost(tmp_path: Path) -> None:
    secret, public = generate(PASSWORD, cost=SENSITIVE)
    (tmp_path / "k.key").write_bytes(secret.to_bytes())
    must(minisign(tmp_path, "-R", "-s", "k.key", "-p", "k.pub", feed=PASSWORD + b"\n"))
    assert PublicKey.parse((tmp_path / "k.pub").read_bytes()).text == public.text


def test_a_key_has_the_id_that_the_program_prints(tmp_path: Path) -> None:
    keys = their_keys(tmp_path, None)
    assert keys.public.comment == f"minisign public key {keys.public.key_id}"
    assert re.fullmatch("[0-9A-F]{16}", keys.public.key_id)


def test_an_open_key_is_written_as_the_program_writes_it(tmp_path: Path) -> None:
    keys = their_keys(tmp_path, None)
    assert SecretKey.parse((tmp_path / "k.key").read_bytes()).to_bytes() == (tmp_path / "k.key").read_bytes()
    assert keys.public.to_bytes() == (tmp_path / "k.pub").read_bytes()
    ours, _ = generate(None)
    zeroed = (keys.secret.kdf, keys.secret.salt, keys.secret.cost, keys.secret.sealed[-32:])
    assert (ours.kdf, ours.salt, ours.cost, ours.sealed[-32:]) == zeroed


def test_the_program_takes_the_password_off_our_key(tmp_path: Path) -> None:
    keys = our_keys(tmp_path, PASSWORD)
    must(minisign(tmp_path, "-C", "-W", "-s", "k.key", feed=keys.feed))
    assert SecretKey.parse((tmp_path / "k.key").read_bytes()).public.text == keys.public.text


def test_a_wrong_password_is_told_as_such() -> None:
    secret, _ = generate(PASSWORD, cost=INTERACTIVE)
    with pytest.raises(StratumError, match="wrong-password"):
        secret.decrypt(b"wrong")
    with pytest.raises(StratumError, match="password-needed"):
        sign(secret, DATA)


def test_a_secret_key_does_not_show_itself() -> None:
    secret, _ = key_pair()
    assert secret.seed.hex() not in repr(secret)
    assert base64.b64encode(secret.sealed).decode()[:20] not in repr(secret)


@pytest.mark.parametrize(
    ("cost", "parameters"),
    [
        # libsodium: pickparams() of crypto_pwhash_scryptsalsa208sha256
        (Cost(33554432, 1073741824), (1 << 20, 8, 1)),
        (Cost(524288, 16777216), (1 << 14, 8, 1)),
        (Cost(0, 16777216), (1 << 10, 8, 1)),
        (Cost(1 << 21, 1 << 21), (1 << 11, 8, 32)),
    ],
)
def test_the_cost_gives_libsodiums_parameters(cost: Cost, parameters: tuple[int, int, int]) -> None:
    assert cost.parameters == parameters


@pytest.mark.parametrize("cost", [Cost(1 << 63, 1 << 63), Cost(1 << 40, 1 << 30), Cost(33554432, 1 << 62)])
def test_a_key_file_cannot_ask_for_any_amount_of_memory_or_time(cost: Cost) -> None:
    secret, _ = generate(PASSWORD, cost=INTERACTIVE)
    hungry = SecretKey(secret.kdf, secret.salt, cost, secret.sealed)
    try:
        n, r, p = cost.parameters
    except ValueError:
        with pytest.raises(StratumError, match="malformed-secret-key"):
            SecretKey.parse(hungry.to_bytes()).decrypt(PASSWORD)
    else:
        assert 128 * n * r <= 2 << 30
        assert n * r * p <= 1 << 24


# -- malformed input ------------------------------------------------------------------------------------


def lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def joined(parts: Sequence[bytes]) -> bytes:
    return b"\n".join(parts) + b"\n"


SECRET, PUBLIC = key_pair()
KEY = PUBLIC.to_bytes()
SIGNATURE = sign(SECRET, DATA, trusted_comment="timestamp:1700000000\tserial:1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        KEY[:-10],
        KEY * 2,
        KEY + b"\n",
        b"\xef\xbb\xbf" + KEY,
        KEY.replace(b"untrusted comment: ", b"comment: "),
        KEY.replace(b"minisign", b"mini\x1b[31msign"),
        KEY.replace(b"minisign", b"mini\x00sign"),
        KEY.replace(b"minisign", b"mini\xe2\x80\xa8sign"),
        KEY.replace(b"minisign", b"\xff"),
        b"untrusted comment: " + b"x" * 1025 + b"\n" + lines(KEY)[1] + b"\n",
        joined([lines(KEY)[0], lines(KEY)[1] + b"=="]),
        joined([lines(KEY)[0], b" " + lines(KEY)[1]]),
        joined([lines(KEY)[0], lines(KEY)[1][:-1]]),
        joined([lines(KEY)[0], base64.b64encode(b"ED" + base64.b64decode(lines(KEY)[1])[2:])]),
        b"x" * 5000,
        SIGNATURE,
        SECRET.to_bytes(),
    ],
)
def test_what_is_no_public_key_is_refused(data: bytes) -> None:
    with pytest.raises(NotTrustedError, match="malformed-key") as caught:
        PublicKey.parse(data)
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("top", [0x00, 0x80])
@pytest.mark.parametrize("y", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
def test_a_key_for_which_anybody_can_sign_is_refused(y: int, top: int) -> None:
    point = bytearray(y.to_bytes(32, "little"))
    point[31] |= top
    word = base64.b64encode(b"Ed" + bytes(8) + bytes(point))
    with pytest.raises(NotTrustedError, match="small order"):
        PublicKey.parse(word)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        SIGNATURE[:-1][:-20],
        joined(lines(SIGNATURE)[:2]),
        joined([*lines(SIGNATURE), b""]),
        joined([*lines(SIGNATURE), b"more"]),
        SIGNATURE.replace(b"trusted comment: timestamp", b"timestamp"),
        SIGNATURE.replace(b"\tserial", b"\x07serial"),
        SIGNATURE.replace(b"serial", b"\xc3\x28"),
        SIGNATURE.replace(b"serial", b"s" * 8192),
        SIGNATURE.replace(lines(SIGNATURE)[1], base64.b64encode(b"EX" + base64.b64decode(lines(SIGNATURE)[1])[2:])),
        SIGNATURE.replace(lines(SIGNATURE)[3], lines(SIGNATURE)[3] + b"===="),
        SIGNATURE.replace(lines(SIGNATURE)[3], lines(SIGNATURE)[3][:-4]),
        SIGNATURE + b"x" * 20000,
        KEY,
    ],
)
def test_what_is_no_signature_is_refused(data: bytes) -> None:
    with pytest.raises(NotTrustedError, match="malformed-signature"):
        Signature.parse(data)


def test_a_word_of_base64_has_one_spelling_only() -> None:
    # The last letter of a word with padding has bits that nothing uses.
    word = lines(SIGNATURE)[3]
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = alphabet[alphabet.index(word[-3:-2]) ^ 1 :][:1]
    changed = word[:-3] + other + word[-2:]
    assert base64.b64decode(changed) == base64.b64decode(word)
    with pytest.raises(NotTrustedError, match="canonical"):
        Signature.parse(SIGNATURE.replace(word, changed))


def test_windows_line_ends_are_taken_as_the_program_takes_them(tmp_path: Path) -> None:
    signature = SIGNATURE.replace(b"\n", b"\r\n")
    key = KEY.replace(b"\n", b"\r\n")
    verify_signature(PublicKey.parse(key), Signature.parse(signature), DATA)
    (tmp_path / "f").write_bytes(DATA)
    (tmp_path / "f.minisig").write_bytes(signature)
    (tmp_path / "k.pub").write_bytes(key)
    must(minisign(tmp_path, "-V", "-p", "k.pub", "-m", "f"))


def test_any_bit_turned_in_a_signature_is_noticed() -> None:
    word, last = lines(SIGNATURE)[1], lines(SIGNATURE)[3]
    for line in (word, last):
        raw = base64.b64decode(line)
        for bit in range(0, len(raw) * 8, 5):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(NotTrustedError):
                verify_signature(
                    PUBLIC, Signature.parse(SIGNATURE.replace(line, base64.b64encode(bytes(changed)))), DATA
                )


def test_a_changed_trusted_comment_is_noticed() -> None:
    with pytest.raises(NotTrustedError, match="trusted comment"):
        verify_signature(PUBLIC, Signature.parse(SIGNATURE.replace(b"serial:1", b"serial:2")), DATA)


def test_the_untrusted_comment_is_free() -> None:
    changed = SIGNATURE.replace(b"signature from minisign secret key", "verified by the café".encode())
    verify_signature(PUBLIC, Signature.parse(changed), DATA)


@pytest.mark.parametrize("comment", ["two\nlines", "bell\x07", "x" * 9000, "\u2028"])
def test_a_comment_that_no_reader_would_take_is_not_signed(comment: str) -> None:
    with pytest.raises(StratumError, match="bad-comment"):
        sign(SECRET, DATA, trusted_comment=comment)
    with pytest.raises(StratumError, match="bad-comment"):
        sign(SECRET, DATA, comment=comment)


def test_a_signature_tells_when_it_was_made() -> None:
    assert Signature.parse(SIGNATURE).timestamp == 1700000000
    assert Signature.parse(sign(SECRET, DATA, trusted_comment="no time")).timestamp is None
    assert Signature.parse(sign(SECRET, DATA)).timestamp is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: b"XX" + raw[2:],
        lambda raw: raw[:2] + b"Xx" + raw[4:],
        lambda raw: raw[:4] + b"B3" + raw[6:],
        lambda raw: raw[:-1] + b"\1",  # a checksum that is neither right nor absent
        lambda raw: raw[:94] + bytes(32) + raw[126:],  # the public half of another key
    ],
)
def test_a_spoiled_secret_key_is_refused_and_not_shown(spoil: object) -> None:
    assert callable(spoil)
    first, word = lines(SECRET.to_bytes())
    changed = base64.b64encode(spoil(base64.b64decode(word)))
    with pytest.raises(StratumError, match="malformed-secret-key") as caught:
        SecretKey.parse(joined([first, changed]))
    assert changed.decode() not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_only_ever_refused(data: bytes) -> None:
    for parse in (PublicKey.parse, Signature.parse, SecretKey.parse):
        with pytest.raises(StratumError):
            parse(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_file_is_refused_or_says_the_same(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([KEY, SIGNATURE]))
    position = data.draw(st.integers(0, len(original) - 1))
    changed = original[:position] + data.draw(st.binary(max_size=3)) + original[position + 1 :]
    try:
        key = PublicKey.parse(changed) if original is KEY else PUBLIC
        signature = Signature.parse(changed) if original is SIGNATURE else Signature.parse(SIGNATURE)
        verify_signature(key, signature, DATA)
    except NotTrustedError:
        return
    assert (key.key, signature.signature) == (PUBLIC.key, Signature.parse(SIGNATURE).signature)
