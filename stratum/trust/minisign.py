"""minisign's own formats: public keys, signatures and secret keys, as bytes in and objects or a verdict out.

The formats are those of https://jedisct1.github.io/minisign/ ("Signature format", "Public key format",
"Secret key format"), checked against the ``minisign`` program in both directions. A signature covers the file
(``Ed``, legacy) or its BLAKE2b-512 hash (``ED``); a second, global signature covers the first one and the
trusted comment. Nothing here reads or writes a file.

cryptography is imported when first used: only commands that sign or verify pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from stratum import boot
from stratum.errors import NotTrustedError, StratumError
from stratum.trust.scrypt import INTERACTIVE, SENSITIVE, Cost
from stratum.trust.textform import check_comment, decode, encode, split_lines, take_comment

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "INTERACTIVE",
    "SENSITIVE",
    "PublicKey",
    "SecretKey",
    "Signature",
    "generate",
    "sign",
    "verify_legacy",
    "verify_signature",
]

# minisign's own limits (COMMENTMAXBYTES, TRUSTEDCOMMENTMAXBYTES), then those of a whole file of each kind.
COMMENT_LIMIT = 1024
TRUSTED_COMMENT_LIMIT = 8192
KEY_FILE_LIMIT = 4096
SIGNATURE_FILE_LIMIT = 16384

_LEGACY = b"Ed"
_HASHED = b"ED"
_CHECKSUM = b"B2"
_SCRYPT = b"Sc"
_NO_KDF = b"\0\0"
_UNTRUSTED = "untrusted comment: "
_TRUSTED = "trusted comment: "
_TIMESTAMP = re.compile(r"(?:^|\t)timestamp:([0-9]{1,12})(?:\t|$)")
_NUMBER = 8  # bytes of a key's number
_SEALED = _NUMBER + 64 + 32  # key number, Ed25519 secret and public key, checksum
# Points of small order: such a public key accepts signatures that anybody can make. libsodium refuses them
# too. Curve25519 has eight; these are their y coordinates, little-endian, with the two that are not reduced.
_WEAK_Y = frozenset(
    [
        bytes(32),
        (1).to_bytes(32, "little"),
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
        (2**255 - 20).to_bytes(32, "little"),
        (2**255 - 19).to_bytes(32, "little"),
        (2**255 - 18).to_bytes(32, "little"),
    ]
)


def _bad_key(why: str) -> NotTrustedError:
    return NotTrustedError(
        "malformed-key", f"not a minisign public key: {why}", hint="copy the .pub file again, as its owner published it"
    )


def _bad_signature(why: str) -> NotTrustedError:
    return NotTrustedError(
        "malformed-signature", f"not a minisign signature: {why}", hint="copy the bundle with its .minisig files again"
    )


def _bad_secret(why: str) -> StratumError:
    return StratumError("malformed-secret-key", f"not a minisign secret key: {why}", hint="is it the .key file?")


def _name(number: bytes) -> str:
    return f"{int.from_bytes(number, 'little'):016X}"


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key with minisign's key number."""

    number: bytes
    key: bytes
    comment: str = ""

    @property
    def key_id(self) -> str:
        """The key's id as minisign prints it: 16 upper-case hexadecimal digits."""
        return _name(self.number)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key's number and bytes; unlike the id, nobody can make another key that has it."""
        return "sha256:" + hashlib.sha256(self.number + self.key).hexdigest()

    @property
    def text(self) -> str:
        """The key as one base64 word, the form of ``minisign -P``."""
        return encode(_LEGACY + self.number + self.key)

    def to_bytes(self) -> bytes:
        """The key as a ``.pub`` file."""
        comment = self.comment or f"minisign public key {self.key_id}"
        return f"{_UNTRUSTED}{comment}\n{self.text}\n".encode()

    @classmethod
    def parse(cls, data: bytes) -> PublicKey:
        """Parse a ``.pub`` file, or the bare base64 word; raises :class:`NotTrustedError`."""
        try:
            if data.startswith(_UNTRUSTED.encode()):
                first, word = split_lines(data, 2, KEY_FILE_LIMIT)
                comment = take_comment(first, _UNTRUSTED, COMMENT_LIMIT)
            else:
                (word,), comment = split_lines(data, 1, KEY_FILE_LIMIT), ""
            found = decode(word, 2 + _NUMBER + 32)
            if found[:2] != _LEGACY:
                raise ValueError(f"unknown algorithm {found[:2]!r}")
            number, key = found[2 : 2 + _NUMBER], found[2 + _NUMBER :]
            if key[:31] + bytes([key[31] & 0x7F]) in _WEAK_Y:
                raise ValueError("the key is a point of small order, for which anybody can sign")
        except ValueError as error:
            raise _bad_key(str(error)) from None
        return cls(number, key, comment)


