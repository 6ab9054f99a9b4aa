"""Which addresses are those of one client."""

import pytest

from dragoman.access.addresses import address_group, without_mapping
from dragoman.access.failures import FailedAttempts
from dragoman.core.errors import RateLimited


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_an_ipv6_client_has_a_network_of_64_bits(host: str, group: str) -> None:
    assert address_group(host) == group


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:a00:1", "10.0.0.1"),
        ("::ffff:0:10.0.0.1", "::ffff:0:10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("::ffff:a proxy's text", "::ffff:a proxy's text"),
    ],
)
def test_ipv4_addresses_of_ipv6_sockets(host: str, expected: str) -> None:
    assert without_mapping(host) == expected


def test_failed_attempts_of_one_network_count_together() -> None:
    failures = FailedAttempts(2, lambda: 0.0)
    failures.add("2001:db8:1:2::1", "invalid")
    failures.add("2001:db8:1:2::2", "invalid")
    with pytest.raises(RateLimited):
        failures.check("2001:db8:1:2::3")
    failures.check("2001:db8:1:3::1")
