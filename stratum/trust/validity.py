"""Until when a certificate holds, read without a library: ``status`` must not load one for a date.

Only the two dates are read (RFC 5280, 4.1: Certificate, TBSCertificate, Validity), by the lengths of DER. It decides
nothing: what may be used is a question for :mod:`stratum.trust.certificates`.
"""

from __future__ import annotations

import base64
import binascii
import calendar
import re
import time

__all__ = ["valid_until"]

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17


def valid_until(pem: bytes) -> float:
    """The end of the first certificate in ``pem``, in seconds since 1970. Raises ValueError for what is none."""
    found = _PEM.search(pem)
    if not found:
        raise ValueError("no certificate in PEM")
    try:
        der = base64.b64decode(b"".join(found[1].split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from None
    _, certificate, _ = _take(der, _SEQUENCE)
    _, fields, _ = _take(certificate, _SEQUENCE)
    if fields[:1] == bytes([_VERSION]):
        fields = _take(fields)[2]
    for _ in range(3):  # serial number, algorithm, issuer
        fields = _take(fields)[2]
    _, validity, _ = _take(fields, _SEQUENCE)
    kind, text, _ = _take(_take(validity)[2])
    # RFC 5280, 4.1.2.5: UTCTime up to 2049, its years below 50 are of this century.
    century = b"" if kind != _UTC_TIME else (b"20" if text[:1] < b"5" else b"19")
    return float(calendar.timegm(time.strptime((century + text).decode("ascii"), "%Y%m%d%H%M%SZ")))


def _take(data: bytes, wanted: int = 0) -> tuple[int, bytes, bytes]:
    """The first element's tag and content, and what is behind it."""
    if len(data) < 2 or (wanted and data[0] != wanted):
        raise ValueError("not a certificate in DER")
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("a certificate that is cut short")
    return data[0], data[start : start + length], data[start + length :]
