"""Addresses as people write them."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import TransportError
from myelin.transport.addresses import explain_bind_failure, format_address, parse_address


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str), st.integers(0, 65535))
def test_addresses_come_back(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == (host, port)


@given(st.text(max_size=20))
def test_anything_else_is_refused_in_words(address: str) -> None:
    refused = None
    try:
        host, port = parse_address(address)
    except TransportError as error:
        refused = error
    if refused is None:
        assert host
        assert 0 <= port <= 65535
    else:
        assert refused.reason == "bind"
        assert refused.hint


@pytest.mark.parametrize(
    ("address", "reason"), [("198.51.100.7:80", "bind"), ("no-such-host.invalid:80", "bind"), ("x", "bind")]
)
def test_why_an_address_cannot_be_bound(address: str, reason: str) -> None:
    try:
        error = explain_bind_failure(address)
    except TransportError as raised:
        error = raised
    assert error.reason == reason
    assert address in error.message


def test_an_address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        assert explain_bind_failure(f"127.0.0.1:{taken.getsockname()[1]}").reason == "address-in-use"
