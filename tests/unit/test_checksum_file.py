"""Checksum files in every form that publishers use; what is none of them never passes for one."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.bundle.checksumfile import find_checksum, parse_checksums
from stratum.errors import BundleError

A = "a" * 64
B = "0123456789abcdef" * 4
NAME = "tool-1.0-linux-amd64.tar.gz"

FORMS = {
    "coreutils": f"{A}  {NAME}\n",
    "binary mark": f"{A} *{NAME}\n",
    "one space": f"{A} {NAME}\n",
    "a tab": f"{A}\t{NAME}\n",
    "CRLF": f"{B}  other.tar.gz\r\n{A}  {NAME}\r\n",
    "CR": f"{B}  other.tar.gz\r{A}  {NAME}\r",
    "no line end": f"{A}  {NAME}",
    "dot slash": f"{A}  ./{NAME}\n",
    "path": f"{B}  old/other\n{A}  release/{NAME}\n",
    "BSD": f"SHA256 ({NAME}) = {A}\n",
    "BSD, no spaces": f"SHA256({NAME})= {A}\n",
    "BSD beside others": f"SHA512 ({NAME}) = {B}{B}\nMD5 ({NAME}) = {B[:32]}\nSHA256 ({NAME}) = {A}\n",
    "bare": A,
    "bare, with line end": f"{A}\r\n",
    "upper case": f"{A.upper()}  {NAME}\n",
    "comment and blank lines": f"# sums\n\n{A}  {NAME}\n\n",
    "twice the same": f"{A}  {NAME}\n{A} *{NAME}\n",
    "trailing spaces": f"{A}  {NAME}  \n",
    "clear-signed": (
        "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n"
        f"{B}  other\n{A}  {NAME}\n"
        "-----BEGIN PGP SIGNATURE-----\n\niQEzBAEBCAAdFiEE\n=abcd\n-----END PGP SIGNATURE-----\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_checksum_is_found_in_each_form(form: str) -> None:
    assert find_checksum(FORMS[form].encode(), NAME, "sums").sha256 == A


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + FORMS["coreutils"].encode(),
        codecs.BOM_UTF16_LE + FORMS["CRLF"].encode("utf-16-le"),
        codecs.BOM_UTF16_BE + FORMS["CRLF"].encode("utf-16-be"),
        codecs.BOM_UTF8 + A.encode(),
    ],
)
def test_a_byte_order_mark_is_not_part_of_the_first_line(data: bytes) -> None:
    assert find_checksum(data, NAME, "sums").sha256 == A


REJECTED = {
    "error page": ("<!DOCTYPE html>\n<html>Not Found</html>\n", 1),
    "text after sound lines": (f"{A}  {NAME}\n{B}  other\nsee also https://example.org\n", 3),
    "too short": (f"{B}  other\n{A[:-1]}  {NAME}\n", 2),
    "SHA-512": (f"{A}{A}  {NAME}\n", 1),
    "MD5": (f"{A[:32]}  {NAME}\n", 1),
    "bare among named ones": (f"{B}  other\n{A}\n", 2),
    "two bare ones": (f"{A}\n{B}\n", 1),
    "escaped name": (f"\\{A}  a\\nb\n", 1),
    "name first": (f"{NAME}  {A}\n", 1),
    "signature without its end": ("-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n" + FORMS["coreutils"], 1),
    "they disagree": (f"{A}  {NAME}\n{B}  other\n{B}  {NAME}\n", 3),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_no_checksum_list_is_rejected_with_its_line(case: str) -> None:
    text, line = REJECTED[case]
    with pytest.raises(BundleError) as caught:
        find_checksum(text.encode(), NAME, "https://example.org/sums")
    assert caught.value.message.startswith(f"https://example.org/sums:{line}: ")


@pytest.mark.parametrize("text", ["", "\n\r\n", "# nothing\n", f"{A}  other\n", f"SHA512 ({NAME}) = {A}{A}\n"])
def test_no_line_for_the_file_is_an_error(text: str) -> None:
    with pytest.raises(BundleError) as caught:
        find_checksum(text.encode(), NAME, "sums")
    assert caught.value.reference == "checksum-missing"
    assert NAME in caught.value.message


def test_a_line_for_just_that_name_wins_over_one_in_another_directory() -> None:
    text = f"{B}  debug/{NAME}\n{A}  {NAME}\n"
    assert find_checksum(text.encode(), NAME, "sums").sha256 == A


def test_two_directories_that_disagree_are_an_error() -> None:
    text = f"{B}  debug/{NAME}\n{A}  release/{NAME}\n"
    with pytest.raises(BundleError, match="sums:2"):
        find_checksum(text.encode(), NAME, "sums")


def test_an_error_shows_hostile_lines_escaped_and_short() -> None:
    with pytest.raises(BundleError) as caught:
        parse_checksums(b"\x1b[2J\xff" + "é".encode() + b"x" * 10_000, "sums")
    assert caught.value.message.isascii() and caught.value.message.isprintable()
    assert len(caught.value.message) < 200


def test_a_file_of_any_length_is_not_read() -> None:
    with pytest.raises(BundleError, match="longer than"):
        parse_checksums(b"#" * ((1 << 20) + 1), "sums")


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_noise_gives_a_checksum_only_if_it_holds_one(data: bytes) -> None:
    try:
        found = find_checksum(data, NAME, "sums").sha256
    except BundleError:
        return
    assert found.encode() in data.lower().replace(b"\0", b"")
