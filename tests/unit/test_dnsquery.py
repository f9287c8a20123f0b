"""DNS messages: the question that is asked, and what an answer may look like."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.node.dnsquery import AAAA, A, Answer, encode_query, parse_answer
from tests.standins import coredns


def test_a_question_has_the_bytes_of_rfc_1035() -> None:
    assert encode_query(0x1234, "a.bc") == bytes.fromhex("1234 0100 0001 0000 0000 0000 0161 026263 00 0001 0001")
    assert encode_query(1, "a.", AAAA)[-4:] == bytes.fromhex("001c 0001")


@pytest.mark.parametrize("name", ["", ".", "a..b", "x" * 64, "ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        encode_query(1, name)


def answer(records: list[bytes], rcode: int = 0) -> bytes:
    question = encode_query(7, "a.example")[12:]
    return struct.pack(">HHHHHH", 7, 0x8180 | rcode, 1, len(records), 0, 0) + question + b"".join(records)


def test_addresses_are_found_behind_names_written_out_and_pointed_to() -> None:
    pointed = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes([192, 0, 2, 1])
    other = b"\x01x\xc0\x0c" + struct.pack(">HHIH", 5, 1, 60, 2) + b"\xc0\x0c"
    whole = coredns.encode_name("a.example.") + struct.pack(">HHIH", 28, 1, 60, 16) + b"\0" * 15 + b"\1"
    assert parse_answer(answer([pointed, other, whole])) == Answer(7, 0, ("192.0.2.1", "::1"))
    assert parse_answer(answer([], 3)) == Answer(7, 3, ())


def test_a_question_is_no_answer() -> None:
    with pytest.raises(ValueError, match="question"):
        parse_answer(encode_query(1, "a.example", A))


@given(st.binary(max_size=80), st.integers(0, 80))
def test_bytes_of_whatever_kind_are_an_answer_or_a_value_error(noise: bytes, length: int) -> None:
    good = answer([b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes(4)])
    for data in (noise, good[:length], good[:length] + noise):
        try:
            parse_answer(data)
        except ValueError:
            pass
