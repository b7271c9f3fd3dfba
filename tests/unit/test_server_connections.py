"""Tests of the key by which a server counts connections."""

from __future__ import annotations

import pytest

from chrion.serving.server.connections import client_key


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
    ],
)
def test_addresses_of_one_client_have_one_key(address: str, key: str) -> None:
    """An IPv4 address is a client, and so is a network of 64 bits of IPv6 addresses."""
    assert client_key(address) == key
