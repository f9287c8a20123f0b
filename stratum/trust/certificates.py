"""X.509: a CA of the node's own with one client of it, and why a certificate cannot be used now.

Pure: bytes in, bytes or a verdict out. cryptography is imported when first used.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

from stratum import boot
from stratum.errors import StratumError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["BACKDATED", "Authority", "issued_by", "make_authority", "matches_key", "without_keys", "why_unusable"]

BACKDATED = datetime.timedelta(days=1)  # a clock that read local time as UTC is off by up to 14 hours
_LIFETIME = datetime.timedelta(days=3650)
_SUPPORTED_PEM = b"-----BEGIN CERTIFICATE-----"
_BLOCK = re.compile(_SUPPORTED_PEM + rb".*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Authority:
    """A CA's certificate, and the certificate and key of its only client. The CA's key is gone already."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def make_authority(now: float, client: str, group: str) -> Authority:
    """Make a CA and one client certificate with the common name ``client`` and the organization ``group``.

    ``now`` is in seconds since 1970. Both are valid from a day before it, so that a clock which is set back a few
    hours later does not make them certificates of the future. The CA signs once and its key is never written.
    """
    boot.require_compiled(persist=False)
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    moment = datetime.datetime.fromtimestamp(now, datetime.timezone.utc)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stratum-node-{x509.random_serial_number():x}"[:40])])
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, group),
            x509.NameAttribute(NameOID.COMMON_NAME, client),
        ]
    )

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(moment - BACKDATED)
            .not_valid_after(moment + _LIFETIME)
        )

    def usage(*, ca: bool) -> x509.KeyUsage:
        return x509.KeyUsage(not ca, False, False, False, False, ca, False, False, False)

    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(ca=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        builder(name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return Authority(
        ca.public_bytes(Encoding.PEM),
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def why_unusable(pem: bytes, now: float, name: str = "") -> Optional[str]:
    """Why the first certificate in ``pem`` cannot be used at ``now`` (seconds since 1970); None when it can.

    With ``name`` its common name must be that one.
    """
    try:
        certificate = _load(pem)
    except StratumError as error:
        return error.message
    moment = datetime.datetime.fromtimestamp(now, datetime.timezone.utc)
    begin, end = _validity(certificate)
    if moment < begin:
        return f"not valid before {_say(begin)}, and the clock says {_say(moment)}"
    if moment > end:
        return f"expired at {_say(end)}, and the clock says {_say(moment)}"
    try:
        found = _common_name(certificate)
    except ValueError as error:  # names are parsed when they are asked for
        return f"not a certificate that can be read: {error}"
    if name and found != name:
        return f"it is for {found}, not for {name}"
    return None


def is_premature(pem: bytes, now: float) -> bool:
    """Whether a certificate is one of the future, which is the clock's fault; raises :class:`StratumError`."""
    return datetime.datetime.fromtimestamp(now, datetime.timezone.utc) < _validity(_load(pem))[0]


def issued_by(pem: bytes, ca_pem: bytes) -> bool:
    """Whether one of the CAs in ``ca_pem`` signed the certificate; raises :class:`StratumError` for what is none."""
    certificate = _load(pem)
    boot.require_compiled(persist=False)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

    for ca in _load_all(ca_pem):
        public = ca.public_key()
        if ca.subject != certificate.issuer or certificate.signature_hash_algorithm is None:
            continue
        signed = (certificate.signature, certificate.tbs_certificate_bytes)
        try:
            if isinstance(public, rsa.RSAPublicKey):
                public.verify(*signed, padding.PKCS1v15(), certificate.signature_hash_algorithm)
            elif isinstance(public, ec.EllipticCurvePublicKey):
                public.verify(*signed, ec.ECDSA(certificate.signature_hash_algorithm))
            else:
                continue
            return True
        except InvalidSignature:
            continue
    return False


def matches_key(pem: bytes, key_pem: bytes) -> bool:
    """Whether the private key belongs to the certificate; False for what cannot be read."""
    boot.require_compiled(persist=False)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        private = load_pem_private_key(key_pem, None)
        return private.public_key().public_bytes(*form) == _load(pem).public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm, StratumError):
        return False


def without_keys(pem: bytes) -> bytes:
    """``pem`` as it is; of a file that has a private key too, the certificates alone, for everybody may read those."""
    if b"PRIVATE KEY-----" not in pem:
        return pem
    return b"".join(block + b"\n" for block in _BLOCK.findall(pem))


def check_ca(pem: bytes, where: str) -> None:
    """``pem`` holds at least one certificate, each readable; raises :class:`StratumError`."""
    try:
        _load_all(pem)
    except StratumError as error:
        raise StratumError(
            "ca-unreadable", f"{where}: {error.message}", hint="give the cluster's CA as PEM, not as DER or base64"
        ) from None


def _load(pem: bytes) -> Certificate:
    return _load_all(pem)[0]


def _load_all(pem: bytes) -> list[Certificate]:
    boot.require_compiled(persist=False)
    from cryptography import x509

    parts = pem.split(_SUPPORTED_PEM)[1:]
    try:
        found = [x509.load_pem_x509_certificate(_SUPPORTED_PEM + part) for part in parts]
    except ValueError as error:
        raise StratumError("certificate-unreadable", f"not a certificate in PEM: {error}") from None
    if not found:
        raise StratumError("certificate-unreadable", "no certificate in PEM")
    return found


def _validity(certificate: Certificate) -> tuple[datetime.datetime, datetime.datetime]:
    # not_valid_before_utc is there from cryptography 42 on, and this runs on 38 too.
    if hasattr(certificate, "not_valid_before_utc"):
        return certificate.not_valid_before_utc, certificate.not_valid_after_utc
    utc = datetime.timezone.utc
    return certificate.not_valid_before.replace(tzinfo=utc), certificate.not_valid_after.replace(tzinfo=utc)


def _common_name(certificate: Certificate) -> str:
    from cryptography.x509.oid import NameOID

    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _say(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