@dataclass(frozen=True)
class Signature:
    """A minisign signature; the trusted comment is only to be trusted once the signature is verified."""

    number: bytes
    signature: bytes
    hashed: bool
    trusted_comment: str
    global_signature: bytes
    comment: str = ""

    @property
    def key_id(self) -> str:
        """The id of the key that is said to have signed."""
        return _name(self.number)

    @property
    def timestamp(self) -> Optional[int]:
        """When the signer says to have signed (seconds since 1970), from the trusted comment."""
        found = _TIMESTAMP.search(self.trusted_comment)
        return int(found.group(1)) if found else None

    def to_bytes(self) -> bytes:
        """The signature as a ``.minisig`` file."""
        word = encode((_HASHED if self.hashed else _LEGACY) + self.number + self.signature)
        return (
            f"{_UNTRUSTED}{self.comment}\n{word}\n{_TRUSTED}{self.trusted_comment}\n{encode(self.global_signature)}\n"
        ).encode()

    @classmethod
    def parse(cls, data: bytes) -> Signature:
        """Parse a ``.minisig`` file; raises :class:`NotTrustedError`."""
        try:
            first, word, third, last = split_lines(data, 4, SIGNATURE_FILE_LIMIT)
            comment = take_comment(first, _UNTRUSTED, COMMENT_LIMIT)
            trusted = take_comment(third, _TRUSTED, TRUSTED_COMMENT_LIMIT)
            found = decode(word, 2 + _NUMBER + 64)
            whole = decode(last, 64)
            if found[:2] not in (_LEGACY, _HASHED):
                raise ValueError(f"unknown algorithm {found[:2]!r}")
        except ValueError as error:
            raise _bad_signature(str(error)) from None
        return cls(found[2 : 2 + _NUMBER], found[2 + _NUMBER :], found[:2] == _HASHED, trusted, whole, comment)


def _public(key: PublicKey) -> Ed25519PublicKey:
    boot.require_compiled(persist=False)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(key.key)


def _private(seed: bytes) -> Ed25519PrivateKey:
    boot.require_compiled(persist=False)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed)


def _public_bytes(private: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _message(data: bytes, hashed: bool) -> bytes:
    return hashlib.blake2b(data).digest() if hashed else data


def verify_signature(key: PublicKey, signature: Signature, data: bytes) -> None:
    """Raise :class:`NotTrustedError` unless ``key`` made ``signature`` over ``data`` and its trusted comment.

    Both kinds, prehashed and legacy. No clock is looked at: a minisign signature does not expire.
    """
    if signature.number != key.number:
        raise NotTrustedError("unknown-key", f"signed by key {signature.key_id}, not by key {key.key_id}")
    public = _public(key)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature.signature, _message(data, signature.hashed))
    except InvalidSignature:
        raise NotTrustedError(
            "bad-signature",
            f"the signature by key {key.key_id} does not match the signed bytes",
            hint="the bundle was changed after it was signed, or the signature is another bundle's",
        ) from None
    try:
        public.verify(signature.global_signature, signature.signature + signature.trusted_comment.encode("utf-8"))
    except InvalidSignature:
        raise NotTrustedError(
            "bad-signature",
            f"the trusted comment of the signature by key {key.key_id} was changed",
            hint="copy the bundle with its .minisig files again",
        ) from None


def verify_legacy(key: PublicKey, signature: Signature, data: bytes) -> None:
    """Like :func:`verify_signature`, for a signature that must be of the legacy kind (``minisign -S -l``)."""
    if signature.hashed:
        raise _bad_signature("prehashed, where a legacy signature was asked for")
    verify_signature(key, signature, data)


