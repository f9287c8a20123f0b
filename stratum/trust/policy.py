"""Whether an index is to be trusted. Pure: bytes in, verdict out; no file, no clock, no network.

The rules, in this order:

1. A bundle without a signature is refused (``unsigned``).
2. A host without a trusted key is refused (``no-trusted-keys``).
3. There are at most 16 signatures, and every one can be parsed (``malformed-signature``): a file that cannot
   be read is no reason to go on with the others.
4. A signature that names a trusted key must be good, for each of them (``bad-signature``). One good signature
   does not excuse a bad one: the bundle was changed, or put together from two.
5. A signature by a key that is not trusted here is passed over; a bundle may be signed for other hosts too.
6. At least one signature is good, else the bundle is refused (``unknown-key``).

The exact bytes of the index are verified, before anything parses them. There is no expiry: a host whose clock
stands at 1970 gets the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from stratum.errors import NotTrustedError
from stratum.trust.minisign import PublicKey, Signature, verify_signature

__all__ = ["SIGNATURES_MOST", "Signer", "Verdict", "verify_index"]

SIGNATURES_MOST = 16


@dataclass(frozen=True)
class Signer:
    """A trusted key that signed. ``comment`` is the key's own, from this host; ``timestamp`` the signer's word."""

    key_id: str
    comment: str
    trusted_comment: str
    timestamp: Optional[int] = None


@dataclass(frozen=True)
class Verdict:
    """The index is trusted, because of these."""

    signers: tuple[Signer, ...]

    def __str__(self) -> str:
        return ", ".join(item.key_id for item in self.signers)


def verify_index(index: bytes, signatures: Sequence[bytes], keys: Sequence[PublicKey]) -> Verdict:
    """The verdict on ``index`` by the rules above; raises :class:`NotTrustedError`."""
    if not signatures:
        raise NotTrustedError(
            "unsigned", "the bundle has no signature", hint="get the signed bundle (index.json.minisig is missing)"
        )
    if not keys:
        raise NotTrustedError(
            "no-trusted-keys",
            "this host trusts no key",
            hint="put the publisher's public key into /etc/stratum/trust.d/NAME.pub",
        )
    if len(signatures) > SIGNATURES_MOST:
        raise NotTrustedError(
            "malformed-signature",
            f"{len(signatures)} signatures; at most {SIGNATURES_MOST} are read",
            hint="remove the index.json.KEYID.minisig files that are not needed",
        )
    parsed = [Signature.parse(item) for item in signatures]
    signers = [signer for signature in parsed for signer in _signers(index, signature, keys)]
    if not signers:
        theirs = ", ".join(sorted({item.key_id for item in parsed}))
        ours = ", ".join(sorted({item.key_id for item in keys}))
        raise NotTrustedError(
            "unknown-key",
            f"signed by {theirs}, which this host does not trust (it trusts {ours})",
            hint="if the publisher confirms that key, put it into /etc/stratum/trust.d/NAME.pub",
        )
    return Verdict(tuple(dict.fromkeys(signers)))


def _signers(index: bytes, signature: Signature, keys: Sequence[PublicKey]) -> list[Signer]:
    # The id is eight bytes that the key's owner chose: two keys may have the same, so each is tried.
    failure: Optional[NotTrustedError] = None
    for key in keys:
        if key.number != signature.number:
            continue
        try:
            verify_signature(key, signature, index)
        except NotTrustedError as error:
            failure = error
            continue
        return [Signer(key.key_id, key.comment, signature.trusted_comment, signature.timestamp)]
    if failure:
        raise failure
    return []
