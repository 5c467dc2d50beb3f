"""Which addresses are the public internet: the service fetches on strangers' behalf from nowhere else.

Two tables have to agree, this one and that of Python's `ipaddress`, which differs between its releases. This
one holds whole blocks of IANA's special-purpose registries, parts that are reachable included: no image of
the web lies in them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from vlm.settings import SettingsError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SPECIAL_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private use
            "100.64.0.0/10",  # shared with the provider; metadata services of some clouds
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's own services, on every host of it
            "169.254.0.0/16",  # link-local; metadata services
            "172.16.0.0/12",  # private use
            "192.0.0.0/24",  # protocol assignments; metadata services
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # relays from 6to4
            "192.168.0.0/16",  # private use
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarking
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")  # all else is special or unassigned
_SPECIAL_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments; Teredo among them, whatever it wraps
            "2001:db8::/32",  # documentation
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # of an interface identifier, before the IPv4 address


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """Where images may be fetched from. Without hosts, from any; networks are open beside what is public."""

    hosts: tuple[str, ...] = ()
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    is_public: bool = True  # addresses of the public internet

    @classmethod
    def of(cls, hosts: str, networks: str, *, allow_urls: bool) -> AllowedOrigins:
        """Both comma-separated. Raises SettingsError."""
        named = tuple(host.strip().lower().rstrip(".") for host in hosts.split(",") if host.strip())
        try:
            inner = tuple(ipaddress.ip_network(part.strip()) for part in networks.split(",") if part.strip())
        except ValueError as error:
            raise SettingsError(f"allow_image_networks has a network that is none: {error}") from None
        return cls(named, inner, allow_urls or bool(named))

    def has_host(self, host: str) -> bool:
        """*.name stands for all that is below it."""
        host = host.lower().rstrip(".")
        return not self.hosts or any(
            host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed
            for allowed in self.hosts
        )

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks) or (
            self.is_public and public_address(address)
        )


ANY_PUBLIC = AllowedOrigins()


def public_address(address: Address) -> bool:
    """Reachable for anyone on the internet, and so is every IPv4 address that an IPv6 one wraps."""
    if isinstance(address, ipaddress.IPv4Address):
        return _ordinary(address) and not any(address in network for network in _SPECIAL_V4)
    wrapped = list(_wrapped(address))
    if not all(map(public_address, wrapped)):
        return False
    if address.ipv4_mapped is not None or address in _NAT64:
        return True  # only another spelling of the IPv4 address
    return (
        _ordinary(address)
        and address in _UNICAST_V6
        and not any(address in network for network in _SPECIAL_V6)
    )


def _ordinary(address: Address) -> bool:
    """By Python's table."""
    return address.is_global and not address.is_multicast and not address.is_reserved


def _wrapped(address: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    number = int(address)
    last = ipaddress.IPv4Address(number & 0xFFFF_FFFF)
    if address.ipv4_mapped is not None or address in _NAT64:
        yield last
    if address.sixtofour is not None:
        yield address.sixtofour
    if number >> 32 & 0xFFFF_FFFF in _ISATAP:
        yield last
