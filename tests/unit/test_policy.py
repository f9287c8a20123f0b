"""The trust policy: which signatures make an index trusted. No file and no clock is involved."""

from __future__ import annotations

import time

import pytest

from stratum.errors import ExitCode, NotTrustedError
from stratum.trust.minisign import PublicKey, Signature, sign
from stratum.trust.policy import verify_index
from tests.bundles import flipped, key_pair

INDEX = b'{"manifests":[]}'
ALICE, ALICE_PUB = key_pair("alice")
BOB, BOB_PUB = key_pair("bob")
EVE, EVE_PUB = key_pair("eve")


def refusal(index: bytes, signatures: list[bytes], keys: list[PublicKey]) -> str:
    with pytest.raises(NotTrustedError) as caught:
        verify_index(index, signatures, keys)
    assert caught.value.exit_code == ExitCode.NOT_TRUSTED
    assert caught.value.hint
    return caught.value.reference


def test_one_good_signature_by_a_trusted_key_is_enough() -> None:
    verdict = verify_index(INDEX, [sign(ALICE, INDEX, trusted_comment="timestamp:1700000000")], [BOB_PUB, ALICE_PUB])
    (signer,) = verdict.signers
    assert (signer.key_id, signer.trusted_comment) == (ALICE_PUB.key_id, "timestamp:1700000000")
    assert signer.timestamp == 1700000000
    assert str(verdict) == ALICE_PUB.key_id


def test_all_trusted_signers_are_named_once() -> None:
    signatures = [sign(ALICE, INDEX, trusted_comment="x")] * 2 + [sign(BOB, INDEX), sign(EVE, INDEX)]
    verdict = verify_index(INDEX, signatures, [ALICE_PUB, BOB_PUB])
    assert [item.key_id for item in verdict.signers] == [ALICE_PUB.key_id, BOB_PUB.key_id]


def test_a_legacy_signature_counts_too() -> None:
    assert verify_index(INDEX, [sign(ALICE, INDEX, legacy=True)], [ALICE_PUB]).signers


def test_no_signature_is_refused() -> None:
    assert refusal(INDEX, [], [ALICE_PUB]) == "unsigned"
    assert refusal(INDEX, [], []) == "unsigned"


def test_a_host_without_keys_trusts_nothing() -> None:
    assert refusal(INDEX, [sign(ALICE, INDEX)], []) == "no-trusted-keys"


def test_a_key_that_is_not_trusted_is_named() -> None:
    assert refusal(INDEX, [sign(EVE, INDEX)], [ALICE_PUB]) == "unknown-key"
    with pytest.raises(NotTrustedError, match=EVE_PUB.key_id):
        verify_index(INDEX, [sign(EVE, INDEX)], [ALICE_PUB])


def test_a_signature_of_another_bundle_is_bad() -> None:
    assert refusal(INDEX, [sign(ALICE, INDEX + b"\n")], [ALICE_PUB]) == "bad-signature"


def test_any_bit_turned_in_the_index_is_noticed() -> None:
    signature = sign(ALICE, INDEX)
    for bit in range(len(INDEX) * 8):
        assert refusal(flipped(INDEX, bit), [signature], [ALICE_PUB]) == "bad-signature"


def test_a_good_signature_does_not_excuse_a_bad_one() -> None:
    good, bad = sign(ALICE, INDEX), sign(BOB, INDEX + b" ")
    for signatures in ([good, bad], [bad, good]):
        assert refusal(INDEX, signatures, [ALICE_PUB, BOB_PUB]) == "bad-signature"
    # But nobody here knows whether a stranger's signature is bad.
    assert verify_index(INDEX, [good, bad], [ALICE_PUB]).signers


def test_a_malformed_signature_is_not_passed_over() -> None:
    good = sign(ALICE, INDEX)
    assert refusal(INDEX, [good, b"rubbish"], [ALICE_PUB]) == "malformed-signature"
    assert refusal(INDEX, [good[:-5], good], [ALICE_PUB]) == "malformed-signature"


def test_a_key_with_the_id_of_a_trusted_one_does_not_pass() -> None:
    forged = PublicKey(ALICE_PUB.number, EVE_PUB.key)
    signature = Signature.parse(sign(EVE, INDEX))
    stolen = Signature(
        ALICE_PUB.number, signature.signature, True, signature.trusted_comment, signature.global_signature
    ).to_bytes()
    assert refusal(INDEX, [stolen], [ALICE_PUB]) == "bad-signature"
    # Two trusted keys may share an id by chance: each is tried.
    assert verify_index(INDEX, [stolen], [ALICE_PUB, forged]).signers
    assert verify_index(INDEX, [sign(ALICE, INDEX)], [forged, ALICE_PUB]).signers


def test_more_than_sixteen_signatures_are_refused_unread() -> None:
    assert refusal(INDEX, [sign(ALICE, INDEX)] * 17, [ALICE_PUB]) == "malformed-signature"


def test_a_clock_at_1970_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = sign(ALICE, INDEX)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert verify_index(INDEX, [signature], [ALICE_PUB]).signers
