"""The node's own CA, and the verdict on certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.errors import StratumError
from stratum.trust import certificates

NOW = 1_800_000_000.0
HOUR = 3600.0


def made(now: float = NOW) -> certificates.Authority:
    return certificates.make_authority(now, "stratum-admin", "stratum-admins")


def test_a_clock_that_is_set_back_by_hours_does_not_make_it_one_of_the_future() -> None:
    """Row 46: local time read as UTC is off by up to 14 hours."""
    found = made()
    for pem in (found.ca, found.certificate):
        assert certificates.why_unusable(pem, NOW - 14 * HOUR) is None
        assert certificates.why_unusable(pem, NOW + 9 * 365 * 24 * HOUR) is None


def test_each_reason_is_named_with_the_clock() -> None:
    pem = made().certificate
    early = certificates.why_unusable(pem, NOW - 48 * HOUR)
    late = certificates.why_unusable(pem, NOW + 11 * 365 * 24 * HOUR)
    assert early == "not valid before 2027-01-14 08:00:00 UTC, and the clock says 2027-01-13 08:00:00 UTC"
    assert late is not None and late.startswith("expired at 2037-") and "the clock says 2038-" in late
    assert certificates.why_unusable(pem, NOW, "somebody") == "it is for stratum-admin, not for somebody"
    assert certificates.why_unusable(pem, NOW, "stratum-admin") is None
    assert certificates.is_premature(pem, NOW - 48 * HOUR) and not certificates.is_premature(pem, NOW)


def test_the_client_is_of_its_ca_and_of_no_other() -> None:
    one, other = made(), made()
    assert certificates.issued_by(one.certificate, one.ca)
    assert certificates.issued_by(one.certificate, other.ca + one.ca)
    assert not certificates.issued_by(one.certificate, other.ca)
    assert certificates.matches_key(one.certificate, one.key)
    assert not certificates.matches_key(one.certificate, other.key)
    assert not certificates.matches_key(one.certificate, b"no key")


def test_a_certificate_whose_name_is_broken_is_a_verdict_and_no_crash() -> None:
    """A server gives the kubelet its certificate, and whoever looks at it is a supervisor that must go on."""
    der = ssl.PEM_cert_to_DER_cert(made().certificate.decode()).replace(b"stratum-admin", b"stratum-adm\xff\xff")
    why = certificates.why_unusable(ssl.DER_cert_to_PEM_cert(der).encode(), NOW, "stratum-admin")
    assert why is not None and why.startswith("not a certificate that can be read: ")


def test_a_key_of_an_unknown_curve_belongs_to_no_certificate() -> None:
    key = """-----BEGIN EC PRIVATE KEY-----
MD4CAQEEDqA+Kpz0zPacRYVq8komoAcGBSuBBAAGoSADHgAEs+0llz9WiQYAsGIx
0BNnccHdotBXvher6KqYFg==
-----END EC PRIVATE KEY-----
"""  # secp112r1
    assert not certificates.matches_key(made().certificate, key.encode())


def test_the_key_is_in_no_representation() -> None:
    assert b"PRIVATE" in made().key and "PRIVATE" not in repr(made())


def test_openssl_takes_the_pair_and_verifies_it(tmp_path: Path) -> None:
    found = made()
    (tmp_path / "pair.pem").write_bytes(found.certificate + found.key)
    context = ssl.create_default_context(cadata=found.ca.decode())
    context.load_cert_chain(tmp_path / "pair.pem")


@pytest.mark.parametrize("pem", [b"", b"text", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_unusable_and_no_ca(pem: bytes) -> None:
    assert "PEM" in str(certificates.why_unusable(pem, NOW))
    with pytest.raises(StratumError) as caught:
        certificates.check_ca(pem, "/root/ca.crt")
    assert caught.value.reference == "ca-unreadable" and "/root/ca.crt" in caught.value.message


@settings(max_examples=50)
@given(st.binary(max_size=200), st.integers(0, 800))
def test_any_bytes_are_a_verdict_and_no_traceback(noise: bytes, at: int) -> None:
    pem = made_once()
    for content in (noise, b"-----BEGIN CERTIFICATE-----\n" + noise, pem[:at] + noise + pem[at:]):
        certificates.why_unusable(content, NOW)
        certificates.matches_key(content, noise)


_ONCE: list[bytes] = []


def made_once() -> bytes:
    if not _ONCE:
        _ONCE.append(made().certificate)
    return _ONCE[0]