@dataclass(frozen=True)
class SecretKey:
    """A secret key as its file holds it: sealed with a password, or open (``minisign -W``)."""

    kdf: bytes
    salt: bytes
    cost: Cost
    sealed: bytes
    comment: str = ""

    def __repr__(self) -> str:
        return f"SecretKey(encrypted={self.encrypted})"

    @property
    def encrypted(self) -> bool:
        """Whether a password is needed."""
        return self.kdf == _SCRYPT

    @property
    def number(self) -> bytes:
        """The key number; only of a key that is not (or no longer) encrypted."""
        return self._open()[:_NUMBER]

    @property
    def key_id(self) -> str:
        """The id of the key pair; only of a key that is not (or no longer) encrypted."""
        return _name(self.number)

    @property
    def public(self) -> PublicKey:
        """The public half; only of a key that is not (or no longer) encrypted."""
        return PublicKey(self.number, self._open()[_NUMBER + 32 : _NUMBER + 64])

    @property
    def seed(self) -> bytes:
        """The Ed25519 seed; only of a key that is not (or no longer) encrypted."""
        return self._open()[_NUMBER : _NUMBER + 32]

    def _open(self) -> bytes:
        if self.encrypted:
            raise StratumError("password-needed", "the secret key is encrypted", hint="give its password")
        return self.sealed

    def to_bytes(self) -> bytes:
        """The key as a ``.key`` file."""
        word = encode(_LEGACY + self.kdf + _CHECKSUM + self.salt + self.cost.to_bytes() + self.sealed)
        return f"{_UNTRUSTED}{self.comment or 'minisign encrypted secret key'}\n{word}\n".encode()

    @classmethod
    def parse(cls, data: bytes) -> SecretKey:
        """Parse a ``.key`` file; raises :class:`StratumError`, whose message never holds the file's bytes."""
        try:
            first, word = split_lines(data, 2, KEY_FILE_LIMIT)
            comment = take_comment(first, _UNTRUSTED, COMMENT_LIMIT)
            found = decode(word, 6 + 32 + 16 + _SEALED)
            if found[:2] != _LEGACY or found[4:6] != _CHECKSUM:
                raise ValueError("unknown algorithm")
            if found[2:4] not in (_SCRYPT, _NO_KDF):
                raise ValueError("unknown key derivation")
            key = cls(found[2:4], found[6:38], Cost.from_bytes(found[38:54]), found[54:], comment)
            if not key.encrypted:
                key._check_pair(zero_checksum=True)
        except ValueError as error:
            raise _bad_secret(str(error)) from None
        return key

    def _check_pair(self, *, zero_checksum: bool) -> None:
        content, checksum = self.sealed[:-32], self.sealed[-32:]
        # minisign writes zeros as the checksum of a key without a password.
        if not (zero_checksum and checksum == bytes(32)):
            wanted = hashlib.blake2b(_LEGACY + content, digest_size=32).digest()
            if not hmac.compare_digest(checksum, wanted):
                raise ValueError("its checksum does not match")
        # Signing with a public half that is another key's would give the secret away.
        if _public_bytes(_private(content[_NUMBER : _NUMBER + 32])) != content[_NUMBER + 32 :]:
            raise ValueError("its public half belongs to another key")

    def decrypt(self, password: bytes) -> SecretKey:
        """The open key; the key itself when it has no password. Raises :class:`StratumError`.

        Takes the time and memory that the file asks for (minisign: 1 GiB).
        """
        if not self.encrypted:
            return self
        try:
            stream = self.cost.derive(password, self.salt, _SEALED)
        except ValueError as error:
            raise _bad_secret(str(error)) from None
        opened = replace(self, kdf=_NO_KDF, sealed=bytes(a ^ b for a, b in zip(self.sealed, stream)))
        try:
            opened._check_pair(zero_checksum=False)
        except ValueError:
            raise StratumError("wrong-password", "the password does not open the secret key") from None
        return replace(opened, salt=bytes(32), cost=Cost(0, 0), sealed=opened.sealed[:-32] + bytes(32))

    def encrypt(self, password: bytes, cost: Cost = SENSITIVE) -> SecretKey:
        """This open key, sealed with ``password``. Takes the time and memory that ``cost`` says."""
        content = self._open()[:-32]
        plain = content + hashlib.blake2b(_LEGACY + content, digest_size=32).digest()
        salt = secrets.token_bytes(32)
        stream = cost.derive(password, salt, _SEALED)
        return replace(self, kdf=_SCRYPT, salt=salt, cost=cost, sealed=bytes(a ^ b for a, b in zip(plain, stream)))


def generate(password: Optional[bytes], *, cost: Cost = SENSITIVE) -> tuple[SecretKey, PublicKey]:
    """A new key pair; without ``password`` the secret key is stored open, as ``minisign -G -W`` does."""
    seed, number = secrets.token_bytes(32), secrets.token_bytes(_NUMBER)
    content = number + seed + _public_bytes(_private(seed))
    secret = SecretKey(_NO_KDF, bytes(32), Cost(0, 0), content + bytes(32))
    public = secret.public
    return (secret if password is None else secret.encrypt(password, cost)), public


def sign(
    secret: SecretKey,
    data: bytes,
    *,
    trusted_comment: Optional[str] = None,
    comment: str = "signature from minisign secret key",
    legacy: bool = False,
) -> bytes:
    """A ``.minisig`` file for ``data``, by an open secret key.

    ``trusted_comment`` is signed too; by default it holds the time, as minisign's does. Raises
    :class:`StratumError` for a comment that no reader would accept.
    """
    if trusted_comment is None:
        trusted_comment = f"timestamp:{int(time.time())}"
    try:
        check_comment(comment, COMMENT_LIMIT)
        check_comment(trusted_comment, TRUSTED_COMMENT_LIMIT)
    except ValueError as error:
        raise StratumError("bad-comment", str(error)) from None
    private = _private(secret.seed)
    made = private.sign(_message(data, not legacy))
    whole = private.sign(made + trusted_comment.encode("utf-8"))
    return Signature(secret.number, made, not legacy, trusted_comment, whole, comment).to_bytes()
